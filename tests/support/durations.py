"""A pytest plugin that measures what tests cost: CPU seconds of pytest, its workers and every process that they started.

Wall time depends on what else the machine does; CPU seconds hardly do, so tiers have budgets in them. pytest and each of its
workers become subreapers: a process that is detached or whose parent was killed becomes their child and stays countable.

``tests/durations.json`` keeps the costs of each test file, by tier, as ``make test-durations`` has measured them. By it the files
that take longest come first, so that both workers end at about the same time, and the report names the files that have grown.
"""

from __future__ import annotations

import ctypes
import json
import math
import time
from collections import defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

RECORD = Path(__file__).resolve().parents[1] / "durations.json"
TIERS = ("fast", "rest")
SHOWN = 10
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


@dataclass(frozen=True)
class Record:
    """What the files of a tier cost when ``make test-durations`` measured them.

    Attributes:
        calibration_seconds: of the calibration loop on that machine.
        files: CPU seconds and wall seconds of each test file.
    """

    calibration_seconds: float
    files: Mapping[str, Sequence[float]]

    @classmethod
    def read(cls, tier: str) -> Record:
        """That of a tier; without files if it was never measured."""
        tiers = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        return cls(**tiers[tier]) if tier in tiers else cls(1.0, {})

    def write(self, tier: str) -> None:
        """Keep it, a line for each file. The other tiers stay as they are."""
        tiers = {name: Record.read(name) for name in TIERS} | {tier: self}
        text = ",\n".join(f'"{name}": {record.lines()}' for name, record in tiers.items())
        RECORD.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")

    def lines(self) -> str:
        """As JSON, a line for each file."""
        lines = ",\n".join(f'"{path}": [{cpu:.1f}, {wall:.1f}]' for path, (cpu, wall) in sorted(self.files.items()))
        return f'{{"calibration_seconds": {self.calibration_seconds:.4f}, "files": {{\n{lines}\n}}}}'


class Durations:
    """Measures whenever a test ends (or only the last test of a file), and reports at the end of the run.

    Args:
        tier: that runs; its record is compared with what is measured. None for a selection of tests.
        is_written: the record is written instead.
        out: file for the CPU seconds of every test, as JSON; None to measure files only.
    """

    def __init__(self, tier: str | None, is_written: bool, out: Path | None) -> None:
        self._tier = tier
        self._is_written = is_written
        self._out = out
        self._last = 0.0
        self._cpu_by_test: dict[str, float] = {}
        self._wall_by_file: defaultdict[str, float] = defaultdict(float)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Begin with the files that take longest, and with those that nobody has measured."""
        files = Record.read(self._tier or "fast").files
        wall = {item.path: files.get(_path(item.nodeid), (0.0, math.inf))[1] for item in items}
        items.sort(key=lambda item: -wall[item.path])

    def pytest_collection_finish(self) -> None:
        self._last = tree_seconds()

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
        self._wall_by_file[_path(report.nodeid)] += report.duration
        if (seconds := getattr(report, "cpu_seconds", None)) is not None:
            self._cpu_by_test[report.nodeid] = seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        total, calibration = tree_seconds(), calibration_seconds()
        if self._out is not None:
            self._out.write_text(json.dumps({"total": total, "tests": self._cpu_by_test}, indent=0), encoding="utf-8")
        files = self._files()
        if self._tier is not None and self._is_written:
            Record(calibration, files).write(self._tier)
        terminalreporter.section("CPU seconds")
        for path in sorted(files, key=lambda path: -files[path][0])[:SHOWN]:
            terminalreporter.write_line(f"{files[path][0]:8.1f}  {path}")
        grown = self.grown(files, calibration)
        for path in sorted(grown, key=lambda path: -grown[path])[:SHOWN]:
            terminalreporter.write_line(f"{grown[path]:+8.1f}  {path}, since tests/durations.json was written")
        terminalreporter.write_line(
            f"{total:8.1f}  in all, with every process started; a calibration loop takes {calibration:.3f} s here"
        )

    def _files(self) -> dict[str, tuple[float, float]]:
        cpu: defaultdict[str, float] = defaultdict(float)
        for nodeid, seconds in self._cpu_by_test.items():
            cpu[_path(nodeid)] += seconds
        return {path: (seconds, self._wall_by_file[path]) for path, seconds in cpu.items()}

    def grown(self, files: dict[str, tuple[float, float]], calibration: float) -> dict[str, float]:
        """CPU seconds by which files have grown, at this machine's speed; less than a tenth of a second counts as nothing."""
        if self._tier is None:
            return {}
        record = Record.read(self._tier)
        ratio = calibration / record.calibration_seconds
        grown = {path: cpu - ratio * record.files.get(path, (0.0,))[0] for path, (cpu, _) in files.items()}
        return {path: seconds for path, seconds in grown.items() if seconds > 0.1}


def _path(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-seconds", type=Path, metavar="FILE", help="write the CPU seconds of every test to FILE, as JSON")
    parser.addoption("--tier", choices=TIERS, help="the tier that runs: compare its costs with tests/durations.json")
    parser.addoption("--write-durations", action="store_true", help="write the costs of --tier to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    become_subreaper()
    durations = Durations(config.getoption("--tier"), config.getoption("--write-durations"), config.getoption("--cpu-seconds"))
    config.pluginmanager.register(durations, "durations-of-files")
