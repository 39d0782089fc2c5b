"""Where files go that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_directory() -> Path:
    """The directory for what can be computed again, not created: $PIPEDEC_STATE_DIR, else $XDG_CACHE_HOME/pipedec, else
    ~/.cache/pipedec.
    """
    if chosen := os.environ.get("PIPEDEC_STATE_DIR"):
        return Path(chosen).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "pipedec"
