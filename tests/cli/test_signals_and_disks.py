"""Signals that end a command, wherever its main thread is when they come, and disks that are full."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from queue import SimpleQueue
from typing import IO, Any

import click
import pytest
from support.programs import caller

from pipedec.cli.cluster import serve_cluster
from pipedec.cli.show import Interrupts, console
from pipedec.cluster.node_link import News, NodeLink
from pipedec.cluster.state import RunningCluster
from pipedec.config import ServerConfig
from pipedec.config.cluster import LaunchConfig
from pipedec.core.errors import PipedecError
from pipedec.flags import run_command
from pipedec.messages.stats import Recovery


@pytest.fixture
def usual() -> Iterator[None]:
    """What handles signals is put back."""
    handlers, hook = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}, sys.unraisablehook
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    sys.unraisablehook = hook
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def interrupts(usual: None) -> Interrupts:
    return Interrupts()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_interrupts(interrupts: Interrupts, number: signal.Signals) -> None:
    interrupts.raise_missed()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)


def test_a_deferred_signal_waits_until_the_command_asks(interrupts: Interrupts) -> None:
    with interrupts.deferred():
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_missed()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGTERM)


def test_a_signal_that_comes_while_an_object_is_finalized_is_not_lost_and_prints_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    dropped: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda found: dropped.append(found.exc_type))
    interrupts: Interrupts = request.getfixturevalue("interrupts")

    class Finalized:
        def __init__(self, ends: Callable[[], None]) -> None:
            self._ends = ends

        def __del__(self) -> None:
            self._ends()

    Finalized(lambda: os.kill(os.getpid(), signal.SIGINT))
    Finalized(lambda: [].pop())
    assert dropped == [IndexError] and capfd.readouterr().err == ""
    with pytest.raises(KeyboardInterrupt):
        interrupts.raise_missed()


@pytest.mark.usefixtures("usual")
def test_ctrl_c_stays_ignored_where_it_is() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts = Interrupts()
    os.kill(os.getpid(), signal.SIGINT)
    interrupts.raise_missed()


ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def full() -> Iterator[IO[str]]:
    with open("/dev/full", "wb", buffering=0) as device:
        yield io.TextIOWrapper(device, write_through=True)
    with console.capture():
        pass  # the console keeps what it could not write, and would write it in a later test


@pytest.mark.failure_case("M11")
def test_a_command_whose_output_cannot_be_written_says_so(full: IO[str]) -> None:
    plan = [sys.executable, "-m", "pipedec.cli", "plan", str(ROOT / "cluster.yaml")]
    ended = subprocess.run(plan, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "pipedec: output: No space left on device\n")


@pytest.mark.failure_case("M25")
def test_without_temporary_files_one_line_says_what_to_set(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", list)  # as in a container with nothing but its read-only root
    command = click.Command("anything", callback=tempfile.mkdtemp)
    said = caller(lambda: run_command(command), monkeypatch, capsys)().refused(1)
    assert said.startswith("No usable temporary directory found in []: set TMPDIR ")


@pytest.mark.failure_case("M11")
def test_a_state_file_that_cannot_be_written_is_named(state_directory: Path) -> None:
    RunningCluster("redis://localhost", "run").save()
    (file,) = state_directory.iterdir()
    file.with_suffix(f".{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(PipedecError, match=r"-run\.json cannot be written \(No space left on device\): make room there$"):
        RunningCluster("redis://localhost", "run").save()
    assert list(state_directory.iterdir()) == [file]


@pytest.fixture
def usual_signals() -> Iterator[None]:
    usual = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, usual)


class Scripted:
    """A cluster that recovers once, and is stopped."""

    run_id = "run"
    outlives_supervisor = False
    redis_url = "redis://localhost"

    def __init__(self, ends: Any) -> None:
        self.address = self
        self.done: list[str] = []
        self.ends = ends
        self.on_recovery: Any = None

    def start(self, progress: object) -> None:
        self.done.append("start")

    def wait(self, turn: Callable[[], None]) -> None:
        turn()
        self.on_recovery(Recovery(1, (1,), "rank 1 was killed by SIGKILL", 0, 1))
        self.done.append("recovered")
        with self.ends:
            turn()

    def stop(self) -> None:
        self.done.append("stop")

    def kill(self) -> None:
        self.done.append("kill")


class Interrupted:
    """By a signal, which broke a lock's code or did not."""

    def __init__(self, error: Exception | None = None) -> None:
        self._error = error
        self.was_deferred = False

    def __enter__(self) -> None:
        signal.raise_signal(signal.SIGTERM)
        self.was_deferred = True
        if self._error is not None:
            raise self._error

    def __exit__(self, *error: object) -> None: ...


@pytest.mark.usefixtures("state_directory", "usual_signals")
@pytest.mark.parametrize(
    "ends",
    [nullcontext(), Interrupted(), Interrupted(RuntimeError("release unlocked lock"))],
    ids=["down", "Ctrl-C", "in a lock"],
)
@pytest.mark.failure_case("M11")
def test_a_cluster_whose_log_is_full_goes_on_and_ends_in_order(full: IO[str], monkeypatch: pytest.MonkeyPatch, ends: Any) -> None:
    monkeypatch.setattr(sys, "stderr", full)
    cluster: Any = Scripted(ends)
    serve_cluster(cluster, {}, for_parent=True)
    assert cluster.done == ["start", "recovered", "stop"]
    assert getattr(ends, "was_deferred", True), "a signal raised in the middle of a wait"


@pytest.mark.failure_case("M11")
def test_hosts_are_heard_although_their_log_is_full(full: IO[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = tmp_path / "node"
    program.write_text('#!/bin/sh\nfor line in one two three; do echo $line >&2; done\necho \'{"news": "hello"}\'\ncat\n')
    program.chmod(0o700)
    news: SimpleQueue[News] = SimpleQueue()
    link = NodeLink(ServerConfig("localhost", {"cpu": 1}, python=str(program)), LaunchConfig(), news, full)
    assert news.get(timeout=60) == ("localhost", {"news": "hello"})
    link.end()
    assert news.get(timeout=60) == ("localhost", None)
    assert link.complaint() == "three"
    assert capfd.readouterr().err == "pipedec: what localhost prints is no longer logged: No space left on device\n"
