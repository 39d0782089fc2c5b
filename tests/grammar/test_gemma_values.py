"""Arguments in Gemma's notation: grammars admit those that follow their schemas, and they are read as JSON."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pipedec.core.sampling import StructuredOutputs
from pipedec.grammar import Vocabulary, check
from pipedec.text.parsers import TOOL_PARSERS
from pipedec.text.parsers.reader import AnswerReader, CallPart
from pipedec.text.tokenizer import Tokenizer

GEMMA = TOOL_PARSERS["gemma"]
TREE = {
    "properties": {"tree": {"$ref": "#/$defs/tree"}},
    "required": ["tree"],
    "$defs": {"tree": {"type": "object", "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/tree"}}}}},
}
OPTIONAL = {"properties": {"a": {"type": "integer"}, "b": {"type": "string"}, "c": {"type": "boolean"}}, "required": ["b"]}


@pytest.fixture(scope="module", params=[False, True], ids=["text", "tokens"])
def words(request: pytest.FixtureRequest, tokenizer_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Tokenizers that have the marks as tokens, and that have not."""
    folder = tmp_path_factory.mktemp("words")
    shutil.copytree(tokenizer_files, folder, dirs_exist_ok=True)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    if request.param:
        backend.add_special_tokens([AddedToken(mark, special=True) for mark in GEMMA.special])
    backend.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def vocabulary(words: Tokenizer) -> Vocabulary:
    return Vocabulary(words)


def is_admitted(schema: dict[str, Any], written: str, words: Tokenizer, vocabulary: Vocabulary) -> bool:
    structure = StructuredOutputs(grammar=GEMMA.grammar({"do": schema}, True, words.token_id))
    check(structure)
    grammar = vocabulary.grammar(structure)
    grammar.consume(words.encode(text_of(written), add_special_tokens=False))
    return grammar.is_possible and words.eos_token_id in grammar.allowed()


def text_of(written: str) -> str:
    return f"<|tool_call>call:do{written}<tool_call|>".replace("'", '<|"|>')


def read(text: str) -> Any:
    reader = AnswerReader(None, GEMMA, {"do": None})
    parts = reader.add(text) + reader.finish()
    return json.loads("".join(part.arguments for part in parts if isinstance(part, CallPart)))


@pytest.mark.parametrize(
    ("schema", "written", "value"),
    [
        (OPTIONAL, "{b:'x'}", {"b": "x"}),
        (OPTIONAL, "{a:1,b:'',c:true}", {"a": 1, "b": "", "c": True}),
        (OPTIONAL, "{b:'a \"quoted\" \\ } <b>\n,c:1'}", {"b": 'a "quoted" \\ } <b>\n,c:1'}),
        ({"properties": {"a": {"enum": ["x y", 2, None, [1], {"k": "v"}]}}}, "{a:'x y'}", {"a": "x y"}),
        ({"properties": {"a": {"enum": ["x y", 2, None, [1], {"k": "v"}]}}}, "{a:{k:'v'}}", {"a": {"k": "v"}}),
        ({"properties": {"a": {"enum": ["x y", 2, None, [1], {"k": "v"}]}}}, "{a:[1]}", {"a": [1]}),
        ({"properties": {"a": {"const": ""}}}, "{a:''}", {"a": ""}),
        ({"properties": {"a": {"anyOf": [{"type": "null"}, {"type": "string"}]}}}, "{a:null}", {"a": None}),
        ({"properties": {"a": {"type": ["integer", "string"]}}}, "{a:'5'}", {"a": "5"}),
        ({"properties": {"a": {"allOf": [{"type": "number"}]}}}, "{a:-1.5}", {"a": -1.5}),
        ({"properties": {"a": {"type": "array", "items": {"type": "string"}}}}, "{a:['x','y']}", {"a": ["x", "y"]}),
        ({"properties": {"a": {"type": "array", "items": {"type": "string"}}}}, "{a:[]}", {"a": []}),
        ({"properties": {"a": {"type": "array", "maxItems": 0}}}, "{a:[]}", {"a": []}),
        ({"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}, "{a:{b:1}}", {"a": {"b": 1}}),
        ({"properties": {"a key": {}}}, "{'a key':{k:['x',{}]}}", {"a key": {"k": ["x", {}]}}),
        ({"required": ["a"]}, "{a:false}", {"a": False}),
        ({}, "{a:1,b:'x'}", {"a": 1, "b": "x"}),
        ({}, "{}", {}),
        (TREE, "{tree:{of:[{},{of:[]}]}}", {"tree": {"of": [{}, {"of": []}]}}),
    ],
)
def test_values_that_follow_their_schema_are_admitted_and_read(
    schema: dict[str, Any], written: str, value: Any, words: Tokenizer, vocabulary: Vocabulary
) -> None:
    assert is_admitted(schema, written, words, vocabulary)
    assert read(text_of(written)) == value


@pytest.mark.parametrize(
    ("schema", "written"),
    [
        (OPTIONAL, "{a:1}"),
        (OPTIONAL, "{c:true,b:''}"),
        (OPTIONAL, "{b:'',}"),
        (OPTIONAL, "{b:1}"),
        (OPTIONAL, "{b:'',d:1}"),
        (OPTIONAL, "{a:'1',b:''}"),
        ({"properties": {"a": {"type": "integer", "minimum": 5}}}, "{a:4}"),
        ({"properties": {"a": {"type": "array", "items": {"type": "string"}, "minItems": 1}}}, "{a:[]}"),
        ({"properties": {"a": {"type": "array", "items": {}, "maxItems": 2}}}, "{a:[1,2,3]}"),
        ({"properties": {}, "additionalProperties": False}, "{a:1}"),
        (TREE, "{tree:{of:[1]}}"),
    ],
)
def test_values_that_do_not_follow_their_schema_are_not_admitted(
    schema: dict[str, Any], written: str, words: Tokenizer, vocabulary: Vocabulary
) -> None:
    assert not is_admitted(schema, written, words, vocabulary)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": [], "required": {}, "$ref": 5},
        {"properties": {"a": True, "b": {"$ref": "#/none"}, "c": {"$ref": "other"}, "d": {"type": 5}, "e": {"type": []}}},
        {"properties": {"a": {"type": "array", "minItems": -1, "maxItems": "2", "items": [{}]}, "b": {"enum": []}, "": {}}},
        {"properties": {"a": json.loads('{"properties": {"a": ' * 400 + "{}" + "}}" * 400)}},
    ],
)
def test_schemas_that_are_strange_make_grammars_all_the_same(schema: dict[str, Any], words: Tokenizer) -> None:
    check(StructuredOutputs(grammar=GEMMA.grammar({"do": schema}, False, words.token_id)))
