"""Translation of a user's structure for llguidance, and checks of it.

Knows grammars; the caller passes in the tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import reduce
from itertools import takewhile
from operator import getitem
from typing import TYPE_CHECKING, Any

from llguidance import LLMatcher, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pipedec.core import StructuredOutputs, UserError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

_MAX_CHECKS = 200  # of a schema, to find the place of a mistake
_MAX_MESSAGE = 300  # characters
# Blanks as Python's ``json.dumps`` writes them: they are forced, and no model loops in them.
_JSON_OPTIONS: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def check(structure: StructuredOutputs, tokens: LLTokenizer | None = None) -> None:
    """Check a structure without a model.

    Args:
        tokens: to look up the special tokens that a grammar names; None takes any for known.

    Raises:
        UserError: in one line with the place of the mistake, the structure is invalid or not supported.
    """
    message = _mistake(source(structure), tokens)
    if message and structure.json is not None:
        schema = _schema(structure)
        message += f" (at {_place(schema, message, lambda changed: _mistake(_schema_source(changed), tokens))})"
    if message:
        raise UserError(f"structured_outputs.{structure.kind}: {message}")


def _mistake(text: str, tokens: LLTokenizer | None) -> str:
    """In one line; empty if there is none."""
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
        return LLMatcher.grammar_from_lark(_lark(structure.grammar))
    return _schema_source({"type": "object"})


def _schema(structure: StructuredOutputs) -> dict[str, Any]:
    """An object; llguidance does not take ``true`` and ``false`` for a whole schema."""
    assert isinstance(structure.json, str)
    schema = json.loads(structure.json)
    return {"allOf": [schema]} if isinstance(schema, bool) else schema


def _schema_source(schema: dict[str, Any]) -> str:
    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=_JSON_OPTIONS)
    except (ValueError, RecursionError) as error:  # it is nested too deeply
        raise UserError(f"structured_outputs.json: {one_line(str(error))}") from None


def _lark(grammar: str) -> str:
    """From Lark or GBNF."""
    try:
        return any_to_lark(grammar)
    except Exception as error:
        raise UserError(f"structured_outputs.grammar: {one_line(str(error))}") from None


def _place(schema: Any, message: str, mistake_of: Callable[[Any], str]) -> str:
    """JSON pointer to the innermost part of a schema without which this mistake would not be found."""
    found: tuple[str | int, ...] = ()
    left = iter(range(_MAX_CHECKS))
    parts = _parts(schema, found)
    while (part := next(parts, None)) is not None and next(left, None) is not None:
        if mistake_of(_without(schema, part)) != message:
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


def _without(schema: Any, at: tuple[str | int, ...]) -> Any:
    """A copy with an object there that allows everything."""
    changed = deepcopy(schema)
    reduce(getitem, at[:-1], changed)[at[-1]] = {}
    return changed


def one_line(message: str) -> str:
    """The parser's first lines, up to its quotation of the source."""
    lines = [line.strip() for line in re.sub(r"^at \d+\(\d+\): (?=invalid regex)", "", message).splitlines()]
    told = list(takewhile(lambda line: not re.match(r"\d+ \|", line), lines))
    return " ".join(line for line in told if line.strip("^ "))[:_MAX_MESSAGE]
