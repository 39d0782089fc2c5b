"""Runs the program in this process where no signal is involved, and as a process of its own where one is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.called import Calls, caller
from support.programs import Started, programs

from pipedec.cli import main
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.state import RunningCluster


@pytest.fixture
def pipedec(state_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Calls]:
    """Calls the program like a shell would: ``pipedec("plan", "cluster.yaml")``."""
    usual = signal.getsignal(signal.SIGTERM)
    yield caller(main, monkeypatch, capsys)
    signal.signal(signal.SIGTERM, usual)  # `pipedec up` takes it for Ctrl-C


@pytest.fixture
def started(state_directory: Path) -> Iterator[Started]:
    """Starts the program in a process group of its own, as a terminal does; whatever still runs at the end is killed."""
    with programs() as start:
        yield start


@pytest.fixture
def known_resident(resident: LocalCluster, state_directory: Path) -> LocalCluster:
    """The resident cluster as ``pipedec up`` would have left it: named in the state file."""
    RunningCluster(resident.address.redis_url, resident.run_id, os.getpid()).save()
    return resident
