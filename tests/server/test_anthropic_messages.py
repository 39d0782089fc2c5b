"""Anthropic's API over HTTP: what the model reads of a conversation, the blocks of its answers, whole and streamed; errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from support.http_server import CHAT, Say, Site, saying, served
from support.scripted_engine import ANSWER, attach, in_bursts
from support.tiny_pair import CONTEXT
from support.tool_templates import HERMES_TEMPLATE, THINKING_TEMPLATE, with_template

from pipedec.core.errors import QueueFull, RankLost, UserError
from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
USER = {"role": "user", "content": "hello"}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "Today's", "input_schema": SCHEMA}
TIME = {"name": "time", "input_schema": {"type": "object"}}
TOOLS = [WEATHER, TIME]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
BAD_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": Köln}}\n</tool_call>'
LOOK = {"type": "text", "text": "I look."}
WEATHER_USE = {"type": "tool_use", "name": "weather", "input": {"city": "Köln"}}
TIME_USE = {"type": "tool_use", "name": "time", "input": {}}
THOUGHT = {"type": "thinking", "thinking": "Hm, rain?"}
NAMES_TEMPLATE = "{# tools #}{% for one in messages %}{{ one.content }} {{ one.role }} {{ one.name }}. {% endfor %}"


@pytest.fixture(scope="module")
def say(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Say]:
    """Answers behind the template that a test names."""
    folder = tmp_path_factory.mktemp("templates")
    templates = {"tools": HERMES_TEMPLATE, "names": NAMES_TEMPLATE}
    tokenizers = {name: with_template(tokenizer_files, folder / name, template) for name, template in templates.items()}
    tokenizers["thoughts"] = with_template(tokenizer_files, folder / "thoughts", THINKING_TEMPLATE, "<think>", "</think>")
    tokenizers["none"] = Tokenizer(tokenizer_files)
    with saying(Front(ServerSettings(("tiny", "small"), max_body_bytes=1_000_000), created=1), tokenizers) as say:
        yield say


def filled(fields: dict[str, Any], path: str = MESSAGES) -> dict[str, Any]:
    return {"model": "tiny", "messages": [USER]} | ({"max_tokens": 500} if path == MESSAGES else {}) | fields


def ask(site: Site, **fields: Any) -> dict[str, Any]:
    """The message that answers."""
    response = site.client.post(MESSAGES, json=filled(fields))
    assert response.status_code == 200, response.text
    return response.json()


def events(text: str) -> list[dict[str, Any]]:
    """The data of a stream's events, each of which has the name of its type."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def stream(site: Site, **fields: Any) -> list[dict[str, Any]]:
    response = site.client.post(MESSAGES, json=filled(fields | {"stream": True}))
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events(response.text)


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of a stream, whose events come in their order."""
    start, ping, *blocks, delta, stop = parts
    assert (start["type"], ping, delta["type"], stop) == (
        "message_start",
        {"type": "ping"},
        "message_delta",
        {"type": "message_stop"},
    )
    message = start["message"]
    assert message["content"] == [] and message["stop_reason"] is None and message["usage"]["output_tokens"] == 0
    for index, group in groupby(blocks, key=lambda event: event["index"]):
        begun, *deltas, ended = group
        assert index == len(message["content"])
        assert (begun["type"], ended["type"]) == ("content_block_start", "content_block_stop")
        message["content"].append(block_of(begun["content_block"], [one["delta"] for one in deltas]))
    return message | delta["delta"] | {"usage": message["usage"] | delta["usage"]}


def block_of(block: dict[str, Any], deltas: list[dict[str, Any]]) -> dict[str, Any]:
    def text(kind: str, field: str) -> str:
        return "".join(delta[field] for delta in deltas if delta["type"] == kind)

    if block["type"] == "tool_use":
        assert block["input"] == {}
        return block | {"input": json.loads(text("input_json_delta", "partial_json"))}
    if block["type"] == "thinking":
        assert [delta["type"] for delta in deltas].index("signature_delta") == len(deltas) - 1
        signature = text("signature_delta", "signature")
        return block | {"thinking": block["thinking"] + text("thinking_delta", "thinking"), "signature": signature}
    return block | {"text": block["text"] + text("text_delta", "text")}


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """Without what is random: the ids, which must be as Anthropic's and all different."""
    ids = [message["id"], *(block["id"] for block in message["content"] if "id" in block)]
    assert len(set(ids)) == len(ids) and all(one.startswith(("msg_", "toolu_")[index > 0]) for index, one in enumerate(ids))
    content = [{name: value for name, value in block.items() if name not in ("id", "signature")} for block in message["content"]]
    assert all(block["signature"] for block in message["content"] if block["type"] == "thinking")
    return {name: value for name, value in message.items() if name != "id"} | {"content": content}


def prompt_text(site: Site, index: int = -1) -> str:
    return site.engine.tokenizer.decode(site.engine.requests[index].prompt, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("template", "text", "content", "stop_reason"),
    [
        ("none", ANSWER, [{"type": "text", "text": ANSWER}], "end_turn"),
        ("none", "</s>", [], "end_turn"),
        ("tools", "It rains.", [{"type": "text", "text": "It rains."}], "end_turn"),
        ("tools", CALL, [WEATHER_USE], "tool_use"),
        ("tools", f"I look.\n{CALL}\n{OTHER}", [LOOK, WEATHER_USE, TIME_USE], "tool_use"),
        ("tools", BAD_CALL, [WEATHER_USE | {"input": {"arguments": '{"city": Köln}'}}], "tool_use"),
        ("thoughts", f"<think>\nHm, rain?\n</think>\n\nI look.\n{CALL}", [THOUGHT, LOOK, WEATHER_USE], "tool_use"),
        ("thoughts", f"<think>Hm, rain?</think>{CALL}", [THOUGHT, WEATHER_USE], "tool_use"),
    ],
)  # fmt: skip
def test_an_answer_has_its_blocks_in_order_whole_and_streamed(
    say: Say, template: str, text: str, content: list[dict[str, Any]], stop_reason: str
) -> None:
    site, asked = say(template, text), {} if template == "none" else {"tools": TOOLS}
    message = plain(ask(site, **asked))
    assert (message["content"], message["stop_reason"], message["stop_sequence"]) == (content, stop_reason, None)
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert plain(joined(stream(site, **asked))) == message


def test_text_and_thoughts_are_streamed_as_they_come_and_an_input_at_once(say: Say) -> None:
    parts = stream(say("thoughts", f"<think>Hm, rain?</think>I look.\n{CALL}"), tools=TOOLS)
    kinds = [part["delta"]["type"] for part in parts if part["type"] == "content_block_delta"]
    assert kinds.count("thinking_delta") > 1 and kinds.count("text_delta") > 1 and kinds.count("input_json_delta") == 1


def test_a_call_that_is_cut_off_is_an_input_that_no_tool_takes(say: Say) -> None:
    site = say("tools", CALL)
    for message in (ask(site, tools=TOOLS, max_tokens=50), joined(stream(site, tools=TOOLS, max_tokens=50))):
        [block] = message["content"]
        assert message["stop_reason"] == "max_tokens" and list(block["input"]) == ["arguments"]
        assert '{"city": "Köln"}'.startswith(block["input"]["arguments"])


@pytest.mark.parametrize("answer", ["<think>Hm", "Yes"])
def test_a_thought_that_is_cut_off_counts_whole(say: Say, answer: str) -> None:
    site = say("thoughts", answer)
    usage = ask(site)["usage"]
    assert usage["output_tokens_details"]["thinking_tokens"] == (0 if answer == "Yes" else usage["output_tokens"])


def test_usage_divides_the_prompt_into_cached_and_computed_tokens(say: Say) -> None:
    site = say("none", ANSWER)
    message, parts = ask(site), stream(site)
    prompt, answer = len(site.engine.requests[0].prompt), len(site.engine.tokenizer.encode(ANSWER))
    expected = {
        "input_tokens": prompt - 1,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 1,
        "output_tokens": answer,
    }
    assert message["usage"] == expected == joined(parts)["usage"]
    site = say("thoughts", "<think>Hm</think>Yes")
    details = ask(site)["usage"]["output_tokens_details"]
    assert details == {"thinking_tokens": len(site.engine.tokenizer.encode("<think>Hm</think>", add_special_tokens=False))}


@pytest.mark.parametrize(
    ("asked", "stop_reason", "stop_sequence"),
    [
        ({"stop_sequences": ["never", "café"]}, "stop_sequence", "café"),
        ({"max_tokens": 5}, "max_tokens", None),
        ({"messages": [{"role": "user", "content": "a " * 640}], "max_tokens": 32_000}, "model_context_window_exceeded", None),
        ({}, "end_turn", None),
    ],
)
def test_the_reason_for_the_end_is_named(say: Say, asked: dict[str, Any], stop_reason: str, stop_sequence: str | None) -> None:
    site = say("none", ANSWER * (1 if asked == {} else 40))
    for message in (ask(site, **{"max_tokens": 2000, **asked}), joined(stream(site, **{"max_tokens": 2000, **asked}))):
        assert (message["stop_reason"], message["stop_sequence"]) == (stop_reason, stop_sequence)


def test_an_answer_gets_the_tokens_that_the_context_has_room_for(say: Say) -> None:
    site = say("none", ANSWER)
    ask(site, max_tokens=7)
    ask(site, max_tokens=32_000)
    assert [request.sampling.max_tokens for request in site.engine.requests] == [7, CONTEXT - len(site.engine.requests[1].prompt)]


RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
USED = {"role": "assistant", "content": [LOOK, WEATHER_USE | {"id": "toolu_1"}, TIME_USE | {"id": "toolu_2"}]}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"system": "Be kind."}, "<|system|>Be kind.<|user|>hello<|assistant|>"),
        (
            {"system": [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}
                        for text in ("x-anthropic-billing-header: cc_version=2;", "Be", "kind.")]},
            "<|system|>Be\nkind.<|user|>hello<|assistant|>",
        ),
        (
            {"system": "Be", "messages": [{"role": "system", "content": "kind."}, USER, {"role": "system", "content": "Now."}]},
            "<|system|>Be\nkind.<|user|>hello\n<system-reminder>\nNow.\n</system-reminder><|assistant|>",
        ),
        ({"messages": [USER, {"role": "user", "content": [LOOK, LOOK]}]}, "<|user|>hello\nI look.\nI look.<|assistant|>"),
        (
            {"messages": [USER, USED, {"role": "user", "content": [
                {"type": "text", "text": "And now?"}, RESULT | {"content": "rain"},
                RESULT | {"tool_use_id": "toolu_2", "content": [{"type": "text", "text": "12"}, IMAGE], "is_error": True},
                RESULT,
            ]}]},
            f"<|user|>hello<|assistant|>I look.{CALL}{OTHER}<|user|><tool_response>rain</tool_response><|user|>"
            "<tool_response>12\n[image: this model reads only text]</tool_response><|user|><tool_response></tool_response>"
            "<|user|>And now?<|assistant|>",
        ),
        (
            {"messages": [USER, {"role": "assistant", "content": [
                {"type": "redacted_thinking", "data": "x"}, THOUGHT | {"signature": "unsigned"}, LOOK]}, USER]},
            "<|user|>hello<|assistant|><think>Hm, rain?</think>I look.<|user|>hello<|assistant|>",
        ),
        ({"thinking": {"type": "disabled"}}, "<|user|>hello<|assistant|><think></think>"),
        ({"thinking": {"type": "enabled", "budget_tokens": 2000}}, "<|user|>hello<|assistant|>"),
        ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "high"}}, "<|user|>hello<|high|><|assistant|>"),
        ({"output_config": {"effort": "low"}}, "<|user|>hello<|low|><|assistant|>"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "<|user|>hello<|assistant|><think></think>"),
    ],
)  # fmt: skip
def test_the_model_reads_every_kind_of_message(say: Say, fields: dict[str, Any], expected: str) -> None:
    site = say("thoughts", "Hm.")
    ask(site, **fields)
    assert prompt_text(site) == expected
    counted = site.client.post(COUNT, json=filled(fields, COUNT))
    assert counted.json() == {"input_tokens": len(site.engine.requests[0].prompt)}


def test_a_result_has_the_name_of_its_tool_in_every_api(say: Say) -> None:
    site = say("names", "Hm.")
    ask(site, messages=[USER, USED, {"role": "user", "content": [RESULT]}])
    call = {"id": "c", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    results = [{"role": "tool", "tool_call_id": "c", "content": ""}, {"role": "tool", "tool_call_id": "d", "content": ""}]
    for result in results:
        site.client.post(CHAT, json={"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}, result]})
    called = {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": ""}
    site.client.post("/v1/responses", json={"input": [USER, called, output]})
    assert [prompt_text(site, index).endswith("tool weather. ") for index in range(4)] == [True, True, False, True]


def test_an_answer_goes_on_with_the_last_message_of_the_assistant(say: Say) -> None:
    site = say("tools", "Hm.")
    ask(site, messages=[USER, {"role": "assistant", "content": [{"type": "text", "text": "The answer is ("}]}])
    assert prompt_text(site) == "<|user|>hello<|assistant|>The answer is ("


@pytest.mark.parametrize(
    ("choice", "expected", "is_single"),
    [
        ({"type": "auto"}, None, False),
        ({"type": "auto", "disable_parallel_tool_use": True}, None, True),
        ({"type": "any"}, ("weather", "time"), False),
        ({"type": "tool", "name": "time"}, ("time",), True),
        ({"type": "none"}, None, None),
    ],
)
def test_the_choice_of_tools_is_openais(
    say: Say, choice: dict[str, Any], expected: tuple[str, ...] | None, is_single: bool | None
) -> None:
    site = say("tools", f"{CALL}\n{OTHER}")
    uses = [block for block in ask(site, tools=TOOLS, tool_choice=choice)["content"] if block["type"] == "tool_use"]
    structure = site.engine.requests[0].sampling.structured_outputs
    assert (structure is None) == (expected is None)
    if structure is not None and expected is not None:
        assert structure.grammar is not None
        assert [name for name in ("weather", "time") if name in structure.grammar] == list(expected)
    assert len(uses) == {None: 0, True: 1, False: 2}[is_single]
    assert ("Today's" in prompt_text(site)) == (choice["type"] != "none")


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_the_form_of_an_answer_reaches_the_engine(say: Say, field: str) -> None:
    site, form = say("tools", "{}"), {"type": "json_schema", "schema": SCHEMA}
    ask(site, **{field: form if field == "output_format" else {"format": form}})
    structure = site.engine.requests[0].sampling.structured_outputs
    assert structure is not None and structure.json is not None and json.loads(str(structure.json)) == SCHEMA


def test_a_budget_of_thoughts_reaches_the_engine_of_a_model_that_thinks(say: Say) -> None:
    thinking = {"type": "enabled", "budget_tokens": 1024}
    for template in ("thoughts", "tools"):
        site = say(template, "Hm.")
        ask(site, thinking=thinking)
        structure = site.engine.requests[0].sampling.structured_outputs
        limit = None if structure is None or structure.thought is None else structure.thought.max_tokens
        assert limit == (1024 if template == "thoughts" else None)


def test_thoughts_are_left_out_if_the_client_omits_them(say: Say) -> None:
    site, asked = say("thoughts", "<think>Hm</think>Yes."), {"thinking": {"type": "adaptive", "display": "omitted"}}
    for message in (ask(site, **asked), joined(stream(site, **asked))):
        assert message["content"] == [{"type": "text", "text": "Yes."}]


def test_parameters_reach_the_engine(say: Say) -> None:
    site = say("none", ANSWER)
    ask(site, temperature=0.5, top_p=0.9, top_k=7, stop_sequences=["x"], method="pp", priority=-3)
    [request] = site.engine.requests
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.stop) == (0.5, 0.9, 7, ("x",))
    assert (request.method, request.priority) == ("pp", -3)


def test_what_changes_nothing_is_taken(say: Say) -> None:
    site = say("tools", "Hm.")
    response = site.client.post(
        f"{MESSAGES}?beta=true",
        headers={"anthropic-beta": "context-management-2025-06-27", "anthropic-version": "2023-06-01", "x-api-key": "any"},
        json=filled({
            "metadata": {"user_id": "x"}, "service_tier": "auto", "speed": "fast", "cache_control": {"type": "ephemeral"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}, "mcp_servers": [],
            "messages": [{"role": "user", "content": [{"type": "text", "text": "hello", "citations": None}]}],
            "tools": [WEATHER | {"type": "custom", "cache_control": {}, "eager_input_streaming": True, "defer_loading": True}],
            "thinking": {"type": "adaptive"}, "output_config": {"effort": "high", "format": None}, "system": None,
        }),
    )  # fmt: skip
    assert response.status_code == 200 and response.headers["request-id"] == response.headers["x-request-id"]
    assert prompt_text(site).endswith("<|user|>hello<|assistant|>")


def refused(site: Site, body: Any, status: int = 400, path: str = MESSAGES) -> dict[str, str]:
    """The error of a request that does not reach the engine."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = site.client.post(path, content=content, headers={"content-type": "application/json"})
    assert response.status_code == status, response.text
    assert site.engine.requests == [] and len(response.content) < 16_000
    document = response.json()
    assert list(document) == ["type", "error"] and document["type"] == "error" and list(document["error"]) == ["type", "message"]
    assert "\n" not in document["error"]["message"]
    return document["error"]


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"model": None}, "model"),
        ({"messages": "hello"}, "messages must be a list of objects"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "user", "content": []}]}, "messages is empty"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 'messages.0.role is "tool"'),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages.0.content.0: a block of the type image"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "a block of the type document"),
        ({"messages": [{"role": "user", "content": [LOOK, {"type": "text"}]}]}, "messages.0.content.1.text is missing"),
        ({"messages": [{"role": "user", "content": [WEATHER_USE | {"id": "1"}]}]}, "type tool_use in a message of the role user"),
        ({"messages": [{"role": "assistant", "content": [WEATHER_USE | {"id": "1", "input": []}]}]}, "messages.0.content.0"),
        ({"messages": [USER, {"role": "assistant", "content": [WEATHER_USE | {"id": "1"}]}]}, "end with a tool_use"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "surrogate"),
        ({"messages": [{"role": "user", "content": [LOOK] * 5000}]}, "at most 4096"),
        ({"messages": [{"role": "user", "content": [RESULT | {"content": [LOOK] * 2500}] * 2}]}, "at most 4096"),
        ({"tools": [WEATHER] * 129}, "at most 128"),
        ({"messages": [{"role": "user", "content": "a " * 5000}]}, "prompt is too long: "),
        ({"messages": [{"role": "user", "content": "ab" * 1500}]}, "prompt is too long: 3002 tokens > 2047"),
        ({"messages": [{"role": "user", "content": [{"type": "\ud800"}]}]}, "a block of the type \\ud800"),
        ({"tools": [WEATHER | {"type": "\ud800"}]}, "a tool of the type \\ud800"),
        ({"system": [IMAGE]}, "system.0: a block of the type image"),
        ({"system": 5}, "system must be a text or a list of text blocks"),
        ({"stop_sequences": ["x"] * 17}, "stop_sequences"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0: a tool of the type web_search_20250305"),
        ({"tools": [{"name": "x"}]}, "tools.0.input_schema is missing"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools.0.name"),
        ({"tools": [{"name": "x", "input_schema": {"type": "string"}}]}, "tools[0].input_schema must be of the type object"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool"}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "auto"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice names 'x'"),
        ({"tool_choice": {"type": "any"}}, "tool_choice needs tools"),
        ({"output_config": {"format": {"type": "json_schema", "schema": {"type": "x"}}}}, "output_config.format"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"tools": TOOLS, "output_format": {"type": "json_schema", "schema": {}}}, "output_config.format goes without tools"),
        ({"thinking": {"type": "always"}}, "thinking.type"),
        ({"mcp_servers": [{"url": "http://a"}]}, "mcp_servers is not supported"),
        ({"method": "x"}, "method"),
        ({"priority": 2**40}, "priority"),
        ({"seed": 7}, "seed is not supported"),
        ({"n": 2}, "n is not supported"),
        ({"stop": ["x"]}, "stop is not supported"),
    ],
)  # fmt: skip
def test_a_wrong_body_is_refused_with_the_place(say: Say, fields: dict[str, Any], place: str) -> None:
    error = refused(say("tools", "Hm."), filled(fields))
    assert error["type"] == "invalid_request_error" and place in error["message"], error["message"]


def test_a_model_whose_calls_are_not_known_needs_a_choice(say: Say) -> None:
    assert "tool_choice to any or to a tool" in refused(say("names", "Hm."), filled({"tools": TOOLS}))["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"null", b"[1]", b"\xff", b"[" * 9999])
def test_what_is_no_body_is_refused(say: Say, body: bytes) -> None:
    for path in (MESSAGES, COUNT):
        assert refused(say("tools", "Hm."), body, path=path)["type"] == "invalid_request_error"


def test_errors_have_anthropics_types(say: Say) -> None:
    site = say("tools", "Hm.")
    error = refused(site, filled({"model": "claude-sonnet-4-5"}), 404)
    assert error["type"] == "not_found_error" and "'claude-sonnet-4-5': this server has tiny, small" in error["message"]
    assert "ANTHROPIC_MODEL" in error["message"] and "--served-model-name" in error["message"]
    assert refused(site, filled({"model": "x"}, COUNT), 404, COUNT)["type"] == "not_found_error"
    assert refused(site, filled({}), 404, f"{MESSAGES}/batches")["type"] == "not_found_error"
    assert refused(site, filled({"system": "x" * 1_000_000}), 413)["type"] == "request_too_large"
    site.engine.full = QueueFull("1000 requests are unfinished: try again later")
    assert refused(site, filled({}), 503)["type"] == "overloaded_error"
    assert int(site.client.post(MESSAGES, json=filled({})).headers["retry-after"]) > 0
    site.engine.full, site.engine.refusal = None, UserError("the prompt is wrong: mend it")
    response = site.client.post(MESSAGES, json=filled({}))
    assert response.status_code == 400 and response.json()["error"]["message"] == "the prompt is wrong: mend it"


def test_a_key_may_come_as_anthropic_has_it() -> None:
    with served(Front(ServerSettings(("tiny",), api_keys=("secret",)))) as site:
        errors = [site.client.post(MESSAGES, json=filled({}), headers={"x-api-key": key}).json() for key in ("other", "secret")]
        kinds = [error["error"]["type"] for error in errors]
        assert kinds == ["authentication_error", "overloaded_error"]  # nothing is served yet


def test_a_stream_that_fails_ends_with_an_error(say: Say) -> None:
    site = say("none", ANSWER)
    site.engine.allowed, site.engine.failure = 2, RankLost("rank 2 died")
    *parts, error = stream(site)
    assert parts[0]["type"] == "message_start" and "message_stop" not in [part["type"] for part in parts]
    assert error["error"]["type"] == "overloaded_error" and "rank 2 died" in error["error"]["message"]


def test_an_answer_that_a_server_ends_with_itself_can_be_resumed(tokenizer_files: Path) -> None:
    with saying(Front(ServerSettings(("tiny",))), {"none": Tokenizer(tokenizer_files)}) as say:
        site = say("none", ANSWER)
        site.engine.allowed, site.engine.refusal = 0, UserError("the request was cancelled before it began")
        with site.client.stream("POST", MESSAGES, json=filled({"stream": True})) as response:
            pieces = response.iter_text()
            begun = next(pieces)
            site.call(site.front.abort)
            message = joined(events(begun + "".join(pieces)))
    assert (message["content"], message["stop_reason"]) == ([], "pause_turn")


def test_a_silent_stream_pings_with_an_event(say: Say, tokenizer_files: Path) -> None:
    tokenizer = Tokenizer(tokenizer_files)
    front = Front(ServerSettings(("tiny",), ping_seconds=0.05))
    engine = attach(front, tokenizer, lambda request: in_bursts(tokenizer.encode(ANSWER)))
    engine.allowed = 0
    with served(front) as site, site.client.stream("POST", MESSAGES, json=filled({"stream": True})) as response:
        lines = response.iter_lines()
        pings = (line for line in lines if line == "event: ping")
        assert next(pings) and next(pings)
        engine.allowed = 1000
        assert "event: message_stop" in list(lines)


def test_models_are_listed_as_anthropic_has_them(say: Say) -> None:
    site, headers = say("none", ANSWER), {"anthropic-version": "2023-06-01"}
    document = site.client.get("/v1/models", headers=headers).json()
    first, second = document["data"]
    assert document == {"data": [first, second], "has_more": False, "first_id": "tiny", "last_id": "small"}
    assert first == {
        "type": "model", "id": "tiny", "display_name": "tiny", "created_at": "1970-01-01T00:00:01Z", "lifecycle": "active",
        "max_input_tokens": CONTEXT,
    }  # fmt: skip
    assert site.client.get("/v1/models/small", headers=headers).json() == second
    assert site.client.get("/v1/models").json()["object"] == "list"
    assert site.client.get("/v1/models/x", headers=headers).status_code == 404


def test_both_apis_answer_the_same(say: Say) -> None:
    site = say("tools", f"I look.\n{CALL}")
    ask(site, system="Be kind.", tools=TOOLS)
    function = {"type": "function", "function": {"name": "weather", "description": "Today's", "parameters": SCHEMA}}
    time = {"type": "function", "function": {"name": "time", "parameters": {"type": "object"}}}
    messages = [{"role": "system", "content": "Be kind."}, USER]
    site.client.post(CHAT, json={"messages": messages, "tools": [function, time], "max_tokens": 500})
    first, second = site.engine.requests
    assert first.prompt == second.prompt and first.sampling == second.sampling
