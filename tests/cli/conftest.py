"""Runs the program in this process where no signal is involved, and as a process of its own where one is."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.programs import Started, programs

from pipedec.cli import main
from pipedec.cluster.local import LocalCluster
from pipedec.cluster.state import RunningCluster


@dataclass(frozen=True)
class Ended:
    """How a run of the program ended."""

    status: int
    out: str
    err: str

    def refused(self, status: int = 2) -> str:
        """The one line that says why; fails if it is anything else than one line and this exit status."""
        assert self.status == status, (self.status, self.out, self.err)
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("pipedec: "), self.err
        assert "Traceback" not in self.err and self.out == ""
        return lines[0].removeprefix("pipedec: ")


Pipedec = Callable[..., Ended]


@pytest.fixture
def pipedec(state_directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Pipedec]:
    """Calls the program like a shell would: ``pipedec("plan", "cluster.yaml")``."""

    def run(*arguments: str | Path, stdin: bytes = b"") -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["pipedec", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            main()
        status = left.value.code
        captured = capsys.readouterr()
        return Ended(status if isinstance(status, int) else 0, captured.out, captured.err)

    usual = signal.getsignal(signal.SIGTERM)
    yield run
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
