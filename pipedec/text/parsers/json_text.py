"""JSON in text that comes piece by piece: where an object ends, and texts that become JSON as they come.

Knows JSON and its schemas; no forms of answers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pipedec.text.parsers.source import Pieces, Source, joined

_TYPES = {
    str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null", list: "array", dict: "object",
}  # fmt: skip
ALL_TYPES = frozenset(_TYPES.values())
_NULLS = ("null", "None")
PYTHON_NAMES = {"None": "null", "True": "true", "False": "false"}


def rest_of_object(source: Source, depth: int = 0) -> Pieces[None]:
    """The text up to the end of an object, as it comes. ``depth``: brackets that are open already.

    A ``<`` outside strings, which no JSON has, ends it, too. Raises EndOfText if it does not end.
    """
    end = _ObjectEnd(depth)
    while True:
        text = source.read()
        place = end.find(text)
        source.unread("" if place is None else text[place:])
        if piece := text[:place]:
            yield piece
        if place is not None:
            return
        yield from source.more()


class _ObjectEnd:
    """Finds where a JSON object ends, in text that comes piece by piece. ``depth``: brackets that are open before it."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._is_string = self._is_escaped = False

    def find(self, text: str) -> int | None:
        """The position after the end; None if it is not in this piece."""
        for place, letter in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_string:
                self._is_string, self._is_escaped = letter != '"', letter == "\\"
            elif letter == '"':
                self._is_string = True
            elif letter == "<":
                return place
            else:
                self._depth += (letter in "{[") - (letter in "}]")
                if letter in "}]" and self._depth <= 0:
                    return place + 1
        return None


def properties(schema: Mapping[str, Any] | None) -> dict[str, bool]:
    """Names of the properties of an object, in order, and whether each is required."""
    found = _object(schema)
    named, required = found.get("properties"), found.get("required")
    names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
    return dict.fromkeys(named if isinstance(named, Mapping) else (), False) | dict.fromkeys(names, True)


def property_schema(schema: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    """The schema of a property of an object; empty if it has none."""
    found = _object(schema).get("properties")
    found = found.get(name) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _object(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema itself, or that to which it refers as a whole."""
    found = schema or {}
    if isinstance(reference := found.get("$ref"), str):
        found = referred(found, reference)
    return found if isinstance(found, Mapping) else {}


def standalone(schema: Mapping[str, Any], whole: Mapping[str, Any]) -> dict[str, Any]:
    """A part of a schema as a schema of its own: all to which it refers in the ``whole`` comes with it."""
    references: dict[str, int] = {}
    found = _with_references(schema, references)
    definitions: dict[str, Any] = {}
    while len(definitions) < len(references):
        reference = list(references)[len(definitions)]
        definitions[str(len(definitions))] = _with_references(referred(whole, reference), references)
    return {**found, "$defs": definitions} if definitions else found


def _with_references(schema: Any, references: dict[str, int]) -> Any:
    """The schema, with references to numbers in ``$defs``: those of ``references``, to which it adds its own."""
    if isinstance(schema, list):
        return [_with_references(part, references) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    changed = {key: _with_references(value, references) for key, value in schema.items()}
    if isinstance(reference := schema.get("$ref"), str):
        changed["$ref"] = f"#/$defs/{references.setdefault(reference, len(references))}"
    return changed


def referred(schema: Any, reference: str) -> Any:
    """The part of a schema to which a reference in it leads, like ``#/$defs/name``; empty if there is none."""
    if not reference.startswith("#"):
        return {}
    found = schema
    for key in reference.split("/")[1:]:
        key = key.replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (LookupError, TypeError, ValueError):
            return {}
    return found


def types_of(schema: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> frozenset[str]:
    """The types that a value may have; all of them where the schema does not limit them. It is a part of the ``whole``."""
    try:
        return _types(schema, schema if whole is None else whole, {}) or ALL_TYPES
    except RecursionError:
        return ALL_TYPES


def _types(schema: Any, whole: Mapping[str, Any], known: dict[str, frozenset[str]]) -> frozenset[str]:
    """``known``: those of references; of one that is being followed, none."""
    if not isinstance(schema, Mapping):
        return ALL_TYPES
    limits = []
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in known:
            known[reference] = frozenset()
            known[reference] = _types(referred(whole, reference), whole, known)
        limits.append(known[reference])
    if isinstance(given := schema.get("type"), str | list):
        names = {given} if isinstance(given, str) else {name for name in given if isinstance(name, str)}
        names |= ({"integer"} if "number" in names else set()) | ({"null"} if schema.get("nullable") is True else set())
        limits.append(frozenset(names))
    for key in ("anyOf", "oneOf"):
        if isinstance(parts := schema.get(key), list) and parts:
            limits.append(frozenset[str]().union(*(_types(part, whole, known) for part in parts)))
    if isinstance(parts := schema.get("allOf"), list):
        limits += [_types(part, whole, known) for part in parts]
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        limits.append(frozenset(_TYPES[type(value)] for value in values))
    return ALL_TYPES.intersection(*limits)


def as_json(pieces: Pieces[object], schema: Mapping[str, Any], whole: Mapping[str, Any] | None = None) -> Pieces[None]:
    """A value that is written as text, as JSON text. Its schema is a part of the ``whole``.

    A string is passed on as it comes; other values wait for their end. A value that is no JSON is a string, except for Python's
    names of null, true and false. Where the answer ends in a value, a string stays open, and nothing of another value is passed
    on.
    """
    types = types_of(schema, whole)
    if "string" not in types or not types <= {"string", "null"}:
        text = yield from joined(pieces)
        yield _value(text, types)
        return
    is_open, held = "null" not in types, ""
    if is_open:
        yield '"'
    for piece in pieces:
        if not isinstance(piece, str):
            yield piece
            continue
        held += piece
        if not is_open and not any(name.startswith(held) for name in _NULLS):
            is_open = True
            yield '"'
        if is_open:
            yield _escaped(held)
            held = ""
    if held in _NULLS:
        yield "null"
    else:
        yield '"' if is_open else f'"{held}"'


def _value(text: str, types: frozenset[str]) -> str:
    """The text itself if it is JSON that may stand here, else as a string."""
    written = text.strip()
    if types != ALL_TYPES:
        written = PYTHON_NAMES.get(written, written)
    try:
        found = _TYPES[type(json.loads(written, parse_constant=_no_json))]
    except (ValueError, RecursionError):
        found = None
    if found is None or (found not in types and "string" in types):
        return f'"{_escaped(text)}"'
    return written


def _no_json(constant: str) -> None:
    raise ValueError(constant)


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
