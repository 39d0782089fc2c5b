"""What is wrong with a structure is said in one line, with its place, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

from pipedec.core import SamplingParams, StructuredOutputs, UserError
from pipedec.directories import reference_pair
from pipedec.grammar import Vocabulary, check
from pipedec.text.tokenizer import Tokenizer

DEEP = {"properties": {"a/b": {"anyOf": [{"type": "string"}, {"items": {"type": "objekt"}}]}}}
TEXT = {"type": "string"}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"json": DEEP}, "structured_outputs.json: Invalid type: objekt (at #/properties/a~1b/anyOf/1/items)"),
    ({"json": {"items": {"contains": TEXT}}}, 'structured_outputs.json: Unimplemented keys: ["contains"] (at #/items)'),
    ({"json": {"not": {}, "properties": {"x": TEXT}}}, 'structured_outputs.json: Unimplemented keys: ["not"] (at #)'),
    ({"json": {"items": {"$ref": "#/nope"}}}, "structured_outputs.json: Pointer '/nope' does not exist (at #/items)"),
    (
        {"json": {"$defs": {"d": {"uniqueItems": True}}, "$ref": "#/$defs/d"}},
        'Unimplemented keys: ["uniqueItems"] (at #/$defs/d)',
    ),
    ({"json": False}, "structured_outputs.json: Unsatisfiable schema: schema is false (at #"),
    ({"regex": "(a"}, 'structured_outputs.regex: invalid regex "(a" (in regex): regex parse error: (a error: unclosed group'),
    ({"grammar": 'start: a\na: "x" c'}, 'structured_outputs.grammar: at 2(4): unknown name: "c"'),
    ({"grammar": "start: foo\n bar"}, "structured_outputs.grammar: 2(5): Expected token ':'"),
    ({"grammar": "root ::= ("}, "structured_outputs.grammar: Expected ')' at line 1"),
]


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return Vocabulary(Tokenizer(reference_pair() / "target"))


@pytest.mark.parametrize(("given", "message"), MISTAKES)
def test_a_mistake_is_told_in_one_line_with_its_place(given: dict[str, Any], message: str, vocabulary: Vocabulary) -> None:
    for checked in (check, vocabulary.check):
        with pytest.raises(UserError) as caught:
            checked(StructuredOutputs(**given))
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"json": True}, {"json": "{}"}, {"json": {"type": ["integer", "null"]}}, {"regex": r"\w+@\w+\.(com|org)"},
        {"choice": ("", "é", "日本\n")}, {"choice": ["a"]}, {"json_object": True}, {"grammar": 'start: "a" /[0-9]+/'},
        {"grammar": 'root ::= "yes" | "no"'},
    ],
)  # fmt: skip
def test_what_is_right_is_taken(given: dict[str, Any], vocabulary: Vocabulary) -> None:
    check(StructuredOutputs(**given))
    vocabulary.check(StructuredOutputs(**given))
    assert vocabulary.grammar(StructuredOutputs(**given)).allowed()


def test_special_tokens_of_a_grammar_are_looked_up_where_there_are_tokens(vocabulary: Vocabulary) -> None:
    check(StructuredOutputs(grammar="start: <|nope|>"))
    with pytest.raises(UserError, match=r'unknown special token: "<|nope|>"'):
        vocabulary.check(StructuredOutputs(grammar="start: <|nope|>"))
    vocabulary.check(StructuredOutputs(grammar="start: <|user|>"))


@pytest.mark.parametrize("given", [{"json": {"$ref": "#"}}, {"regex": r"[^\s\S]"}, {"grammar": 'start: start "a"'}])
def test_a_structure_that_no_text_has_is_refused(given: dict[str, Any], vocabulary: Vocabulary) -> None:
    with pytest.raises(UserError, match="no text is possible"):
        vocabulary.check(StructuredOutputs(**given))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "must have one of json, regex, choice, grammar, json_object, not none"),
        ({"json": {}, "regex": "a"}, "not json and regex"),
        ({"json_object": False}, "not none"),
        ({"json": "{"}, "structured_outputs.json must be a JSON Schema: Expecting property name .* line 1 column 2"),
        ({"json": "3"}, "an object, true or false"),
        ({"json": {"a": object()}}, "structured_outputs.json must be a JSON Schema"),
        ({"json": "[" * 100_000}, "structured_outputs.json must be a JSON Schema"),
        ({"regex": ""}, "structured_outputs.regex must be a text that is not empty"),
        ({"regex": 5}, "structured_outputs.regex must be a text"),
        ({"choice": ()}, "structured_outputs.choice must be a list of texts"),
        ({"choice": [1]}, "structured_outputs.choice must be a list of texts"),
        ({"choice": "yes"}, "structured_outputs.choice must be a list of texts"),
    ],
)
def test_exactly_one_structure_of_the_right_type_is_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        StructuredOutputs(**given)


def test_sampling_parameters_with_a_structure_can_be_compared_and_are_refused_with_ignore_eos() -> None:
    one, other = (SamplingParams(structured_outputs=StructuredOutputs(json={"type": "object"})) for _ in range(2))
    assert (one, hash(one)) == (other, hash(other))
    with pytest.raises(UserError, match="ignore_eos"):
        SamplingParams(structured_outputs=StructuredOutputs(regex="a"), ignore_eos=True)


def test_a_model_without_an_end_token_or_with_a_foreign_tokenizer_is_refused(tmp_path: Path) -> None:
    Backend(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UserError, match="names no end token"):
        Vocabulary(Tokenizer(tmp_path))
    with pytest.raises(UserError, match="its tokenizer cannot be used"):
        Vocabulary(Tokenizer(tmp_path), (0,))
