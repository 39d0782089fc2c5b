"""The Lua scripts: their sources with the shared files that they use."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent
# In a wheel the scripts are inside the package, in a checkout next to it.
_DIRECTORY = _PACKAGE / "lua" if (_PACKAGE / "lua").is_dir() else _PACKAGE.parent / "lua"
KEY_SECONDS = 60  # time to live of the run's keys, renewed with every lease
LEASE_MS = 5000


@cache
def script_text(name: str) -> str:
    """The source of ``lua/{name}.lua``, after that of the files that its first line names (``-- uses: ONE OTHER``), if any.

    Raises:
        FileNotFoundError: the installation lacks the script.
    """
    text = (_DIRECTORY / f"{name}.lua").read_text(encoding="utf-8")
    uses = re.match(r"-- uses: ([\w ]+)\n", text)
    shared = [(_DIRECTORY / f"{other}.lua").read_text(encoding="utf-8") for other in uses[1].split()] if uses else []
    return "\n".join([*shared, text])


@cache
def script_sha(name: str) -> str:
    """The hash by which a server knows the script after its first execution."""
    return hashlib.sha1(script_text(name).encode()).hexdigest()


@cache
def scripts_digest() -> str:
    """Identifies the protocol in Redis of this installation: SHA-256 of all scripts (12 hex digits)."""
    sources = [path.read_bytes() for path in sorted(_DIRECTORY.glob("*.lua"))]
    return hashlib.sha256(b"\0".join(sources)).hexdigest()[:12]
