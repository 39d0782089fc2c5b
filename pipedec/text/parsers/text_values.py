"""Grammars, in Lark's notation, of strings that are written as they are, without quotes.

Knows JSON schemas; no forms of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipedec.text.parsers.json_text import referred, types_of

_ANY = "/(?s:.*)/"
_IRREGULAR = re.compile(r"\(\?(?!:)|\\[bBkpP1-9]|(?<!\\)\$|(?<![\\\[])\^")  # in patterns: not in regular expressions


def text_value(schema: Mapping[str, Any], excluded: Sequence[str]) -> str | None:
    """An expression, for a terminal, of the strings that a schema allows; None if it allows more than strings and null.

    Formats, and patterns that are no regular expressions, are left out. ``excluded``: texts that no string has, as they would
    end it.
    """
    types = types_of(schema)
    if "string" not in types or not types <= {"string", "null"}:
        return None
    without = f"~/(?s:.*)(?:{'|'.join(map(_regex, excluded))})(?s:.*)/"
    return f"(({' | '.join(_strings(schema, schema, set())) or _ANY}) & {without})"


def _strings(schema: Any, whole: Mapping[str, Any], followed: set[str]) -> Iterator[str]:
    """Alternatives. ``followed``: references whose strings have been given."""
    if not isinstance(schema, Mapping) or "string" not in types_of({"type": schema.get("type", "string")}):
        return
    parts = next((parts for key in ("anyOf", "oneOf", "allOf") if isinstance(parts := schema.get(key), list)), [])
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(reference := schema.get("$ref"), str):
        if reference not in followed:
            followed.add(reference)
            yield from _strings(referred(whole, reference), whole, followed)
    elif parts and ("allOf" not in schema or len(parts) == 1):
        for part in parts:
            yield from _strings(part, whole, followed)
    elif isinstance(values, list):
        yield from (json.dumps(value, ensure_ascii=False) for value in values if isinstance(value, str))
    else:
        yield " & ".join(_limits(schema)) or _ANY


def _limits(schema: Mapping[str, Any]) -> Iterator[str]:
    least, most = (schema.get(key) for key in ("minLength", "maxLength"))
    if isinstance(least, int) or isinstance(most, int):
        yield f"/(?s:.{{{least if isinstance(least, int) else 0},{most if isinstance(most, int) else ''}}})/"
    if isinstance(pattern := schema.get("pattern"), str):
        inner = pattern.removeprefix("^")
        inner = inner.removesuffix("$") if not inner.endswith(r"\$") else inner
        is_bound = len(inner) < len(pattern)
        if not _IRREGULAR.search(inner) and not (is_bound and "|" in inner and not re.fullmatch(r"\([^()]*\)", inner)):
            before, after = ("" if pattern.startswith("^") else "(?s:.*)"), ("" if pattern.endswith("$") else "(?s:.*)")
            yield f"/{before}(?:{_in_slashes(inner)}){after}/"


def _regex(text: str) -> str:
    return _in_slashes(re.escape(text))


def _in_slashes(pattern: str) -> str:
    """The regular expression as it stands between two slashes."""
    escaped = re.sub(r"\\[\s\S]|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern)
    return re.sub(r"\\?\n", r"\\n", escaped)
