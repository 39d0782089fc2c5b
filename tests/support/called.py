"""Calls a command in this process as a shell would, and keeps how it ended."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Ended:
    """How a run of a command ended."""

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


Calls = Callable[..., Ended]


def caller(run: Callable[[], object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Calls:
    """A function that calls ``run`` with its arguments as those of the command line."""

    def call(*arguments: str | Path, stdin: bytes = b"") -> Ended:
        capsys.readouterr()
        monkeypatch.setattr(sys, "argv", ["pipedec", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        with pytest.raises(SystemExit) as left:
            run()
        status = left.value.code
        captured = capsys.readouterr()
        return Ended(status if isinstance(status, int) else 0, captured.out, captured.err)

    return call
