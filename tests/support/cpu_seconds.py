"""A pytest plugin that reports the CPU seconds of a run: of pytest, its workers and every process that they started.

Wall time depends on what else the machine does; CPU seconds hardly do, so tiers have budgets in them. pytest and each of its
workers become subreapers: a process that is detached or whose parent was killed becomes their child and stays countable.
"""

from __future__ import annotations

import ctypes
import json
import time
from collections.abc import Generator
from pathlib import Path

import psutil
import pytest

COSTLIEST = 10
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make this process adopt its orphaned descendants, as init would (Linux, prctl(2))."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def tree_seconds() -> float:
    """CPU seconds of this process and all its descendants so far, ended ones included."""
    this = psutil.Process()
    seconds = 0.0
    for process in (this, *this.children(recursive=True)):
        try:
            seconds += sum(process.cpu_times()[:4])  # user and system, of itself and of the children that it has waited for
        except psutil.NoSuchProcess:
            continue  # its parent has waited for it meanwhile
    return seconds


def calibration_seconds() -> float:
    """CPU seconds of a fixed loop (the least of three), by which figures of two machines can be compared."""

    def loop() -> float:
        start = time.process_time()
        total = 0
        for number in range(2_000_000):
            total += number * number % 7
        return time.process_time() - start

    return min(loop() for _ in range(3))


class CpuSeconds:
    """Measures whenever a test ends (or only the last test of a file), and reports at the end of the run.

    Args:
        out: file for the CPU seconds of every test, as JSON; None to measure files only.
    """

    def __init__(self, out: Path | None) -> None:
        self._out = out
        self._last = tree_seconds()
        self._by_test: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
        self._ends = self._out is not None or nextitem is None or nextitem.path != item.path
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, call: pytest.CallInfo[None]) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if call.when == "teardown" and self._ends:
            now = tree_seconds()
            report.cpu_seconds = now - self._last  # type: ignore[attr-defined]
            self._last = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if (seconds := getattr(report, "cpu_seconds", None)) is not None:
            self._by_test[report.nodeid] = seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total = tree_seconds()
        files: dict[str, float] = {}
        for nodeid, seconds in self._by_test.items():
            path = nodeid.partition("::")[0]
            files[path] = files.get(path, 0.0) + seconds
        if self._out is not None:
            self._out.write_text(json.dumps({"total": total, "tests": self._by_test}, indent=0), encoding="utf-8")
        costliest = sorted(files.items(), key=lambda entry: -entry[1])[:COSTLIEST]
        terminalreporter.section("CPU seconds")
        for path, seconds in costliest:
            terminalreporter.write_line(f"{seconds:8.1f}  {path}")
        terminalreporter.write_line(
            f"{total:8.1f}  in all, with every process started; a calibration loop takes {calibration_seconds():.3f} s here"
        )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write the CPU seconds of every test to FILE, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    become_subreaper()
    config.pluginmanager.register(CpuSeconds(config.getoption("--cpu-seconds")), "cpu-seconds")
