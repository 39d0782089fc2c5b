"""Thoughts over HTTP: apart from the answer, whole and streamed, with tools and structures after them, and with a budget."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http_server import CHAT, USER, Say, Site, ask, saying, stream
from support.tool_templates import HERMES_TEMPLATE, with_template

from pipedec.core.sampling import ThoughtForm
from pipedec.server.front import Front, ServerSettings
from pipedec.text.tokenizer import Tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
AS_SCHEMA = {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}}
THOUGHT = "<think>\nIt is round.\n</think>\n\n"
ENDS = {  # what templates write at the end of a prompt
    "model": "",
    "template": "<think>\n",
    "switch": "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}",
}


@pytest.fixture(scope="module")
def say(tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Say]:
    """Answers behind a template that ends as in ``ENDS``."""
    folder, tokenizers = tmp_path_factory.mktemp("templates"), {"plain": Tokenizer(tokenizer_files)}
    for name, end in ENDS.items():
        template = HERMES_TEMPLATE + "{% if add_generation_prompt %}" + end + "{% endif %}{# <think> #}"
        tokenizers[name] = with_template(tokenizer_files, folder / name, template)
    with saying(Front(ServerSettings(("tiny",)), created=1), tokenizers) as say:
        yield say


def message_of(site: Site, **fields: Any) -> dict[str, Any]:
    """The message, which is the same whole and in pieces; of calls their names and arguments."""
    message = ask(site, CHAT, **fields)["choices"][0]["message"]
    deltas = [chunk["choices"][0]["delta"] for chunk in stream(site, CHAT, **fields)]
    for name in ("content", "reasoning_content", "reasoning"):
        assert "".join(delta.get(name) or "" for delta in deltas) == (message.get(name) or "")
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(call["function"]["arguments"] for call in calls) == "".join(
        call["function"]["arguments"] for call in message.get("tool_calls", ())
    )
    return message


@pytest.mark.parametrize(("template", "text"), [("model", THOUGHT), ("template", "It is round.</think>"), ("switch", THOUGHT)])
def test_a_thought_comes_apart_from_the_answer(say: Say, template: str, text: str) -> None:
    message = message_of(say(template, f"{text}A wheel."))
    assert (message["reasoning_content"], message["reasoning"], message["content"]) == ("It is round.",) * 2 + ("A wheel.",)


def test_an_answer_without_a_thought_has_no_field_for_it(say: Say) -> None:
    for template, text in (("model", "A wheel."), ("plain", THOUGHT)):
        message = message_of(say(template, text))
        assert message["content"] == text and "reasoning_content" not in message


def test_a_thought_that_the_variables_of_the_template_switch_off_is_not_waited_for(say: Say) -> None:
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        site = say("switch", "A wheel.")
        assert message_of(site, **fields)["content"] == "A wheel."
        ask(site, CHAT, **fields, **AS_SCHEMA, thinking_token_budget=5)
        assert site.engine.requests[-1].sampling.structured_outputs.thought is None


def test_thoughts_are_left_out_if_they_are_not_wanted(say: Say) -> None:
    message = message_of(say("model", f"{THOUGHT}A wheel."), include_reasoning=False)
    assert message["content"] == "A wheel." and "reasoning_content" not in message


def test_a_thought_that_never_ends_is_no_answer(say: Say) -> None:
    message = message_of(say("template", "It is round, and"))
    assert (message["reasoning_content"], message["content"]) == ("It is round, and", "")


def test_a_call_after_a_thought_is_read_and_one_in_a_thought_is_not(say: Say) -> None:
    message = message_of(say("template", f"I say {CALL}.</think>\n{CALL}"), tools=TOOLS)
    assert message["reasoning_content"] == f"I say {CALL}." and len(message["tool_calls"]) == 1


def test_a_structure_begins_after_the_thought(say: Say) -> None:
    for template, is_open in (("model", False), ("template", True)):
        site = say(template, "</think>")
        ask(site, CHAT, **AS_SCHEMA)
        structure = site.engine.requests[-1].sampling.structured_outputs
        assert structure.json is not None and structure.thought == ThoughtForm("<think>", "</think>", is_open=is_open)
        ask(site, CHAT, tools=TOOLS, tool_choice="required", thinking_token_budget=7)
        structure = site.engine.requests[-1].sampling.structured_outputs
        assert structure.grammar is not None and structure.thought.max_tokens == 7


def test_a_budget_alone_leaves_the_answer_free(say: Say) -> None:
    site = say("model", "a")
    ask(site, CHAT, thinking_token_budget=0)
    structure = site.engine.requests[-1].sampling.structured_outputs
    assert (structure.json, structure.grammar, structure.thought.max_tokens) == (None, None, 0)


@pytest.mark.parametrize(("template", "budget"), [("plain", 5), ("model", -1), ("model", "x")])
def test_a_budget_that_cannot_be_kept_is_refused(say: Say, template: str, budget: Any) -> None:
    response = say(template, "a").client.post(CHAT, json={"messages": USER, "thinking_token_budget": budget})
    assert response.status_code == 400 and response.json()["error"]["param"] == "thinking_token_budget"


@pytest.mark.parametrize(("reasoning", "is_split"), [("none", False), ("auto", True), ("think", True), ("mistral", False)])
def test_the_parser_can_be_named(tokenizer_files: Path, tmp_path: Path, reasoning: str, is_split: bool) -> None:
    tokenizer = with_template(tokenizer_files, tmp_path / "model", HERMES_TEMPLATE + "{# <think> #}")
    with saying(Front(ServerSettings(("tiny",), reasoning_parser=reasoning)), {"model": tokenizer}) as say:
        message = message_of(say("model", f"{THOUGHT}A wheel."))
    assert ("reasoning_content" in message) == is_split
    assert message["content"] == ("A wheel." if is_split else f"{THOUGHT}A wheel.")
