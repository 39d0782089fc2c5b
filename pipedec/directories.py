"""Directories of what can be made again, and of the shipped models (the package ``pipedec_models``, installed beside pipedec)."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from pipedec.core import UserError


def cache_directory() -> Path:
    """The directory for what can be computed again, not created: $PIPEDEC_STATE_DIR, else $XDG_CACHE_HOME/pipedec, else
    ~/.cache/pipedec.
    """
    if chosen := os.environ.get("PIPEDEC_STATE_DIR"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pipedec"


def reference_pair() -> Path:
    """The directory of the shipped target, its draft and its BiTA. Raises UserError if the shipped models are not installed."""
    return _directory("reference_pair")


def reference_threads() -> Path:
    """The directory of the same target and draft, tuned to open threads. Raises UserError as ``reference_pair``."""
    return _directory("reference_threads")


def shipped_draft(target: str) -> Path | None:
    """The shipped draft of a public model, by its name; None if there is none. Raises UserError as ``reference_pair``."""
    return _directory("reference_smollm2") / "draft" if target == "smollm2" else None


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
