"""GBNF as llama.cpp reads it, rewritten so that llguidance's converter to Lark reads the same."""

from __future__ import annotations

import re

_HEAD = re.compile(r"(?m)^[ \t]*([A-Za-z0-9_-]+)[ \t]*::=")
_PARTS = re.compile(
    r"""(?P<text>"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\])|(?P<comment>\#[^\n]*)|\{[^}]*\}|(?P<name>[A-Za-z0-9_-]+)""",
    re.DOTALL | re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(x[0-9A-Fa-f]{2}|u[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8}|.)", re.DOTALL)
_OPERATORS = re.compile(r"&&+|~~+|--+")  # between sets, in llguidance's classes


def is_gbnf(grammar: str) -> bool:
    """Whether it has a rule of GBNF; else it is Lark."""
    return _HEAD.search(grammar) is not None


def plain_gbnf(grammar: str) -> str:
    """The same grammar, line by line, without comments and escapes by number, and with names that Lark can have, too.

    Raises ValueError for a rule that is missing or defined twice, with its line.
    """
    grammar = grammar.replace("\r\n", "\n").replace("\r", "\n")
    names: dict[str, str] = {}
    for found in _HEAD.finditer(grammar):
        if found[1] in names:
            raise ValueError(f"line {_line(grammar, found.start(1))}: the rule {found[1]} is defined twice")
        names[found[1]] = "root" if found[1] == "root" else _new_name(found[1], set(names.values()))

    def rewritten(part: re.Match[str]) -> str:
        if part["text"]:
            return _rewritten_text(part[0])
        if part["name"] and part[0] not in names:
            raise ValueError(f"line {_line(grammar, part.start())}: there is no rule {part[0]}")
        return "" if part["comment"] else names[part[0]] if part["name"] else part[0]

    return _PARTS.sub(rewritten, grammar)


def _line(text: str, place: int) -> int:
    return text.count("\n", 0, place) + 1


def _new_name(name: str, taken: set[str]) -> str:
    plain = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    plain = plain if plain[:1].isalpha() and plain not in ("root", "start") else f"rule_{plain}"
    while plain in taken:
        plain += "_"
    return plain


def _rewritten_text(text: str) -> str:
    """``text``: a literal or a class."""

    def character(escape: re.Match[str]) -> str:
        code = escape[1]
        if code[0] not in "xuU" or len(code) == 1:
            return escape[0]
        number = int(code[1:], 16)
        if number > 0x10FFFF or 0xD800 <= number < 0xE000:
            raise ValueError(f"\\{code} is no character")
        return chr(number) if number >= 0xA0 else f"\\x{number:02x}"

    text = _ESCAPE.sub(character, text)
    return _OPERATORS.sub(lambda found: found[0][0] + f"\\x{ord(found[0][0]):02x}", text) if text[0] == "[" else text
