"""Grammars of calls with tagged parameters: strings are text that follows its schema, and nothing in them ends them early."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.tagged import answer_of, call_of
from test_tool_grammars import admits, vocabulary, words
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pipedec.core.sampling import StructuredOutputs
from pipedec.grammar import Grammar, Vocabulary
from pipedec.text.parsers import TOOL_PARSERS
from pipedec.text.parsers.reader import AnswerReader, CallPart
from pipedec.text.parsers.tagged_calls import TaggedCalls
from pipedec.text.tokenizer import Tokenizer

__all__ = ["vocabulary", "words"]  # fixtures
TAGGED = [form for form in TOOL_PARSERS.values() if isinstance(form, TaggedCalls)]
FORMS = pytest.mark.parametrize("form", TAGGED, ids=lambda form: form.name)
TEXT = {"type": "string"}


def grammar_of(form: TaggedCalls, schema: dict[str, Any], vocabulary: Vocabulary) -> Grammar:
    return vocabulary.grammar(StructuredOutputs(grammar=form.grammar({"note": schema}, True)))


def admits_value(form: TaggedCalls, schema: Any, value: str, vocabulary: Vocabulary, words: Tokenizer, **more: Any) -> bool:
    is_text = more.pop("is_text", True)
    grammar = grammar_of(form, {"properties": {"a": schema}, "required": ["a"], **more}, vocabulary)
    return admits(grammar, words, answer_of(form, call_of(form, "note", ("a", value), strings=["a"] if is_text else [])))


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (TEXT, ["", "x", "a\nb", "a < b", "5", "null", '"'], ["</parameter>", "a\n<parameter=a>\n", "a\n</function>"]),
        ({"enum": ["C", "CF", 'a "b"\n']}, ["C", "CF", 'a "b"\n'], ["", "F", "C\n", '"C"']),
        ({"const": "C"}, ["C"], ["D"]),
        ({"type": "string", "maxLength": 3, "minLength": 2}, ["ab", "ü\n😀"], ["a", "abcd"]),
        ({"type": "string", "minLength": 2}, ["ab", "abcdef"], ["a"]),
        ({"type": "string", "pattern": r"^\d{3}/[^/]$"}, ["123/a"], ["123//", "x123/a", "123/ab"]),
        ({"type": "string", "pattern": r"b+\n"}, ["abb\nc"], ["a"]),
        ({"type": "string", "pattern": "^(a|b)$"}, ["a", "b"], ["c", "ab"]),
        ({"type": "string", "pattern": "^a|b$", "maxLength": 2}, ["ax", "xb", "xy"], ["abc"]),  # the pattern is left out
        ({"type": "string", "pattern": r"(?=a)", "format": "date"}, ["b"], []),
        ({"anyOf": [{"enum": ["C"]}, {"type": "null"}, {"type": "string", "maxLength": 1}]}, ["C", "x", "null"], ["CF"]),
        ({"$ref": "#/$defs/unit"}, ["C", "K"], ["F"]),
        ({"allOf": [{"$ref": "#/$defs/unit"}], "description": "A unit."}, ["C", "K"], ["F"]),
    ],
)  # fmt: skip
def test_strings_follow_their_schema(
    schema: dict[str, Any], right: list[str], wrong: list[str], vocabulary: Vocabulary, words: Tokenizer
) -> None:
    def admitted(value: str) -> bool:
        return admits_value(
            TOOL_PARSERS["qwen3_coder"], schema, value, vocabulary, words, **{"$defs": {"unit": {"enum": ["C", "K"]}}}
        )

    assert [value for value in right if not admitted(value)] == []
    assert [value for value in wrong if admitted(value)] == []


@FORMS
def test_no_string_has_what_would_end_it(form: TaggedCalls, vocabulary: Vocabulary, words: Tokenizer) -> None:
    for value in (form.end_parameter.strip(), f"a\n{form.parameter_mark}", f"a\n{form.end_call}"):
        assert not admits_value(form, TEXT, value, vocabulary, words)
        assert not admits_value(form, {"enum": [value, "b"]}, value, vocabulary, words)
    assert admits_value(form, TEXT, f"a {form.end_parameter.strip()[:-1]}\n", vocabulary, words)


@FORMS
@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({"type": "integer"}, "5"), ({}, '"x"'), ({"type": ["string", "integer"]}, '"x"'), ({"type": "boolean"}, "true"),
        ({"type": "array", "items": {"$ref": "#/properties/a/$defs/one"}, "$defs": {"one": {"const": 1}}}, "[1, 1]"),
        ({"type": ["string", "null"]}, "null"),
    ],
)  # fmt: skip
def test_other_values_are_json(form: TaggedCalls, schema: Any, value: str, vocabulary: Vocabulary, words: Tokenizer) -> None:
    assert admits_value(form, schema, value, vocabulary, words, is_text=False)
    if schema.get("type") in ("array", "integer"):
        assert not admits_value(form, schema, "[2]", vocabulary, words, is_text=False)


@FORMS
def test_required_parameters_come_in_order_and_others_may_be_left_out(
    form: TaggedCalls, vocabulary: Vocabulary, words: Tokenizer
) -> None:
    schema = {"properties": {"a": TEXT, "b": TEXT, "c": TEXT}, "required": ["b", "d"]}

    def admitted(keys: str) -> bool:
        parameters = [(key, "1") for key in keys]
        return admits(
            grammar_of(form, schema, vocabulary), words, answer_of(form, call_of(form, "note", *parameters, strings="abc"))
        )

    assert [keys for keys in ("bd", "abd", "bcd", "abcd") if not admitted(keys)] == []
    assert [keys for keys in ("", "b", "a", "ab", "bad", "bbd", "bde") if admitted(keys)] == []


@FORMS
@examples(25)
@given(data=st.data())
def test_whatever_text_is_admitted_is_read_as_it_was_written(
    form: TaggedCalls, data: st.DataObject, vocabulary: Vocabulary, words: Tokenizer
) -> None:
    tags = (form.begin, form.parameter.replace("{key}", "b"), form.end_parameter, form.end_call, form.end)
    pieces = ["\n", "x", "null", " ", *(piece for tag in tags for piece in (tag, tag.strip(), tag.strip()[:-1]) if piece)]
    value = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=5)))
    schema = {"properties": {"a": TEXT, "b": TEXT}, "required": ["a"]}
    written = answer_of(form, call_of(form, "note", ("a", value), strings="a"))
    if not admits(grammar_of(form, schema, vocabulary), words, written):
        ends = (form.end_parameter.strip(), f"\n{form.parameter_mark}", "\n" + form.end_call.partition(">")[0])
        assert any(end in value for end in ends)
        return
    reader = AnswerReader(None, form, {"note": schema})
    parts = reader.add(written) + reader.finish()
    assert all(isinstance(part, CallPart) for part in parts) and reader.num_calls == 1
    assert json.loads("".join(part.arguments for part in parts if isinstance(part, CallPart))) == {"a": value}


def test_marks_that_are_tokens_are_written_as_these(tmp_path: Path, tokenizer_files: Path) -> None:
    form, marks = TOOL_PARSERS["glm45"], ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    shutil.copytree(tokenizer_files, tmp_path, dirs_exist_ok=True)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken(mark, special=mark == "</arg_value>") for mark in marks])
    backend.save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer(tmp_path)
    schema = {"properties": {"a": TEXT, "b": {"type": "integer"}}, "required": ["a", "b"]}
    text = form.grammar({"note": schema}, True, words.token_id)
    grammar = Vocabulary(words, [words.eos_token_id or 0]).grammar(StructuredOutputs(grammar=text))
    assert isinstance(form, TaggedCalls) and set(marks) <= set(form.special)
    assert words.token_id("<tool_call>") == grammar.forced()[0] and words.token_id("<arg_value>") == grammar.forced()[-1]
    assert admits(grammar, words, answer_of(form, call_of(form, "note", ("a", "x\n"), ("b", "5"))))


def test_a_schema_to_which_many_parameters_refer_does_not_make_an_endless_grammar() -> None:
    long = {"type": "object", "description": "x" * 100_000}
    schema = {"properties": {str(number): {"$ref": "#/$defs/a"} for number in range(1000)}, "$defs": {"a": long}}
    assert 1_000_000 < len(TOOL_PARSERS["qwen3_coder"].grammar({"note": schema}, True)) < 1_200_000
