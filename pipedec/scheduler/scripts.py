"""Finds the Lua scripts and prepends the shared files that a script uses. Does not know what they do."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the scripts are inside the package, in a checkout next to it.
_DIRECTORIES = (_PACKAGE / "lua", _PACKAGE.parent / "lua")


def _read(name: str) -> str:
    for directory in _DIRECTORIES:
        path = directory / f"{name}.lua"
        if path.is_file():
            return path.read_text(encoding="utf-8")
    raise FileNotFoundError(f"{name}.lua is in none of {', '.join(map(str, _DIRECTORIES))}: the installation is incomplete")


@cache
def script_text(name: str) -> str:
    """The source of ``lua/{name}.lua``, after that of the files that its first line names (``-- uses: ONE OTHER``), if any.

    Raises:
        FileNotFoundError: the installation lacks the script.
    """
    text = _read(name)
    uses = re.match(r"-- uses: ([\w ]+)\n", text)
    shared = uses[1].split() if uses else []
    return "\n".join([*map(_read, shared), text])


@cache
def script_sha(name: str) -> str:
    """The hash by which a server knows the script after its first execution."""
    return hashlib.sha1(script_text(name).encode()).hexdigest()


@cache
def scripts_digest() -> str:
    """Identifies the format that this installation writes to Redis: SHA-256 of all scripts (12 hex digits)."""
    directory = next(path for path in _DIRECTORIES if path.is_dir())
    sources = [path.read_bytes() for path in sorted(directory.glob("*.lua"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:12]
