"""Directories: of a user's state, of what can be computed again, and of the shipped models (the package ``pipedec_models``,
installed beside pipedec).
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
import tempfile
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from pipedec.core.errors import UserError

REFERENCE_PAIR = "reference-pair"  # the name of the shipped target
_SHIPPED = {REFERENCE_PAIR: "reference_pair", "smollm2": "reference_smollm2"}  # the directory of what a named target has
_YOUR_OWN = "set PIPEDEC_STATE_DIR to a directory of your own"


def state_directory() -> Path:
    """The private directory for the state of local clusters, created with mode 0700.

    $PIPEDEC_STATE_DIR, else $XDG_RUNTIME_DIR/pipedec, else ~/.cache/pipedec, else pipedec-UID among the temporary files. If
    $PIPEDEC_STATE_DIR is another user's or for all users, as a container's volume, it is pipedec-UID in that. UserError when it
    cannot be made, or is open to other users.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR", "")
    directory = _own_directory(runtime if os.path.isdir(runtime) else "")
    if stat.S_IMODE(directory.stat().st_mode) & 0o077:
        raise UserError(f"{directory}: open to other users: chmod 700 it, or {_YOUR_OWN}")
    return directory


def cache_directory() -> Path:
    """The directory for what can be computed again: as for the state, but with $XDG_CACHE_HOME instead of $XDG_RUNTIME_DIR."""
    return _own_directory(os.environ.get("XDG_CACHE_HOME", ""))


def settle_home() -> None:
    """Give a user who has no home or no name, as in some containers, what libraries ask for: HOME and LOGNAME."""
    if not os.path.isabs(os.path.expanduser("~")) or (os.path.expanduser("~") == "/" and not os.access("/", os.W_OK)):
        with suppress(OSError):  # who needs it will say so
            os.environ["HOME"] = str(_own_among_others(Path(tempfile.gettempdir())))
    try:
        pwd.getpwuid(os.getuid())
    except KeyError:
        os.environ.setdefault("LOGNAME", str(os.getuid()))


def _own_directory(base: str) -> Path:
    """$PIPEDEC_STATE_DIR, else ``base``/pipedec, else one below the home or the temporary files; created."""
    try:
        if chosen := os.environ.get("PIPEDEC_STATE_DIR"):
            directory = Path(os.path.expanduser(chosen)).absolute()
            found = directory.stat() if directory.is_dir() else None
            is_shared = found is not None and (found.st_uid != os.getuid() or bool(found.st_mode & stat.S_ISVTX))
            return _own_among_others(directory) if is_shared else _own(directory)
        for parent in (base, os.path.expanduser("~/.cache")):
            if os.path.isabs(parent):  # "~" stays where there is no home
                with suppress(OSError):
                    return _own(Path(parent, "pipedec"))
        return _own_among_others(Path(tempfile.gettempdir()))
    except OSError as error:
        raise UserError(f"{error.filename or 'no temporary files'}: {error.strerror}: {_YOUR_OWN}") from None


def _own_among_others(shared: Path) -> Path:
    """This user's directory in one where others may put files."""
    directory = shared / f"pipedec-{os.getuid()}"
    if directory.is_symlink():
        raise PermissionError(errno.EPERM, "is a link", str(directory))
    return _own(directory)


def _own(directory: Path) -> Path:
    """Create a directory if it is not there. OSError if it cannot be, is another user's, or cannot be written to."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_uid != os.getuid():
        raise PermissionError(errno.EPERM, "belongs to another user", str(directory))
    if not os.access(directory, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(directory))
    return directory


def reference_pair() -> Path:
    """The directory of the shipped target, its draft and its BiTA. Raises UserError if the shipped models are not installed."""
    return _directory("reference_pair")


def reference_threads() -> Path:
    """The directory of the same target and draft, tuned to open threads. Raises UserError as ``reference_pair``."""
    return _directory("reference_threads")


def shipped_part(target: str, part: str) -> Path | None:
    """The shipped ``draft``, ``bita`` or ``generation_config.json`` of a named target; None if there is none. Raises UserError
    as ``reference_pair``.
    """
    if target not in _SHIPPED:
        return None
    found = _directory(_SHIPPED[target]) / part
    return found if found.exists() else None


def shipped_name(target: str) -> str | None:
    """The name of a shipped model, like ``reference-pair``; None for any other directory."""
    directory, root = Path(target).parent, _root()
    return directory.name.replace("_", "-") if root is not None and directory.parent == root else None


def _directory(name: str) -> Path:
    root = _root()
    if root is None:
        raise UserError(
            "the shipped models are not installed: pip install ./models in a clone, or the wheel pipedec_models that "
            "`make wheel` builds there; or give your own, --target DIR and --draft DIR"
        )
    return root / name


def _root() -> Path | None:
    found = find_spec("pipedec_models")
    return Path(found.submodule_search_locations[0]) if found and found.submodule_search_locations else None
