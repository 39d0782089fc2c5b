"""Grammars, in Lark's notation, of answers that only call tools. Knows JSON schemas; the forms give what stands around them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from pipedec.text.parsers.parser import Schemas, TokenId, no_token

_JSON_GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}


def literal(text: str, token_id: TokenId = no_token) -> str:
    """An expression for the text itself, in which each mark ``<…>`` or ``[…]`` that has a ``token_id`` is that token."""
    parts = []
    for part in filter(None, re.split(r"(<[^<>\s]+>|\[[^\[\]\s]+\])", text)):
        token = token_id(part) if part[0] in "<[" else None
        parts.append(json.dumps(part, ensure_ascii=False) if token is None else f"<[{token}]>")
    return " ".join(parts)


def json_value(schema: Mapping[str, Any]) -> str:
    """An expression for JSON that follows the schema."""
    return f"%json {json.dumps({**schema, 'x-guidance': _JSON_GUIDANCE})}"


def json_rules(rule: str, schema: Mapping[str, Any]) -> list[str]:
    """The ``rule`` for JSON that follows the schema."""
    return [f"{rule}: {json_value(schema)}"]


def calls_grammar(
    tools: Schemas,
    is_single: bool,
    separator: str,
    before: Callable[[str], str],
    after: str,
    first: str = "",
    last: str = "",
    arguments: Callable[[str, Mapping[str, Any]], list[str]] = json_rules,
) -> str:
    """A grammar of calls. All but ``tools`` are expressions, or give them.

    Args:
        separator: between two calls.
        before: from a tool's name to what stands before its arguments.
        after: what stands after the arguments.
        first: before the first call.
        last: after the last one.
        arguments: from the name of a rule, and the schema of the arguments, to that rule and others that it needs.
    """
    lines = [
        f"start: {first} call" + ("" if is_single else f" ({separator} call)*") + f" {last}",
        f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}",
    ]
    for index, (name, given) in enumerate(tools.items()):
        schema = _NO_ARGUMENTS if given is None else {"type": "object", **given}
        lines.append(f"call_{index}: {before(name)} arguments_{index} {after}")
        lines += arguments(f"arguments_{index}", schema)
    return "\n".join(lines)
