"""Whole sentences of docstrings, and their sections of names with descriptions.

Owns where such text begins and ends. It does not know the questions about it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from recipes.thread_models.structure import MIN_DETAIL_CHARACTERS, MIN_POINTS, ambiguity, is_prose, sentences

_MAX_GLOSS_CHARACTERS = 320
_MAX_PROSE_CHARACTERS = 700
_HEADERS = {
    "arguments": re.compile(r"\b(?:arg(?:ument)?s?|param(?:eter)?s?)\b", re.IGNORECASE),
    "options": re.compile(r"\b(?:options?|keywords?|flags?|settings?)\b", re.IGNORECASE),
    "attributes": re.compile(r"\b(?:attributes?|variables?|fields?|members?|properties)\b", re.IGNORECASE),
    "methods": re.compile(r"\bmethods?\b", re.IGNORECASE),
    "functions": re.compile(r"\bfunctions?\b", re.IGNORECASE),
    "exceptions": re.compile(r"\bexceptions?\b", re.IGNORECASE),
    "classes": re.compile(r"\bclass(?:es)?\b", re.IGNORECASE),
}
_ENTRY = re.compile(
    r"^ *(?:[-*] +)?(?::param +)?(?P<name>[`'\"]*[*\w][\w.*-]*(?:\([\w=, .*\[\]'\"]*\))?[`'\"]*)"
    r"(?: +--? +| *: +| +--$)(?P<text>\S.*)$"
)
_SIGNATURE = re.compile(r"[\w.]+\(.*\)(?: *->.*)?$")
_NO_NAMES = frozenset(
    ("note", "notes", "warning", "example", "examples", "returns", "raises", "args", "see", "todo", "xxx", "usage", "default")
)


@dataclass(frozen=True)
class Entry:
    """One member, argument or step: its name and description."""

    name: str
    text: str


def sections(docstring: str) -> Iterator[tuple[str, list[Entry]]]:
    """Lists of three or more ``name -- description`` in a docstring, each with the noun that the line before it suggests."""
    header = ""
    entries: list[Entry] = []
    entries_depth = 0
    for line in [*inspect.cleandoc(docstring).splitlines(), "end"]:
        depth = len(line) - len(line.lstrip())
        if entries and (not line.strip() or depth > entries_depth):
            entries[-1] = Entry(entries[-1].name, f"{entries[-1].text} {line.strip()}")
            continue
        entry = _entry(line)
        if entry is None or depth != entries_depth:
            if len(entries) >= MIN_POINTS:
                yield _noun(header), [Entry(each.name, gloss(each.text)) for each in entries]
            entries = []
        if entry is not None:
            entries.append(entry)
            entries_depth = depth
        elif line.strip():
            header = line


def _entry(line: str) -> Entry | None:
    found = _ENTRY.match(line)
    name = found["name"].strip("`'\"*") if found else ""
    return Entry(name, found["text"]) if found and name.lower() not in _NO_NAMES else None


def _noun(header: str) -> str:
    return next((noun for noun, pattern in _HEADERS.items() if pattern.search(header)), "parts")


def prose(docstring: str) -> str:
    """The first paragraphs on one line, up to 700 characters."""
    text = ""
    for paragraph in docstring.split("\n\n"):
        line = " ".join(paragraph.split())
        if not is_good_paragraph(paragraph) or len(text) + len(line) > _MAX_PROSE_CHARACTERS:
            break
        text = f"{text} {line}".strip()
    return text


def gloss(text: str) -> str:
    """The first paragraph's whole sentences on one line, up to 320 characters; empty if they are too short or ambiguous."""
    paragraph = " ".join(text.split("\n\n")[0].split())
    short = ""
    for sentence in sentences(paragraph):
        if len(short) + len(sentence) > _MAX_GLOSS_CHARACTERS:
            break
        short += sentence
    short = short.rstrip(" :;,")
    is_useful = len(short) >= MIN_DETAIL_CHARACTERS and " " in short and not _SIGNATURE.match(short)
    return short if is_useful and not ambiguity(short) else ""


def is_good_paragraph(paragraph: str) -> bool:
    return is_prose(paragraph) and ambiguity(paragraph) is None and paragraph.rstrip()[-1] in ".!?)"
