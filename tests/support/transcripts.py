"""Texts that models write, with the parts that they are divided into, and the tools that they may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipedec.text.parsers.reader import Thought

SCHEMAS: dict[str, dict[str, Any] | None] = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "units": {"enum": ["C", "F"]}},
        "required": ["city"],
    },
    "add": {"properties": {"a": {"type": "number"}, "b": {"type": "number"}, "more": {"type": "array"}}},
    "note": {"properties": {"text": {"type": "string"}, "tags": {"type": "object"}}},
    "get.time-now": None,
}


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str  # JSON text


@dataclass(frozen=True)
class Transcript:
    """``parts`` are joined: no two texts or two thoughts follow one another."""

    text: str
    parts: tuple[str | Thought | Call, ...]
    prompt: str = ""


def wrote(text: str, *parts: str | Thought | Call, prompt: str = "") -> Transcript:
    return Transcript(text, parts, prompt)


def wrote_text(text: str) -> Transcript:
    """All of it is for the user."""
    return wrote(text, text)
