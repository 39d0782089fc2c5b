"""Finds the Lua scripts and joins each with the shared part it names; it does not know what they do."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the scripts lie inside the package, in a checkout beside it.
_PLACES = (_PACKAGE / "lua", _PACKAGE.parent / "lua")


def _read(name: str) -> str:
    for place in _PLACES:
        path = place / f"{name}.lua"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(f"{name}.lua is in none of {', '.join(map(str, _PLACES))}: the installation is incomplete")


@cache
def script_text(name: str) -> str:
    """The text of ``lua/{name}.lua``, with the file its first line names ("-- uses: graph") in front of it."""
    text = _read(name)
    uses = re.match(r"-- uses: (\w+)\n", text)
    return f"{_read(uses[1])}\n{text}" if uses else text
