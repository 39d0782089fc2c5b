"""Calls in the text of an answer: however it arrives, what is said and what is called are the same."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tool_templates import HERMES_TEMPLATE, LLAMA3_TEMPLATE, MISTRAL_TEMPLATE

from pipedec.text.tool_calls import HERMES, LLAMA3, PLAIN, CallPart, CallReader, ToolFormat, knows_tools, tool_format

NAMES = ("weather", "add")
FORMS = pytest.mark.parametrize("form", [HERMES, LLAMA3, PLAIN], ids=["hermes", "llama3", "plain"])
ARGUMENTS: list[dict[str, Any]] = [
    {},
    {"city": "Paris"},
    {"text": 'a "quoted" } \\ </tool_call> Größe', "more": [{"a": [1, {}]}]},
]


def read(form: ToolFormat, pieces: Iterable[str]) -> tuple[str, list[list[str]]]:
    """What is said, and of each call its name and arguments."""
    reader = CallReader(form, NAMES)
    said, calls = "", []
    for part in [part for piece in pieces for part in reader.add(piece)] + reader.finish():
        if isinstance(part, CallPart):
            if part.name is not None:
                assert part.index == len(calls)
                calls.append([part.name, ""])
            calls[part.index][1] += part.arguments
        else:
            said += part
    return said, calls


def written(form: ToolFormat, calls: Iterable[tuple[str, dict[str, Any]]]) -> str:
    texts = [json.dumps({"name": name, form.arguments: arguments}, ensure_ascii=False) for name, arguments in calls]
    return form.separator.join(form.begin + text + form.end for text in texts)


@FORMS
@pytest.mark.parametrize("arguments", ARGUMENTS)
def test_calls_are_read_as_they_are_written(form: ToolFormat, arguments: dict[str, Any]) -> None:
    expected = [["add", json.dumps(arguments, ensure_ascii=False)], ["weather", "{}"]]
    assert read(form, [written(form, [("add", arguments), ("weather", {})])]) == ("", expected)


def test_text_before_and_behind_a_call_remains() -> None:
    call = written(HERMES, [("add", {"a": 1})])
    assert read(HERMES, [f"I look.\n\n{call}\n"]) == ("I look.", [["add", '{"a": 1}']])
    assert read(HERMES, [f"{call}\nDone. "]) == ("\nDone.", [["add", '{"a": 1}']])
    assert read(LLAMA3, [f"\n{written(LLAMA3, [('add', {})])} So."]) == (" So.", [["add", "{}"]])


@pytest.mark.parametrize(
    "text",
    [
        "", " ", "Plain text.\n", "a < b <tool", "<tool_call>", "<tool_call>\nno object", "<tool_call>{", '{"name": "other"}',
        '<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', '{"city": "Paris"}', "{not JSON} at all", "{" * 5000,
        '<tool_call>{"name": 5}</tool_call> ', '{"name": "add", "arguments": [1]}',
    ],
)  # fmt: skip
@FORMS
def test_what_calls_no_tool_is_text_to_the_last_character(form: ToolFormat, text: str) -> None:
    assert read(form, [text]) == read(form, text) == (text, [])


@pytest.mark.parametrize(
    "call",
    [
        '{"arguments": {"a": 1}, "name": "add"}', '{"name": "add", "parameters": {"a": 1}}',
        '{ "name" : "add" ,"arguments":{"a": 1} }',
        '{"type": "function", "name": "add", "parameters": {"a": 1}}', '{"name": "add", "arguments": "{\\"a\\": 1}"}',
        '{"name": "add", "arguments": {"a": 1}, "id": {"b": "}"}}',
    ],
)  # fmt: skip
@FORMS
def test_calls_that_are_written_otherwise_are_understood(form: ToolFormat, call: str) -> None:
    text = form.begin + call + form.end
    assert read(form, [text]) == read(form, text) == ("", [["add", '{"a": 1}']])


def test_a_mark_that_is_missing_at_the_end_does_not_matter() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {}}'
    assert read(HERMES, [call * 2]) == ("", [["add", "{}"]] * 2)


def test_arguments_are_shown_as_they_come() -> None:
    reader = CallReader(HERMES, NAMES)
    assert reader.add('Yes. <tool_call>\n{"name": "add", "argu') == ["Yes."]
    assert reader.add('ments": {"a": ') == [CallPart(0, "add", ""), CallPart(0, None, '{"a": ')]
    assert reader.add("12") == [CallPart(0, None, "12")]
    assert reader.add('}}\n</tool_call>\n<tool_call>{"name": "we') == [CallPart(0, None, "}")]
    assert reader.finish() == ['\n<tool_call>{"name": "we']


PIECES = [
    "<tool_call>", "\n", "</tool_call>", "; ", " ", "{", "}", "x", '"',
    '{"name": "add", "arguments": {"a": "}"}}', '{"name": "add"',
]  # fmt: skip


@FORMS
@given(st.lists(st.sampled_from(PIECES), max_size=8).map("".join), st.data())
def test_however_a_text_is_cut_it_is_read_alike(form: ToolFormat, text: str, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == read(form, [text])


def test_templates_tell_their_form() -> None:
    assert tool_format(HERMES_TEMPLATE) == HERMES and tool_format(LLAMA3_TEMPLATE) == LLAMA3
    assert knows_tools(MISTRAL_TEMPLATE) and tool_format(MISTRAL_TEMPLATE) is None
    assert not knows_tools("{{ messages[0].content }}") and tool_format("<tool_call>") is None
