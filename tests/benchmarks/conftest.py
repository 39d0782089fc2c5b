"""Calls commands like a shell would, in this process."""

from __future__ import annotations

import pytest
from support.programs import Calls, caller

from pipedec.cli import main


@pytest.fixture
def pipedec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Calls:
    """Calls the program: ``pipedec("bench", "sweep", "--preset", "paper-14")``."""
    return caller(main, monkeypatch, capsys)
