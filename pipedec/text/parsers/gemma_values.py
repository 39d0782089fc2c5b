"""Gemma's notation of values, ``{key:<|"|>text<|"|>,list:[1,true]}``: read as JSON, and grammars of it for schemas.

Strings stand between marks and have no escapes; keys stand without marks. Knows JSON schemas; no calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import regex

from pipedec.text.parsers.grammars import json_value, literal
from pipedec.text.parsers.json_text import PYTHON_NAMES, as_json, properties, property_schema, referred
from pipedec.text.parsers.parser import TokenId
from pipedec.text.parsers.source import Pieces, Source

_CLOSING = {"{": "}", "[": "]"}
_BARE = regex.compile(r"[^\s,{}\[\]<][^,{}\[\]<]{0,199}(?=[,}\]<])")
_PLAIN_KEY = r"[^\s:,{}\[\]<]{1,99}"
_JSON = re.compile(r'-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|"[^"\\\x00-\x1f]*"')
_LIMITS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def as_json_object(source: Source, quote: str) -> Pieces[bool]:
    """An object, as JSON text as it comes. Returns whether it has ended; if not, what comes next is not in the notation.

    Raises EndOfText if the text ends before.
    """
    mark = re.escape(quote)
    key_pattern = regex.compile(rf"(?:{mark}(?P<key>[^<]{{0,99}}){mark}|(?P<key>{_PLAIN_KEY}))\s{{0,9}}:")
    closing: list[str] = []  # the brackets that are open
    while True:
        if closing[-1:] == ["}"]:
            key = yield from source.take(key_pattern)
            if key is None:
                return False
            yield _string(key["key"].strip('"')) + ": "
            yield from source.skip()
        found = yield from source.mark((quote, *_CLOSING))
        if found in _CLOSING:
            closing.append(_CLOSING[found])
            yield found
            yield from source.skip()
            if (yield from source.mark((closing[-1],))) is None:
                continue
            yield closing.pop()
        elif found == quote:
            yield from as_json(source.until((quote,)), {"type": "string"})
        else:
            bare = yield from source.take(_BARE)
            if bare is None:
                return False
            yield _scalar(bare[0].strip())
        if (yield from _after_value(source, closing)) is False:
            return not closing


def _after_value(source: Source, closing: list[str]) -> Pieces[bool]:
    """The brackets that close after a value, and the comma. Returns whether another value comes."""
    while closing:
        yield from source.skip()
        found = yield from source.mark((",", closing[-1]))
        if found is None:
            return False
        if found == ",":
            yield ", "
            yield from source.skip()
            return True
        yield closing.pop()
    return False


def _scalar(text: str) -> str:
    text = PYTHON_NAMES.get(text, text)
    return text if _JSON.fullmatch(text) else _string(text)


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


class ValueRules:
    """Grammars of values that follow schemas.

    They hold types, constants, properties and their order, ranges of numbers, lengths of lists, and references. Of ``allOf`` they
    hold the first part. Patterns, formats and lengths of strings are not held, and no other properties than the schema's are
    written.
    """

    def __init__(self, quote: str, token_id: TokenId) -> None:
        self._quote = literal(quote, token_id)
        if token_id(quote) is None:
            text = [f"quoted: {self._quote} text", f"text[suffix={json.dumps(quote)}]: /(?s:.*)/"]
        else:
            without = f"~/(?s:.*){re.escape(quote)}(?s:.*)/"
            text = [f"quoted: {self._quote} TEXT {self._quote}", f"TEXT: /(?s:.*)/ & {without}"]
        rules = [
            "any: quoted | scalar | list | object",
            f"scalar: {json_value({'type': ['number', 'boolean', 'null']})}",
            'list: "[" (any ("," any)*)? "]"',
            'object: "{" (pair ("," pair)*)? "}"',
            'pair: /[A-Za-z0-9_.-]{1,64}/ ":" any',
        ]
        self.common = "\n".join(text + rules)  # for all grammars

    def of_object(self, rule: str, schema: Mapping[str, Any]) -> list[str]:
        """The ``rule`` for objects that follow the schema, and others that it needs besides the common ones."""
        try:
            return _SchemaRules(rule, schema, self._quote).lines
        except RecursionError:
            return [f"{rule}: object"]


class _SchemaRules:
    """Rules for one schema, in ``lines``. Each method returns the name of a rule."""

    def __init__(self, rule: str, schema: Mapping[str, Any], quote: str) -> None:
        self.lines: list[str] = []
        self._prefix, self._whole, self._quote = rule, schema, quote
        self._referred: dict[str, str] = {}
        self._num_rules = 0
        self.lines.append(f"{rule}: {self._value(schema)}")

    def _rule(self, body: str) -> str:
        name = self._new_name()
        self.lines.append(f"{name}: {body}")
        return name

    def _new_name(self) -> str:
        self._num_rules += 1
        return f"{self._prefix}_{self._num_rules}"

    def _value(self, schema: Any) -> str:
        if not isinstance(schema, Mapping):
            return "any"
        if isinstance(reference := schema.get("$ref"), str):
            return self._reference(reference)
        for key in ("anyOf", "oneOf"):
            if parts := _items(schema, key):
                return self._any_of(map(self._value, parts))
        if parts := _items(schema, "allOf"):
            return self._value(parts[0])
        if values := [schema["const"]] if "const" in schema else _items(schema, "enum"):
            return self._any_of(map(self._written, values))
        kinds = _items(schema, "type") or [schema.get("type") or _kind(schema)]
        return self._any_of(self._of_kind(kind, schema) for kind in kinds)

    def _any_of(self, names: Iterable[str]) -> str:
        return self._rule(" | ".join(names))

    def _reference(self, reference: str) -> str:
        if reference not in self._referred:
            self._referred[reference] = name = self._new_name()
            self.lines.append(f"{name}: {self._value(referred(self._whole, reference))}")
        return self._referred[reference]

    def _of_kind(self, kind: Any, schema: Mapping[str, Any]) -> str:
        if kind == "string":
            return "quoted"
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return self._array(schema)
        if kind in ("number", "integer", "boolean", "null"):
            limits = {key: schema[key] for key in _LIMITS if key in schema and kind in ("number", "integer")}
            return self._rule(json_value({"type": kind, **limits}))
        return "any"

    def _array(self, schema: Mapping[str, Any]) -> str:
        item, low, high = self._value(schema.get("items", {})), _count(schema, "minItems") or 0, _count(schema, "maxItems")
        if high == 0:
            return self._rule('"[" "]"')
        upper = "" if high is None else high - 1
        items = f'{item} ("," {item}){{{max(low - 1, 0)},{upper}}}'
        return self._rule(f'"[" {items} "]"' if low else f'"[" ({items})? "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        if not (known := properties(schema)) and schema.get("additionalProperties") is not False:
            return "object"
        at_first = after_others = ""  # the properties from one on
        for key, is_required in reversed(known.items()):
            pair = f"{self._key(key)} {self._value(property_schema(schema, key))}"
            first, other = f"{pair} {after_others}", f'"," {pair} {after_others}'
            if not is_required:
                first, other = _or(first, at_first), _or(other, after_others)
            at_first, after_others = self._rule(first), self._rule(other)
        return self._rule(f'"{{" {at_first} "}}"')

    def _written(self, value: Any) -> str:
        if isinstance(value, str):
            return self._rule(f"{self._quote} {_string(value)} {self._quote}" if value else f"{self._quote} {self._quote}")
        if isinstance(value, list):
            return self._rule(' "," '.join(map(self._written, value)).join(('"[" ', ' "]"')))
        if isinstance(value, dict):
            pairs = (f"{self._key(key)} {self._written(item)}" for key, item in value.items())
            return self._rule(' "," '.join(pairs).join(('"{" ', ' "}"')))
        return self._rule(_string(json.dumps(value)))

    def _key(self, key: str) -> str:
        plain = re.fullmatch(_PLAIN_KEY, key) and '"' not in key
        return _string(f"{key}:") if plain else f'{self._quote} {_string(key)} {self._quote} ":"'


def _or(one: str, other: str) -> str:
    return f"{one} | {other}" if other else f"({one})?"


def _items(schema: Mapping[str, Any], key: str) -> list[Any]:
    """The list that is the value of a key; empty if it is none."""
    found = schema.get(key)
    return found if isinstance(found, list) else []


def _count(schema: Mapping[str, Any], key: str) -> int | None:
    found = schema.get(key)
    return found if isinstance(found, int) and found >= 0 else None


def _kind(schema: Mapping[str, Any]) -> str | None:
    return "object" if "properties" in schema else "array" if "items" in schema else None
