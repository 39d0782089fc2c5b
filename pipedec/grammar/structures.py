"""Translation of a user's structure for llguidance, checks of it, and the tokens of a checkpoint as its parsers need them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import lru_cache, partial, reduce
from itertools import takewhile
from operator import getitem
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pipedec.core import StructuredOutputs, UserError
from pipedec.grammar.grammar import Bitmask, Grammar
from pipedec.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MAX_KEPT = 16  # structures
_MAX_CHECKS = 200  # of a schema, to find the place of a mistake
_MAX_MESSAGE = 300  # characters
# Blanks as Python's ``json.dumps`` writes them: they are forced, and no model loops in them.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check(structure: StructuredOutputs, tokens: LLTokenizer | None = None) -> None:
    """Check a structure without a model. ``tokens`` has the special tokens that a grammar may name; None accepts all names.

    Raises UserError, one line with the place of the mistake, if the structure is invalid or not supported.
    """
    message = _mistake(source(structure), tokens)
    if message and structure.json is not None:
        schema = _schema(structure)
        message += f" (at {_place(schema, message, lambda changed: _mistake(_schema_source(changed), tokens))})"
    if message:
        raise UserError(f"structured_outputs.{structure.kind}: {message}")


def _mistake(text: str, tokens: LLTokenizer | None) -> str:
    """llguidance's complaint in one line; empty if there is none."""
    is_wrong, messages = LLMatcher.validate_grammar_with_warnings(text, tokens)
    return one_line(messages[0]) if is_wrong else ""


def source(structure: StructuredOutputs) -> str:
    """The structure as llguidance reads it."""
    if structure.json is not None:
        return _schema_source(_schema(structure))
    if structure.regex is not None:
        return LLMatcher.grammar_from_regex(structure.regex)
    if structure.choice is not None:
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in structure.choice)
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")  # one terminal: there may be thousands
    if structure.grammar is not None:
        try:
            return LLMatcher.grammar_from_lark(any_to_lark(structure.grammar))  # from Lark or GBNF
        except Exception as error:
            raise UserError(f"structured_outputs.grammar: {one_line(str(error))}") from None
    return _schema_source({"type": "object"})


def _schema(structure: StructuredOutputs) -> dict[str, Any]:
    """The JSON schema as an object: llguidance refuses a schema that is just ``true`` or ``false``."""
    assert isinstance(structure.json, str)
    schema = json.loads(structure.json)
    return {"allOf": [schema]} if isinstance(schema, bool) else schema


def _schema_source(schema: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    except (ValueError, RecursionError) as error:  # it is nested too deeply
        raise UserError(f"structured_outputs.json: {one_line(str(error))}") from None


def _place(schema: Any, message: str, mistake_of: Callable[[Any], str]) -> str:
    """JSON pointer to the innermost part of a schema without which this mistake would not be found."""
    found: tuple[str | int, ...] = ()
    left = iter(range(_MAX_CHECKS))
    parts = _parts(schema, found)
    while (part := next(parts, None)) is not None and next(left, None) is not None:
        changed = deepcopy(schema)
        reduce(getitem, part[:-1], changed)[part[-1]] = {}  # which allows everything
        if mistake_of(changed) != message:
            found, parts = part, _parts(schema, part)
    return "/".join(["#", *(str(key).replace("~", "~0").replace("/", "~1") for key in found)])


def _parts(schema: Any, at: tuple[str | int, ...]) -> Iterator[tuple[str | int, ...]]:
    """Places of the objects directly below one, or in lists directly below it."""
    value = reduce(getitem, at, schema)
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(inner, dict):
            yield (*at, key)
        elif isinstance(inner, list):
            yield from _parts(schema, (*at, key))


def one_line(message: str) -> str:
    """The parser's first lines, up to its quotation of the source."""
    lines = [line.strip() for line in re.sub(r"^at \d+\(\d+\): (?=invalid regex)", "", message).splitlines()]
    before = list(takewhile(lambda line: not re.match(r"\d+ \|", line), lines))
    return " ".join(line for line in before if line.strip("^ "))[:_MAX_MESSAGE]


class Vocabulary:
    """A tokenizer's tokens. Tokens of the model that the tokenizer lacks are never allowed.

    ``end_token_ids`` are the model's; without any the tokenizer's, which is enough to check structures. Raises UserError if
    structured outputs are not possible with this tokenizer, or there is no end token.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: tuple[int, ...] = ()) -> None:
        where = f"structured_outputs are not possible with the model in {tokenizer.directory}"
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._end_token_ids = end_token_ids or own
        if not self._end_token_ids:
            raise UserError(f"{where}: it names no end token")
        try:
            self._tokens = LLTokenizer(tokenizer.to_json(), eos_token=list(self._end_token_ids))
        except ValueError as error:
            raise UserError(f"{where}: its tokenizer cannot be used: {one_line(str(error))}") from None
        self._started = lru_cache(maxsize=_MAX_KEPT)(self._start)

    def check(self, structure: StructuredOutputs) -> None:
        """Raises UserError as ``structures.check``; also if a grammar names a special token that is not in the vocabulary, or if
        nothing can match, because everything contains itself.
        """
        check(structure, self._tokens)
        matcher = self.matcher(structure)
        if not matcher.is_accepting() and set(Bitmask(matcher.compute_bitmask())) <= set(self._end_token_ids):
            raise UserError(f"structured_outputs.{structure.kind}: no text is possible")

    def matcher(self, structure: StructuredOutputs) -> LLMatcher:
        """At the structure's start. Raises UserError as ``check``, but for the place."""
        return self._started(structure).deep_copy()

    def grammar(self, structure: StructuredOutputs) -> Grammar:
        """The grammar of a new answer. Its ``allowed`` and ``forced`` raise UserError as ``matcher``."""
        return Grammar(partial(self.matcher, structure), self._end_token_ids)

    def _start(self, structure: StructuredOutputs) -> LLMatcher:
        matcher = LLMatcher(self._tokens, source(structure), log_level=0)
        if matcher.is_error():
            raise UserError(f"structured_outputs.{structure.kind}: {one_line(matcher.get_error())}")
        return matcher
