"""Grammars of answers that must call tools: they admit calls as models write them, and whatever they admit is read as calls."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pipedec.core.sampling import StructuredOutputs
from pipedec.grammar import Grammar, Vocabulary, check
from pipedec.text.tokenizer import Tokenizer
from pipedec.text.tool_calls import HERMES, LLAMA3, PLAIN, CallPart, CallReader, ToolFormat

FORMS = pytest.mark.parametrize("form", [HERMES, LLAMA3, PLAIN], ids=["hermes", "llama3", "plain"])
KIND: dict[str, Any] = {"$ref": "#/$defs/kind"}
PAINT = {
    "type": "object", "properties": {"kind": KIND, "also": {"type": "array", "items": KIND, "maxItems": 2}},
    "required": ["kind", "also"], "additionalProperties": False, "$defs": {"kind": {"enum": ["red", 'a "b" }']}},
}  # fmt: skip
SELL = {"properties": {"kind": KIND}, "additionalProperties": False, "$defs": {"kind": {"type": "integer"}}}
TOOLS = {"paint": PAINT, "sell-all": SELL, "stop": None}


@pytest.fixture(scope="module")
def words(tokenizer_files: Path) -> Tokenizer:
    return Tokenizer(tokenizer_files)


@pytest.fixture(scope="module")
def vocabulary(words: Tokenizer) -> Vocabulary:
    assert words.eos_token_id is not None
    return Vocabulary(words, [words.eos_token_id])


def calls_in(form: ToolFormat, text: str) -> list[tuple[str, Any]]:
    """Fails if anything is said besides."""
    reader = CallReader(form, TOOLS)
    parts = reader.add(text) + reader.finish()
    assert all(isinstance(part, CallPart) for part in parts), text
    names = {part.index: part.name for part in parts if isinstance(part, CallPart) and part.name is not None}
    return [
        (name, json.loads("".join(part.arguments for part in parts if isinstance(part, CallPart) and part.index == index)))
        for index, name in names.items()
    ]


def made(form: ToolFormat, vocabulary: Vocabulary, is_single: bool = False) -> Grammar:
    structure = StructuredOutputs(grammar=form.grammar(TOOLS, is_single))
    check(structure)
    return vocabulary.grammar(structure)


def admits(grammar: Grammar, words: Tokenizer, text: str) -> bool:
    """Whether it is a whole answer."""
    grammar.consume(words.encode(text, add_special_tokens=False))
    return grammar.is_possible and words.eos_token_id in grammar.allowed()


@FORMS
def test_calls_as_models_write_them_are_admitted(form: ToolFormat, vocabulary: Vocabulary, words: Tokenizer) -> None:
    def call(name: str, arguments: Any) -> str:
        return form.begin + json.dumps({"name": name, form.arguments: arguments}) + form.end

    both = form.separator.join([call("paint", {"kind": "red", "also": ['a "b" }']}), call("stop", {})])
    assert admits(made(form, vocabulary), words, both)
    assert admits(made(form, vocabulary, is_single=True), words, call("sell-all", {"kind": 5}))
    assert not admits(made(form, vocabulary, is_single=True), words, both)
    for wrong in (
        call("buy", {}),
        call("paint", {"kind": 5, "also": []}),
        call("sell-all", {"kind": "red"}),
        call("stop", {"a": 1}),
    ):
        assert not admits(made(form, vocabulary), words, wrong)


@FORMS
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_admitted_is_read_as_calls(form: ToolFormat, seed: int, vocabulary: Vocabulary, words: Tokenizer) -> None:
    chooser, grammar = random.Random(seed), made(form, vocabulary)
    token_ids: list[int] = []
    while words.eos_token_id not in (allowed := grammar.allowed()) and len(token_ids) < 400:
        token_ids.append(chooser.choice(list(allowed)))
        grammar.consume(token_ids[-1:])
    calls = calls_in(form, words.decode(token_ids))
    assert words.eos_token_id in grammar.allowed() and calls
    for name, arguments in calls:
        assert name in TOOLS and isinstance(arguments, dict)
        assert name != "stop" or arguments == {}
        assert name != "paint" or (list(arguments) == ["kind", "also"] and arguments["kind"] in ("red", 'a "b" }'))


@pytest.mark.failure_case("H31")
def test_marks_of_calls_that_are_tokens_are_said_as_these(tmp_path: Path, tokenizer_files: Path) -> None:
    shutil.copytree(tokenizer_files, tmp_path, dirs_exist_ok=True)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("</tool_call>", special=False)])
    backend.save(str(tmp_path / "tokenizer.json"))
    words = Tokenizer(tmp_path)
    structure = StructuredOutputs(grammar=HERMES.grammar({"stop": None}, True, lambda text: words.token_id(text) is not None))
    chain = Vocabulary(words).grammar(structure).forced()
    assert words.token_id("<tool_call>") == chain[0] and words.token_id("</tool_call>") == chain[-2]
    assert calls_in(HERMES, words.decode(chain)) == [("stop", {})]
