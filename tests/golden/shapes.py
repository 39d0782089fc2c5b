"""Shapes of JSON: for each path of a value, or of what a schema allows, what stands there. Knows nothing of what it means."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Shape = dict[str, str]  # "choices[].index": "number"

_TYPES = {bool: "boolean", int: "number", float: "number", str: "string", type(None): "null", dict: "object", list: "array"}
_TYPE_LIMITS = (-(2**63), 2**63 - 1, sys.float_info.max)
_NO_RULES = (
    "$defs", "$ref", "title", "description", "default", "properties", "required", "items", "prefixItems", "anyOf", "oneOf",
)  # fmt: skip


def shape_of(*values: Any, maps: Iterable[str] = ()) -> Shape:
    """The types seen at each path in any of ``values``.

    Null counts only where nothing else was seen: whether it is seen, too, is often a matter of time.

    Args:
        maps: paths of objects whose keys are data, which become ``*``.
    """
    seen: dict[str, set[str]] = {}
    for value in values:
        for path, found in _seen(value, "", frozenset(maps)):
            seen.setdefault(path, set()).add(found)
    return _telling({path: " | ".join(sorted(types - {"null"} or types)) for path, types in sorted(seen.items())})


def _seen(value: Any, path: str, maps: frozenset[str]) -> Iterator[tuple[str, str]]:
    yield path, _TYPES[type(value)]
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _seen(inner, _below(path, "*" if path in maps else key), maps)
    if isinstance(value, list):
        for inner in value:
            yield from _seen(inner, path + "[]", maps)


def shape_of_schema(schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> Shape:
    """What a JSON schema allows at each path.

    Args:
        definitions: by the last part of a ``$ref``; None for those of the schema itself.
    """
    found: dict[str, list[str]] = {}
    for path, rules in _allowed(schema, "", schema.get("$defs", {}) if definitions is None else definitions):
        if rules not in found.setdefault(path, []):
            found[path].append(rules)
    return _telling({path: " | ".join(rules) for path, rules in found.items()})


def _allowed(schema: Any, path: str, known: Mapping[str, Any], is_required: bool = False) -> Iterator[tuple[str, str]]:
    schema = (known[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else {}) | schema
    schema = _spelled_out(schema)
    for choice in (choices := [*schema.get("anyOf", ()), *schema.get("oneOf", ())]):
        yield from _allowed(choice, path, known)
    rules = [f"{key} {_plain(rule)}" for key, rule in sorted(schema.items()) if key not in _NO_RULES and not _is_inner(rule)]
    rules += ["required"] * is_required + [f"default {_plain(value)}" for key, value in schema.items() if key == "default"]
    if rules or not choices:
        yield path, ", ".join(rules)
    for name, inner in schema.get("properties", {}).items():
        yield from _allowed(inner, _below(path, name), known, name in schema.get("required", ()))
    if _is_inner(inner := schema.get("additionalProperties")):
        yield from _allowed(inner, _below(path, "*"), known)
    for inner in (*schema.get("prefixItems", ()), *([schema["items"]] if _is_inner(schema.get("items")) else [])):
        yield from _allowed(inner, path + "[]", known)


def _spelled_out(schema: Any) -> Any:
    """As other writers of schemas have it: the type of texts to choose from, None as a choice of its own, and no range that
    is the whole range of a type."""
    spelled = {key: rule for key, rule in schema.items() if key not in ("minimum", "maximum") or rule not in _TYPE_LIMITS}
    if schema.get("type") == "object" and "properties" not in schema and not _is_inner(schema.get("additionalProperties")):
        spelled["additionalProperties"] = True
    elif schema.get("additionalProperties") is False:
        del spelled["additionalProperties"]
    if (texts := spelled.pop("enum", None)) is None:
        return spelled
    own = [text for text in texts if text is not None]
    known = {"type": "string"} | ({"enum": own} if len(own) > 1 else {"const": own[0]})
    return spelled | (known if len(own) == len(texts) else {"anyOf": [known, {"type": "null"}]})


def _is_inner(rule: Any) -> bool:
    return isinstance(rule, dict)


def _telling(shape: Shape) -> Shape:
    """Without objects and arrays of which the paths below tell."""
    above = {
        path[:place].rstrip(".") for path in shape for place in (0, *(found.start() for found in re.finditer(r"[.\[]", path)))
    }
    plain = ("object", "array", "type object", "type array")
    return {path: found for path, found in shape.items() if path not in above or found not in plain or len(shape) == 1}


def _plain(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
