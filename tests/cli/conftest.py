"""Runs the program in this process where no signal is involved, and as a process of its own where one is."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.programs import Calls, Started, Terminal, caller, programs

from pipedec.cli import main
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.state import RunningCluster

if TYPE_CHECKING:
    from collections.abc import Callable

    from support.shared_models import Residents


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
def terminal(state_directory: Path) -> Iterator[Callable[..., Terminal]]:
    """Starts the program on a pseudo-terminal."""
    with ExitStack() as stack:
        yield lambda *arguments, **environment: stack.enter_context(closing(Terminal(*arguments, **environment)))


@pytest.fixture(scope="module", params=["windows"])
def resident(request: pytest.FixtureRequest, residents: Residents) -> LocalCluster:
    """A running cluster that no test may break. One way to dispatch is enough: what differs is below the client."""
    return residents.get(request.param)


@pytest.fixture
def known_resident(resident: LocalCluster, state_directory: Path) -> LocalCluster:
    """The resident cluster as ``pipedec up`` would have left it: named in the state file."""
    RunningCluster(resident.address.redis_url, resident.run_id, os.getpid()).save()
    return resident
