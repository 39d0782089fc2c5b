"""What is wrong with a structure is said in one line, with its place, before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr
from tokenizers import Tokenizer as Backend
from tokenizers import models

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.directories import reference_pair
from pipedec.grammar import Vocabulary, check, without_annotations
from pipedec.text.parsers import PLAIN
from pipedec.text.tokenizer import Tokenizer

TARGET = Tokenizer(reference_pair() / "target")
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
    return Vocabulary(TARGET)


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


@pytest.mark.parametrize(
    "given",
    [
        {"type": "string", "format": "path"}, {"type": "string", "format": "password", "writeOnly": True},
        {"type": "array", "items": {"type": "string", "format": "uri-reference"}, "uniqueItems": False},
        {"type": "object", "propertyNames": {"type": "string"}}, {"type": "string", "contentEncoding": "base64"},
        {"type": ["string", "null"], "enum": ["a", None]}, {"type": "object"}, {},
        {"properties": {"format": {"type": "string", "title": "The format", "format": "x"}}},
    ],
)  # fmt: skip
@pytest.mark.failure_case("H28")
def test_annotations_limit_nothing(given: dict[str, Any], vocabulary: Vocabulary) -> None:
    vocabulary.check(StructuredOutputs(json=given))
    tools = {"f": without_annotations({"properties": {"a": given}}), "g": None}
    vocabulary.check(StructuredOutputs(grammar=PLAIN.grammar(tools, False)))


@pytest.mark.failure_case("H28")
def test_only_what_limits_nothing_is_left_out_of_a_schema(vocabulary: Vocabulary) -> None:
    class Account(BaseModel):
        home: Path
        password: SecretStr

    vocabulary.check(StructuredOutputs(json=Account.model_json_schema()))
    kept = {"const": {"format": "x"}, "properties": {"uniqueItems": {"format": "date"}}}
    assert without_annotations({**kept, "format": "x"}) == kept
    for given in ({"uniqueItems": True}, {"propertyNames": {"pattern": "^a"}}):
        with pytest.raises(UserError, match=rf"{next(iter(given))}.* \(at #/properties/a\)"):
            vocabulary.check(StructuredOutputs(json={"properties": {"a": given}}))


GBNF: list[tuple[str, str, str]] = [  # a grammar, a text that it has, and one that it has not
    (r"root ::= [\u0430-\u044f]+", "привет", "hi"),
    (r'root ::= "\u00e9\U0001F600\x41" [^\n"]*', 'é😀A"'[:-1] + "b", 'é😀A"'),
    ('root ::= start "!"\nstart ::= "a"', "a!", "a"),
    ('# c "x\nroot ::= "a" # comment: x', "a", "b"),
    ('root ::= ("a" | "b"){2,3}', "aba", "a"),
    ('root ::= item-list\nitem-list ::= "- " [^\\n]+ "\\n" item-list?', "- x\n- y\n", "- x"),
    ('root ::= (\n  "a" | # one\n  "b"\n)\n', "b", "c"),
    ('root ::= a-b 1c\r\na-b ::= "a"\r\n1c ::= "c"\r\n', "ac", "a"),
    ('root ::= fooBar foo_bar a-b a_b\nfooBar ::= "1"\nfoo_bar ::= "2"\na-b ::= "3"\na_b ::= "4"', "1234", "1"),
    (r'root ::= [\]\\"^-] [+--] [&&] "/"', "]+&/", "a+&/"),
]


@pytest.mark.parametrize(("grammar", "text", "other"), GBNF)
@pytest.mark.failure_case("H32")
def test_gbnf_is_read_as_by_llama_cpp(grammar: str, text: str, other: str, vocabulary: Vocabulary) -> None:
    assert is_whole(vocabulary, grammar, text)
    assert not is_whole(vocabulary, grammar, other)


def is_whole(vocabulary: Vocabulary, grammar: str, text: str) -> bool:
    said = vocabulary.grammar(StructuredOutputs(grammar=grammar))
    said.consume(TARGET.encode(text, add_special_tokens=False))
    return said.is_possible and TARGET.eos_token_id in said.allowed()


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ('root ::= "a"\n\nb ::= c', "line 3: there is no rule c"), ('root ::= "a"\nroot ::= "b"', "line 2: the rule root"),
        ('root ::= "a"\nb ::= )', "line 2"), (r'root ::= "\ud800"', "no character"), ('a ::= "b"', "No 'root' rule"),
    ],
)  # fmt: skip
@pytest.mark.failure_case("H32")
def test_a_mistake_in_gbnf_is_told_with_its_line(grammar: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(StructuredOutputs(grammar=grammar))


def test_special_tokens_of_a_grammar_are_looked_up_where_there_are_tokens(vocabulary: Vocabulary) -> None:
    check(StructuredOutputs(grammar="start: <|nope|>"))
    with pytest.raises(UserError, match=r'unknown special token: "<|nope|>"'):
        vocabulary.check(StructuredOutputs(grammar="start: <|nope|>"))
    vocabulary.check(StructuredOutputs(grammar="start: <|user|>"))


@pytest.mark.parametrize(
    "given",
    [
        {"json": {"$ref": "#"}},
        {"regex": r"[^\s\S]"},
        {"grammar": 'start: start "a"'},
        {"grammar": 'start: "a" start'},
        {"regex": "a{1000000}"},
        {"json": {"properties": {"x": {"$ref": "#"}}, "required": ["x"], "additionalProperties": False, "type": "object"}},
    ],
)
@pytest.mark.failure_case("H30")
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
        ({"regex": ""}, "structured_outputs.regex: must be a string .not empty., not ''"),
        ({"regex": 5}, "structured_outputs.regex: must be a string"),
        ({"choice": ()}, "structured_outputs.choice: must be a list .not empty."),
        ({"choice": [1]}, r"structured_outputs.choice\[0\]: must be a string"),
        ({"choice": "yes"}, "structured_outputs.choice: must be a list"),
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
