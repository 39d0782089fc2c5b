"""Tools and decode threads over HTTP: what the template and the engine get of them, and what comes back, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.http_server import BOTH, CHAT, USER, Say, Site, ask, served, stream, text_of
from support.scripted_engine import ANSWER, attach, in_bursts

from pipedec.directories import reference_threads
from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import load_dialect

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "Of today", "parameters": SCHEMA, "strict": True}}
TIME = {"type": "function", "function": {"name": "time"}}
TOOLS = [WEATHER, TIME]
NAMED = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '{"name": "weather", "parameters": {"city": "Köln"}}'
TOLD = [
    *USER,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}},
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
]  # fmt: skip


def prompt_text(site: Site, index: int) -> str:
    return site.engine.tokenizer.decode(site.engine.requests[index].prompt, skip_special_tokens=False)


def answer_of(document: dict[str, Any]) -> tuple[str | None, list[tuple[str, str]], str]:
    """Content, calls and finish reason of the only choice."""
    (choice,) = document["choices"]
    calls = choice["message"].get("tool_calls", [])
    assert all(call["id"].startswith("call_") and call["type"] == "function" for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return (
        choice["message"]["content"],
        [(call["function"]["name"], call["function"]["arguments"]) for call in calls],
        choice["finish_reason"],
    )


def streamed(parts: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]], str]:
    """The same, from the chunks of a stream."""
    content, calls = "", []
    for part in parts:
        delta = part["choices"][0]["delta"]
        content += delta.get("content") or ""
        for call in delta.get("tool_calls", []):
            if "id" in call:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append((call["function"]["name"], ""))
            name, arguments = calls[call["index"]]
            calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    assert [part["choices"][0]["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    return content, calls, parts[-1]["choices"][0]["finish_reason"]


@pytest.mark.parametrize(
    ("template", "text", "expected"),
    [
        ("hermes", f"I look.\n{CALL}", ("I look.", [("weather", '{"city": "Köln"}')], "tool_calls")),
        ("hermes", f"{CALL}\n{OTHER}", (None, [("weather", '{"city": "Köln"}'), ("time", "{}")], "tool_calls")),
        ("hermes", "It rains.", ("It rains.", [], "stop")),
        ("hermes", '<tool_call>\n{"name": "unknown"}', ('<tool_call>\n{"name": "unknown"}', [], "stop")),
        ("llama3", LLAMA_CALL, (None, [("weather", '{"city": "Köln"}')], "tool_calls")),
        ("llama3", f"Use {LLAMA_CALL}", (f"Use {LLAMA_CALL}", [], "stop")),
    ],
)  # fmt: skip
def test_calls_are_found_in_the_text_whole_and_streamed(say: Say, template: str, text: str, expected: Any) -> None:
    site = say(template, text)
    assert answer_of(ask(site, CHAT, tools=TOOLS)) == expected
    content, calls, reason = streamed(stream(site, CHAT, tools=TOOLS, tool_choice="auto"))
    assert (content or None, calls, reason) == (expected[0] or None, *expected[1:])
    assert all(request.sampling.structured_outputs is None for request in site.engine.requests)


def test_arguments_are_streamed_as_they_come(say: Say) -> None:
    parts = stream(say("hermes", CALL), CHAT, tools=TOOLS)
    deltas = [part["choices"][0]["delta"] for part in parts]
    assert deltas[0]["role"] == "assistant" and deltas[0]["content"] is None
    assert deltas[0]["tool_calls"][0]["function"]["name"] == "weather"
    assert len([delta for delta in deltas if "tool_calls" in delta]) > 3
    assert all("role" not in delta and "content" not in delta for delta in deltas[1:])


def test_an_answer_that_is_cut_within_a_call_says_so(say: Say) -> None:
    site = say("hermes", CALL)
    content, calls, reason = answer_of(ask(site, CHAT, tools=TOOLS, max_tokens=50))
    assert content is None and reason == "length"
    assert '{"city": "Köln"}'.startswith(calls[0][1]) and calls[0][0] == "weather"


def test_only_one_call_if_they_may_not_be_parallel(say: Say) -> None:
    site, asked = say("hermes", f"{CALL}\n{OTHER}"), {"tools": TOOLS, "parallel_tool_calls": False}
    for _, calls, _ in (answer_of(ask(site, CHAT, **asked)), streamed(stream(site, CHAT, **asked))):
        assert [name for name, _ in calls] == ["weather"]


@pytest.mark.parametrize("template", ["hermes", "llama3"])
def test_the_template_shows_the_tools(say: Say, template: str) -> None:
    site = say(template, "Hm.")
    ask(site, CHAT, tools=TOOLS)
    ask(site, CHAT, tools=TOOLS, tool_choice="none")
    shown, hidden = (prompt_text(site, index) for index in range(2))
    rendered = site.engine.tokenizer.render_chat(USER, tools=TOOLS)
    assert shown == rendered and "Of today" in shown and "Of today" not in hidden
    counted = site.client.post("/tokenize", json={"messages": USER, "tools": TOOLS}).json()
    assert counted["tokens"] == list(site.engine.requests[0].prompt)


def test_calls_and_results_reach_the_template(say: Say) -> None:
    site = say("hermes", "It rains.")
    ask(site, CHAT, messages=TOLD, tools=TOOLS)
    assert f"<|assistant|>{CALL}<|user|><tool_response>rain</tool_response>" in prompt_text(site, 0)
    ask(site, CHAT, messages=TOLD)
    assert "<tool_response>rain" in prompt_text(site, 1)


@pytest.mark.parametrize("arguments", ['{"a": ', "[1]", "null", '"x"', "[" * 1200])
@pytest.mark.failure_case("H38")
def test_calls_that_a_model_has_written_badly_reach_the_template_as_text(say: Say, arguments: str) -> None:
    site = say("hermes", "I try again.")
    told = [message | {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}]}
            if message.get("tool_calls") else message for message in TOLD]  # fmt: skip
    ask(site, CHAT, messages=told, tools=TOOLS)
    assert f'"arguments": {json.dumps(arguments)}}}' in prompt_text(site, 0)
    site = say("items", "I try again.")
    ask(site, CHAT, messages=told, tools=TOOLS)
    assert f"<arguments>{arguments}</arguments>" in prompt_text(site, 0)


@pytest.mark.parametrize("template", ["hermes", "llama3", "other", "none"])
def test_a_choice_that_must_call_makes_a_grammar(say: Say, template: str) -> None:
    site = say(template, "Hm.")
    for choice in ("required", NAMED):
        ask(site, CHAT, tools=TOOLS, tool_choice=choice)
        structure = site.engine.requests[-1].sampling.structured_outputs
        assert structure is not None and structure.grammar is not None
        assert ("weather" in structure.grammar) == (choice == "required")
        assert ("<tool_call>" in structure.grammar) == (template == "hermes")
        assert ("parameters" in structure.grammar) == (template == "llama3")


@pytest.mark.failure_case("H28")
def test_a_schema_with_annotations_is_taken_and_one_that_nobody_follows_is_not_compiled(say: Say) -> None:
    site, path = (
        say("hermes", "Hm."),
        {"properties": {"where": {"type": "string", "format": "path"}, "of": {"$ref": "#/$defs/of"}}},
    )
    walk = {"type": "function", "function": {"name": "walk", "parameters": {**path, "$defs": {"of": {"type": "string"}}}}}
    ask(site, CHAT, tools=[WEATHER, walk], tool_choice="required")
    unique = {"type": "function", "function": {"name": "unique", "parameters": {"properties": {"a": {"uniqueItems": True}}}}}
    ask(site, CHAT, tools=[WEATHER, unique])
    assert site.engine.requests[-1].sampling.structured_outputs is None
    error = site.client.post(CHAT, json={"messages": USER, "tools": [walk, unique], "tool_choice": "required"}).json()["error"]
    assert "tools[1].function.parameters: " in error["message"] and "uniqueItems" in error["message"]
    assert "#/properties/a" in error["message"]


def test_a_plain_call_is_read_where_it_was_forced(say: Say) -> None:
    site = say("none", '{"name": "time", "arguments": {}}')
    assert answer_of(ask(site, CHAT, tools=TOOLS, tool_choice="required")) == (None, [("time", "{}")], "tool_calls")


def test_choices_have_their_own_calls(say: Say) -> None:
    parts = stream(say("hermes", CALL), CHAT, tools=TOOLS, n=3)
    for index in range(3):
        own = [part for part in parts if part["choices"][0]["index"] == index]
        assert streamed(own)[1:] == ([("weather", '{"city": "Köln"}')], "tool_calls")
    identities = {call["id"] for part in parts for call in part["choices"][0]["delta"].get("tool_calls", []) if "id" in call}
    assert len(identities) == 3


def test_no_log_probability_is_lost_while_text_is_held_back(say: Say) -> None:
    site = say("hermes", f"I look.\n{CALL}")
    whole = ask(site, CHAT, tools=TOOLS, logprobs=True)["choices"][0]["logprobs"]["content"]
    parts = [part["choices"][0]["logprobs"] for part in stream(site, CHAT, tools=TOOLS, logprobs=True)]
    assert [entry for part in parts if part for entry in part["content"]] == whole


@pytest.mark.parametrize(
    ("template", "body", "field", "place"),
    [
        ("none", {"tools": TOOLS}, "tools", "knows no tools"),
        ("other", {"tools": TOOLS}, "tools", "not known here"),
        ("hermes", {"tool_choice": "required"}, "tool_choice", "needs tools"),
        ("hermes", {"tools": TOOLS, "tool_choice": "always"}, "tool_choice", 'is "always"'),
        ("hermes", {"tools": TOOLS, "tool_choice": {"type": "allowed_tools"}}, "tool_choice", "tool_choice must be none, auto,"),
        ("hermes", {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice", "'x'"),
        ("hermes", {"tools": TOOLS, "tool_choice": {**NAMED, "mode": "any"}}, "tool_choice", "tool_choice: mode is not"),
        ("hermes", {"tools": [WEATHER, WEATHER]}, "tools", "two functions weather"),
        ("hermes", {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "tools.0.function.name"),
        ("hermes", {"tools": [{"type": "retrieval"}]}, "tools", "tools.0.type"),
        ("hermes", {"tools": [{**TIME, "function": {"name": f"f{n}"}} for n in range(129)]}, "tools", "at most 128"),
        ("hermes", {"tools": TOOLS, "threads": "apar"}, "tools", "without threads"),
        ("hermes", {"tools": TOOLS, "response_format": {"type": "json_object"}}, "response_format", "without tools"),
        ("hermes", {"tool_choice": "required", "tools": [{"type": "function", "function": {
            "name": "f", "parameters": {"properties": {"a": {"type": 5}}}}}]}, "tools", "tools[0].function.parameters: "),
        ("hermes", {"tools": [TIME, {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]},
         "tools", "tools[1].function.parameters must be of the type object"),
        ("none", {"messages": TOLD}, "messages", "messages[1]"),
        ("hermes", {"messages": [{"role": "assistant", "tool_calls": [{"type": "custom", "function": {"name": "f"}}]}]},
         "messages", '"custom"'),
        ("hermes", {"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}, "messages", "messages.0"),
    ],
)  # fmt: skip
@pytest.mark.failure_case("H22")
def test_what_cannot_be_is_refused_with_its_field(say: Say, template: str, body: dict[str, Any], field: str, place: str) -> None:
    site = say(template, "")
    response = site.client.post(CHAT, json={"messages": USER, **body})
    error = response.json()["error"]
    assert response.status_code == 400 and site.engine.requests == []
    assert error["param"] == field and place in error["message"] and "\n" not in error["message"]


def test_tools_that_ask_for_nothing_change_nothing(say: Say) -> None:
    site = say("none", "Yes.")
    for body in ({"tools": []}, {"tools": TOOLS, "tool_choice": "none"}, {"tools": None, "tool_choice": "auto"}):
        assert answer_of(ask(site, CHAT, **body)) == ("Yes.", [], "stop")
    assert len({request.prompt for request in site.engine.requests}) == 1
    ask(site, CHAT, tools=TOOLS, tool_choice="none", response_format={"type": "json_object"})
    structure = site.engine.requests[-1].sampling.structured_outputs
    assert structure is not None and structure.json_object


@pytest.fixture(scope="module")
def served_threads() -> Iterator[Site]:
    """With the tokenizer of the shipped model that opens threads."""
    tokenizer = Tokenizer(reference_threads() / "target")
    front = Front(ServerSettings())
    attach(front, tokenizer, lambda request: in_bursts(tokenizer.encode(ANSWER)))
    with served(front) as site:
        yield site


@pytest.fixture
def threads_site(served_threads: Site) -> Site:
    served_threads.engine.reset()
    return served_threads


@BOTH
def test_threads_reach_the_engine_and_come_back(threads_site: Site, path: str) -> None:
    document = ask(threads_site, path, threads="parallel", max_tokens=200)
    assert document["choices"][0]["threads"]["threads"][0]["text"] == ANSWER
    parts = stream(threads_site, path, threads="parallel", max_tokens=200)
    assert text_of(parts) == ANSWER
    news = [one for part in parts for one in part["choices"][0].get("threads", [])]
    assert all((one["path"], one["state"]) == ([], "running") for one in news)
    assert "".join(one["text"] for one in news) == ANSWER
    expected = load_dialect("parallel").to_json()
    assert [(one.threads, one.show_threads) for one in threads_site.engine.requests] == [(expected, False), (expected, True)]


def test_the_template_knows_the_dialect(threads_site: Site) -> None:
    ask(threads_site, CHAT, threads="apar")
    ask(threads_site, CHAT)
    rendered = threads_site.engine.tokenizer.apply_chat_template
    with_dialect, without = (rendered(USER, **given) for given in ({"threads": "apar"}, {}))
    assert [request.prompt for request in threads_site.engine.requests] == [tuple(with_dialect), tuple(without)]
    assert with_dialect != without


def test_log_probabilities_of_threads_come_with_the_end_of_the_stream(threads_site: Site) -> None:
    parts = stream(threads_site, CHAT, threads="parallel", logprobs=True)
    assert [part["choices"][0]["logprobs"] is not None for part in parts] == [False] * (len(parts) - 1) + [True]
    assert len(parts[-1]["choices"][0]["logprobs"]["content"]) == len(threads_site.engine.tokenizer.encode(ANSWER))
