"""What every measurement is written down with: the machine, the revision, the date, the whole configuration; one JSON row each.

Owns the header and the file format. What the figures of a benchmark mean, only the benchmark knows.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil
import torch

from pipedec import __version__
from pipedec.core import UserError

Row = dict[str, Any]

_CHECKOUT = Path(__file__).resolve().parent.parent.parent
_GIT_SECONDS = 5.0


def header(benchmark: str, config: Row) -> Row:
    """The fields that begin every row of one run of ``benchmark``."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "version": __version__,
        "revision": revision(),
        "machine": machine(),
        "config": config,
    }


def revision() -> str:
    """The commit of the checkout this package lies in, with ``-dirty`` behind it if files differ; else ``unknown``."""
    commit = _git("rev-parse", "HEAD")
    # A package installed inside somebody's repository must not report that repository's commit.
    if commit is None or _git("rev-parse", "--show-toplevel") != str(_CHECKOUT):
        return "unknown"
    return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit


def machine() -> Row:
    """What the figures depend on besides the code."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": round(psutil.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def plain(value: Any) -> Row:
    """The fields of a dataclass as a JSON file gives them back."""
    fields: Row = json.loads(json.dumps(asdict(value)))
    return fields


def spread(samples: Sequence[float]) -> dict[str, float]:
    """The 10th percentile (least disturbed by other work on the machine), the median and the 90th."""
    ordered = sorted(samples)
    low, high = ordered[int(0.1 * len(ordered))], ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"p10": low, "median": statistics.median(ordered), "p90": high}


def check_writable(path: Path | None, flag: str = "--out") -> None:
    """Raise UserError before anything is measured, if the results could not be written to ``path`` (of ``flag``) afterwards."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no directory {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{flag} {path}: it cannot be written")


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add ``rows`` to a JSONL file, so that one file collects many runs."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def key_of(identity: Any) -> str:
    """A name for plain JSON values: the same for equal ones."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def drop_unfinished_line(path: Path) -> None:
    """A benchmark that was killed while it wrote may have left half a line; its row is measured again."""
    if not path.is_file():
        return
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        with path.open("r+b") as file:
            file.truncate(len(whole))


def _git(*arguments: str) -> str | None:
    """What git says, stripped; None if it is missing, or this is no checkout."""
    try:
        command = ["git", "-C", str(_CHECKOUT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text(encoding="utf-8").splitlines() if information.is_file() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()
