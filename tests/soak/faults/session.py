"""The cluster that is hit again and again, and what must be true after each fault. It starts anew where nothing is left of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from support.redis_usage import usage

from pipedec.bench.record import Row
from pipedec.client.client import Client
from pipedec.core.errors import PipedecError
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import ClientScheduler
from pipedec.scheduler.protocol import RunStatus
from soak.faults.host import ClusterHost, FrontEnd
from soak.faults.kinds import Fault, Strike, prepare
from soak.faults.load import Answer, Load, Question, load_answers, recovery_after, recovery_row, save_answers, wait_until_idle
from soak.faults.usage import processes_usage

_GONE_SECONDS = 5.0  # a cluster without its supervisor
_IDLE_SECONDS = 30.0  # from the last answer to a run that is as before
_SUBMIT_SECONDS = 20.0


class Session:
    """Use as a context manager. ``out`` holds ``twin.json``, the undisturbed answers to what ``key`` identifies, and a log."""

    def __init__(self, spec: PipelineSpec, questions: list[Question], out: Path, key: str) -> None:
        self._spec = spec
        self._questions = questions
        self._twin, self._log = out / "twin.json", out / "cluster.log"
        self._key = key
        self._expected: list[Answer] = []
        self._host: ClusterHost | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._end(in_order=kind is None)

    def open(self) -> None:
        """Have the answers of the undisturbed twin: a cluster that has seen no fault yet. Raises PipedecError if it has none."""
        known = load_answers(self._twin, self._key)
        self._expected = known or self._undisturbed()
        if known is None:
            save_answers(self._twin, self._key, self._expected)

    def trial(self, fault: Fault) -> Row:
        """One fault; its row has ``problems``, of which there should be none."""
        host = self._started()
        with _connections(host) as (scheduler, control), _front_end(fault, host, scheduler) as server:
            before = _State(scheduler.status(), host.pids)
            client, ending = Client(scheduler), _Ending(host)
            strike = prepare(fault, host, control, server)
            with client.cancelling():
                load = Load.submit(client, [(self._questions[each], self._expected[each]) for each in fault.questions])
                load.run(fault, ending.after(strike) if fault.kind.ends_all else strike)
            row = load.row(fault)
            row |= ending.row(load) if fault.kind.ends_all else _settled(fault, load, before, host, control)
        if row["problems"] or fault.kind.ends_all:
            self._end(in_order=False)
        return row

    def _undisturbed(self) -> list[Answer]:
        with _connections(self._started()) as (scheduler, _):
            pieces: list[list[str]] = [[] for _ in self._questions]
            asked = [question.request for question in self._questions]
            replies = Client(scheduler).ask_all(asked, lambda index, text: pieces[index].append(text))
        counts = (sum(count for _, count in reply.arrivals.events) for reply in replies)
        found = zip(replies, pieces, counts, strict=True)
        return [Answer.of(reply.completed(), "".join(text), count) for reply, text, count in found]

    def _started(self) -> ClusterHost:
        if self._host is None:
            self._host = ClusterHost(self._spec, self._log)
        return self._host

    def _end(self, in_order: bool) -> None:
        host, self._host = self._host, None
        if host is not None:
            host.stop() if in_order else host.kill()


@dataclass(frozen=True)
class _State:
    """A run before a fault."""

    status: RunStatus
    pids: dict[int, int]


def _settled(fault: Fault, load: Load, before: _State, host: ClusterHost, control: ClientScheduler) -> Row:
    """The findings once the cluster is as before."""
    problems, row = load.problems(), Row(recovery=None, waits_s=load.waits(None), keys=None, usage=[], processes=None)
    try:
        epoch = before.status.epoch
        status = wait_until_idle(control, lambda now: now.epoch > epoch or not fault.kind.loses_rank, _IDLE_SECONDS)
        row["idle_s"] = load.since()
        if status is None:
            problems.append(f"{_IDLE_SECONDS:.0f} s after the answers the run is not idle: {_short(control.status())}")
        else:
            row |= _recovered(load, status, epoch) | {"keys": usage(control).keys}
            problems += _unexpected(fault, status, before, host.pids)
            row["usage"] = processes_usage(host.processes(), host.pids)
            row["processes"] = len(row["usage"])
    except PipedecError as error:
        problems.append(f"afterwards: {type(error).__name__}: {error}")
    return {**row, "problems": problems}


def _recovered(load: Load, status: RunStatus, epoch: int) -> Row:
    recovery = recovery_after(status, epoch)
    found = None if recovery is None else recovery_row(recovery, load.struck_at)
    waits = load.waits(None if found is None else found["detection_s"])
    return {"recovery": found, "waits_s": waits, "epochs": status.epoch - epoch}


def _unexpected(fault: Fault, status: RunStatus, before: _State, pids: dict[int, int]) -> list[str]:
    """Unexpected changes of the processes or of the run."""
    replaced = [rank for rank, pid in before.pids.items() if pids.get(rank) != pid]
    lost = [fault.rank] if fault.kind.loses_rank or (fault.kind.may_lose_rank and replaced) else []
    found = [] if replaced == lost else [f"ranks {replaced} were replaced, not {lost}"]
    if fault.kind.name == "front-end" and status.epoch != before.status.epoch:
        found.append(f"the run went to epoch {status.epoch}")
    return found


def _short(status: RunStatus) -> str:
    return (
        f"{status.state}, epoch {status.epoch}, serving {status.serving}, {len(status.running)} running, "
        f"{status.waiting} waiting, alive {status.alive}, failure {status.failure}"
    )


class _Ending:
    """Watches all processes of a cluster end."""

    def __init__(self, host: ClusterHost) -> None:
        self._processes = host.processes()
        self._seconds = 0.0
        self._alive: list[psutil.Process] = []
        self._thread = threading.Thread(target=self._watch)

    def after(self, strike: Strike) -> Strike:
        """The same, and from then on the processes are watched."""

        def struck() -> None:
            strike()
            self._thread.start()

        return struck

    def row(self, load: Load) -> Row:
        """The processes that are left after ``_GONE_SECONDS``, if any."""
        self._thread.join()
        problems = [f"{one.name()} ({one.pid}) is left {_GONE_SECONDS:.0f} s later" for one in self._alive]
        if load.is_hanging:
            problems += load.problems()
        return {
            "recovery": None, "waits_s": [], "keys": None, "usage": [], "processes": None, "gone_s": round(self._seconds, 3),
            "told_s": load.since(), "told": load.failure, "problems": problems,
        }  # fmt: skip

    def _watch(self) -> None:
        began = time.perf_counter()
        while (alive := [one for one in self._processes if _is_alive(one)]) and self._seconds < _GONE_SECONDS:
            time.sleep(0.02)
            self._seconds = time.perf_counter() - began
        self._alive = alive


def _is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def _connections(host: ClusterHost) -> Iterator[tuple[ClientScheduler, ClientScheduler]]:
    """One for a client, one to look and to strike with."""
    scheduler, control = host.scheduler(), host.scheduler()
    try:
        yield scheduler, control
    finally:
        for one in (scheduler, control):
            one.client.close()


@contextmanager
def _front_end(fault: Fault, host: ClusterHost, scheduler: ClientScheduler) -> Iterator[FrontEnd | None]:
    """For the fault that hits one: a server with streams that have been submitted."""
    if fault.kind.name != "front-end":
        yield None
        return
    with FrontEnd(host.address) as server:
        before = scheduler.status().submitted
        num_streams = server.open_streams()
        deadline = time.monotonic() + _SUBMIT_SECONDS
        while scheduler.status().submitted < before + num_streams:
            if time.monotonic() > deadline:
                raise PipedecError(f"the server has not submitted its requests within {_SUBMIT_SECONDS:.0f} s")
            time.sleep(0.02)
        yield server
