"""Grammars of answers that must call tools: they admit calls as models write them, and whatever they admit is read as calls."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.tagged import answer_of, call_of
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from pipedec.core.sampling import StructuredOutputs
from pipedec.grammar import Grammar, Vocabulary, check
from pipedec.text.parsers import PLAIN, TOOL_PARSERS
from pipedec.text.parsers.parser import ToolParser
from pipedec.text.parsers.reader import AnswerReader, CallPart
from pipedec.text.parsers.tagged_calls import TaggedCalls
from pipedec.text.tokenizer import Tokenizer

FORMS = pytest.mark.parametrize("form", [*TOOL_PARSERS.values(), PLAIN], ids=lambda form: form.name)
KIND: dict[str, Any] = {"$ref": "#/$defs/kind"}
PAINT = {
    "type": "object", "properties": {"kind": KIND, "also": {"type": "array", "items": KIND, "maxItems": 2}},
    "required": ["kind", "also"], "additionalProperties": False, "$defs": {"kind": {"enum": ["red", 'a "b" }']}},
}  # fmt: skip
SELL = {"properties": {"kind": KIND}, "additionalProperties": False, "$defs": {"kind": {"type": "integer"}}}
TOOLS = {"paint": PAINT, "sell-all": SELL, "stop": None}
Calls = list[tuple[str, dict[str, Any]]]


def objects(before: str, after: str, separator: str, key: str) -> Callable[[Calls], str]:
    return lambda calls: separator.join(before + json.dumps({"name": name, key: arguments}) + after for name, arguments in calls)


def harmony(calls: Calls) -> str:
    header = "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>{}<|call|>"
    return "<|start|>assistant".join(header.format(name, json.dumps(arguments)) for name, arguments in calls)


def listed(before: str, after: str, fields: str) -> Callable[[Calls], str]:
    def written(calls: Calls) -> str:
        objects = (f"{{{fields.format(name=name)}: {json.dumps(arguments)}}}" for name, arguments in calls)
        return f"{before}[{', '.join(objects)}]{after}"

    return written


def named(section: tuple[str, str], separator: str, call: str) -> Callable[[Calls], str]:
    def written(calls: Calls) -> str:
        return separator.join(call.format(name, json.dumps(arguments)) for name, arguments in calls).join(section)

    return written


def gemma(begin: str, end: str, quote: str) -> Callable[[Calls], str]:
    def value(given: Any) -> str:
        if isinstance(given, dict):
            return "{" + ",".join(f"{key}:{value(item)}" for key, item in given.items()) + "}"
        if isinstance(given, list):
            return "[" + ",".join(map(value, given)) + "]"
        return f"{quote}{given}{quote}" if isinstance(given, str) else json.dumps(given)

    return lambda calls: "".join(f"{begin}call:{name}{value(arguments)}{end}" for name, arguments in calls)


FIELDS = '"name": "{name}", "arguments"'
DEEPSEEK = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")


def tagged(form: TaggedCalls) -> Callable[[Calls], str]:
    def call(name: str, arguments: dict[str, Any]) -> str:
        values = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in arguments.items()]
        return call_of(form, name, *values, strings=[key for key, value in arguments.items() if isinstance(value, str)])

    return lambda calls: answer_of(form, *(call(name, arguments) for name, arguments in calls))


WRITTEN: dict[str, Callable[[Calls], str]] = {
    "hermes": objects("<tool_call>\n", "\n</tool_call>", "\n", "arguments"),
    "llama3": objects("", "", "; ", "parameters"),
    "plain": objects("", "", "\n", "arguments"),
    "harmony": harmony,
    "mistral": listed("[TOOL_CALLS] ", "", FIELDS),
    "phi4": listed("<|tool_call|>", "<|/tool_call|>", FIELDS),
    "functools": listed("functools", "", FIELDS),
    "apriel": listed("<tool_calls>", "</tool_calls>", FIELDS),
    "nemotron": listed("<TOOLCALL>", "</TOOLCALL>", FIELDS),
    "granite": listed("<|tool_call|>", "", FIELDS),
    "cohere": listed("<|START_ACTION|>", "<|END_ACTION|>", '"tool_call_id": "0", "tool_name": "{name}", "parameters"'),
    "gemma": gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "functiongemma": gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "deepseek_v3": named(DEEPSEEK, "\n", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"),
    "deepseek_v31": named(DEEPSEEK, "", "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"),
    "kimi_k2": named(
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        "",
        "<|tool_call_begin|>functions.{}:0<|tool_call_argument_begin|>{}<|tool_call_end|>",
    ),
    **{name: tagged(form) for name, form in TOOL_PARSERS.items() if isinstance(form, TaggedCalls)},
}


@pytest.fixture(scope="module")
def words(tokenizer_files: Path) -> Tokenizer:
    return Tokenizer(tokenizer_files)


@pytest.fixture(scope="module")
def vocabulary(words: Tokenizer) -> Vocabulary:
    assert words.eos_token_id is not None
    return Vocabulary(words, [words.eos_token_id])


def calls_in(form: ToolParser, text: str) -> list[tuple[str, Any]]:
    """Fails if anything is said besides."""
    reader = AnswerReader(None, form, TOOLS)
    parts = reader.add(text) + reader.finish()
    assert all(isinstance(part, CallPart) for part in parts), text
    names = {part.index: part.name for part in parts if isinstance(part, CallPart) and part.name is not None}
    return [
        (name, json.loads("".join(part.arguments for part in parts if isinstance(part, CallPart) and part.index == index)))
        for index, name in names.items()
    ]


def made(form: ToolParser, vocabulary: Vocabulary, is_single: bool = False) -> Grammar:
    structure = StructuredOutputs(grammar=form.grammar(TOOLS, is_single))
    check(structure)
    return vocabulary.grammar(structure)


def admits(grammar: Grammar, words: Tokenizer, text: str) -> bool:
    """Whether it is a whole answer."""
    grammar.consume(words.encode(text, add_special_tokens=False))
    return grammar.is_possible and words.eos_token_id in grammar.allowed()


@FORMS
def test_calls_as_models_write_them_are_admitted(form: ToolParser, vocabulary: Vocabulary, words: Tokenizer) -> None:
    def call(name: str, arguments: dict[str, Any]) -> str:
        return WRITTEN[form.name]([(name, arguments)])

    both = WRITTEN[form.name]([("paint", {"kind": "red", "also": ['a "b" }']}), ("stop", {})])
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
def test_the_longest_name_that_a_tool_may_have_is_read(form: ToolParser) -> None:
    name = "n" * 128
    reader = AnswerReader(None, form, {name: None})
    parts = reader.add(WRITTEN[form.name]([(name, {})])) + reader.finish()
    assert [part.name for part in parts if isinstance(part, CallPart) and part.name] == [name]


@FORMS
@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_admitted_is_read_as_calls(form: ToolParser, seed: int, vocabulary: Vocabulary, words: Tokenizer) -> None:
    chooser, grammar = random.Random(seed), made(form, vocabulary)
    token_ids: list[int] = []
    while words.eos_token_id not in (allowed := grammar.allowed()) and len(token_ids) < 2000:
        token_ids.append(chooser.choice(list(allowed)))
        grammar.consume(token_ids[-1:])
    calls = calls_in(form, words.decode(token_ids))
    assert words.eos_token_id in grammar.allowed() and calls
    for name, arguments in calls:
        assert name in TOOLS and isinstance(arguments, dict)
        assert name != "stop" or arguments == {}
        assert name != "paint" or (list(arguments) == ["kind", "also"] and arguments["kind"] in ("red", 'a "b" }'))


@pytest.mark.failure_case("H31")
@pytest.mark.parametrize(
    ("name", "marks"),
    [("hermes", ("<tool_call>", "</tool_call>")), ("mistral", ("[TOOL_CALLS]", "[ARGS]")), ("mistral", ("[TOOL_CALLS]",))],
)
def test_marks_of_calls_that_are_tokens_are_said_as_these(
    name: str, marks: tuple[str, ...], tmp_path: Path, tokenizer_files: Path
) -> None:
    shutil.copytree(tokenizer_files, tmp_path, dirs_exist_ok=True)
    backend = Backend.from_file(str(tmp_path / "tokenizer.json"))
    backend.add_tokens([AddedToken(mark, special=False) for mark in marks])
    backend.save(str(tmp_path / "tokenizer.json"))
    words, form = Tokenizer(tmp_path), TOOL_PARSERS[name]
    assert words.eos_token_id is not None
    grammar = Vocabulary(words).grammar(StructuredOutputs(grammar=form.grammar({"stop": None}, True, words.token_id)))
    said: list[int] = []
    while words.eos_token_id not in (allowed := grammar.allowed()):
        said.append(next(iter(allowed)))
        grammar.consume(said[-1:])
    assert [words.token(token) for token in said if words.token(token) in marks] == list(marks)
    assert calls_in(form, words.decode(said)) == [("stop", {})]
