"""Calls that take long when a process makes them for the first time, as on machines whose first forwards load what they need.

What is slow on which host is written to a file in a folder. Processes read it that a test starts with ``PreparedRanks`` or with
the variables of ``slow_environment``.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import time
from collections.abc import Mapping
from functools import wraps
from pathlib import Path
from typing import Any

EVERY_HOST = "*"
TESTS = Path(__file__).parents[1]
FORWARD = "pipedec.model.stage_model:StageModel.forward"


def write_slow_calls(folder: Path, calls: Mapping[str, float], host: str = EVERY_HOST) -> None:
    """From now on processes that read ``folder`` need so many seconds for their first calls of these functions.

    Args:
        calls: by ``module:Class.method`` or ``module:function``.
    """
    (folder / "slow.json").write_text(json.dumps({host: dict(calls)}))


def slow_environment(folder: Path) -> dict[str, str]:
    """Variables with which every new Python process reads ``folder``."""
    (folder / "sitecustomize.py").write_text("from support.slow_starts import slow_down\n\nslow_down()\n")
    paths = [str(folder), str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "PIPEDEC_TESTS_SLOW": str(folder)}


def slow_down(folder: Path | None = None) -> None:
    """In this process, first calls take as long as ``folder`` says; without one, as the environment says."""
    folder = folder or Path(os.environ["PIPEDEC_TESTS_SLOW"])
    by_host: dict[str, dict[str, float]] = json.loads((folder / "slow.json").read_text())
    for name, seconds in (by_host.get(EVERY_HOST, {}) | by_host.get(socket.gethostname(), {})).items():
        module, _, path = name.partition(":")
        *owners, function = path.split(".")
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, function, _slow_at_first(getattr(owner, function), seconds, folder))


def slow_calls(folder: Path) -> int:
    """How many first calls there were."""
    return len(list(folder.glob("*.was-slow")))


def _slow_at_first(function: Any, seconds: float, folder: Path) -> Any:
    pids = set[int]()  # processes may be forked from this one

    @wraps(function)
    def called(*arguments: Any, **options: Any) -> Any:
        if os.getpid() not in pids:
            pids.add(os.getpid())
            (folder / f"{socket.gethostname()}-{os.getpid()}.was-slow").touch()
            time.sleep(seconds)
        return function(*arguments, **options)

    return called
