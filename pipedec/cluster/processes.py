"""Rank processes on this machine: how they are started, how they report, how they end.

Ranks are forked from one server process that has imported torch once (``forkserver``), so fifteen ranks start in the time of
one. Knows processes, pipes and signals; what a rank runs and what its reports mean is the caller's business.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess
from types import ModuleType
from typing import Any, NoReturn, Protocol, TypeVar

from pipedec.core.errors import PipedecError

Result = TypeVar("Result")
_Spawned = tuple[ForkServerProcess, Connection]

# Exit statuses of ranks.
FAILED = 1
LOST_ANOTHER = 3  # it could not go on because another one had failed, ended or fallen silent
ABORTED = -signal.SIGABRT  # by a library or the interpreter

_PRELOAD = ["pipedec.cluster.fork_server"]
_END_SECONDS = 10.0
_SOCKET_NAME_BYTES = len("/pymp-XXXXXXXX/listener-XXXXXXXX\0")  # what multiprocessing appends to the temporary directory
_SOCKET_PATH_BYTES = 104  # sockaddr_un.sun_path on macOS; Linux has 108
_SHORT_DIRECTORY = "/tmp"


class WatchedRanks(Protocol):
    """The processes of several ranks, as their watch sees them: those of ``RankProcesses``, or ones that others start."""

    @property
    def pids(self) -> dict[int, int]: ...

    @property
    def alive(self) -> list[int]: ...

    @property
    def exit_statuses(self) -> dict[int, int]: ...

    def wait(self, seconds: float) -> None: ...

    def read(self, seconds: float) -> list[tuple[int, Any]]: ...

    def describe_end(self, rank: int) -> str: ...

    def end(self, rank: int) -> None: ...

    def forget(self, rank: int) -> None: ...

    def kill(self) -> None: ...


class RankProcesses:
    """The processes of several ranks, each with a pipe on which it reports to this process. Not thread-safe."""

    def __init__(self) -> None:
        self._processes: dict[int, ForkServerProcess] = {}
        self._pipes: dict[Connection, int] = {}  # those that are open, and their ranks

    def start(self, rank: int, body: Callable[..., int], *arguments: Any) -> None:
        """Start the process of ``rank``, or its next one: ``body(*arguments, report)`` returns its exit status.

        ``body``, its arguments and what it reports must be picklable.
        """
        process, reports = _spawn(_run, f"pipedec rank {rank}", body, arguments)
        self._close_pipe(rank)
        self._processes[rank] = process
        self._pipes[reports] = rank

    def waitables(self, ranks: Iterable[int]) -> list[Connection | int]:
        """Objects that become readable when a rank reports or one of ``ranks`` ends (see ``multiprocessing.connection.wait``)."""
        return [*self._pipes, *(self._processes[rank].sentinel for rank in ranks)]

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items() if process.pid is not None}

    @property
    def alive(self) -> list[int]:
        """Ranks whose process runs."""
        return [rank for rank, process in self._processes.items() if process.exitcode is None]

    @property
    def exit_statuses(self) -> dict[int, int]:
        """Exit statuses of the ranks that have ended; -N means killed by signal N."""
        return {rank: status for rank, process in self._processes.items() if (status := process.exitcode) is not None}

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` until a rank reports or ends."""
        wait(self.waitables(self.alive), timeout=seconds)

    def read(self, seconds: float) -> list[tuple[int, Any]]:
        """Wait up to ``seconds`` for reports: one per rank that sent any, None from a rank whose pipe has just ended."""
        reports = []
        for pipe in wait(list(self._pipes), timeout=seconds):
            assert isinstance(pipe, Connection)
            try:
                reports.append((self._pipes[pipe], pipe.recv()))
            except EOFError:
                reports.append((self._pipes.pop(pipe), None))
                pipe.close()
        return reports

    def describe_end(self, rank: int) -> str:
        """See ``describe_exit``."""
        return describe_exit(self.exit_statuses[rank])

    def end(self, rank: int) -> None:
        """Kill a rank, if it still runs, and wait until it has ended."""
        self._processes[rank].kill()
        self._processes[rank].join(_END_SECONDS)

    def forget(self, rank: int) -> None:
        """Drop a rank that has ended, because another host has it."""
        self._close_pipe(rank)
        del self._processes[rank]

    def kill(self) -> None:
        """Kill the ranks that still run, wait up to ten seconds for their ends, and forget all of them."""
        for process in self._processes.values():
            process.kill()
        deadline = time.monotonic() + _END_SECONDS
        for rank, process in list(self._processes.items()):
            process.join(max(0.0, deadline - time.monotonic()))
            self.forget(rank)

    def _close_pipe(self, rank: int) -> None:
        for pipe in [pipe for pipe, its_rank in self._pipes.items() if its_rank == rank]:
            del self._pipes[pipe]
            pipe.close()


def run_apart(body: Callable[..., Result], *arguments: Any) -> Result:
    """``body(*arguments)`` in a process of its own that has torch loaded, while this one has not.

    ``body``, its arguments and its result must be picklable. Raises what it raises.
    """
    process, answers = _spawn(_answer, f"pipedec {body.__name__}", body, arguments)
    try:
        outcome = answers.recv()
    except EOFError:
        process.join(_END_SECONDS)
        raise PipedecError(f"the process that should {body.__name__} {describe_exit(process.exitcode or 0)}") from None
    finally:
        process.kill()
        process.join(_END_SECONDS)
        answers.close()
    if isinstance(outcome, Exception):
        raise outcome
    result: Result = outcome
    return result


def describe_exit(status: int) -> str:
    """How a process ended that should still run, as the end of a sentence."""
    if status < 0:
        known = -status in [number.value for number in signal.Signals]
        return f"was killed by {signal.Signals(-status).name if known else f'signal {-status}'}"
    return "ended unexpectedly with exit status 0" if status == 0 else f"failed with exit status {status}"


def killed_ranks(statuses: Mapping[int, int]) -> list[int]:
    """The ranks that a signal has ended. Those that aborted come last: a library may abort a rank that has lost its peer."""
    return sorted((rank for rank, status in statuses.items() if status < 0), key=lambda rank: statuses[rank] == ABORTED)


def leave() -> NoReturn:
    """End this process, which has lost another, at once: its clean-up may wait for the lost one."""
    with suppress(OSError):
        sys.stderr.flush()
    os._exit(LOST_ANOTHER)


def die_with_parent(die: bool = True) -> None:
    """Ask the kernel (Linux) to kill this process when the thread that started it ends for any reason; or no longer to."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL if die else 0)  # PR_SET_PDEATHSIG


def start_fork_server() -> ForkServerContext:
    """The context in which ranks are started. Its fork server runs, but may not have imported torch yet.

    The server ignores Ctrl-C, which is for the supervisor alone. Ranks inherit the present environment of this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    resource_tracker.ensure_running()  # the fork server would start it, which would unblock SIGINT
    # multiprocessing puts its socket into the temporary directory that it chooses once per process.
    usual = tempfile.gettempdir()
    if len(os.fsencode(usual)) + _SOCKET_NAME_BYTES > _SOCKET_PATH_BYTES:
        tempfile.tempdir = _SHORT_DIRECTORY
    usual_signals = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, usual_signals)
        tempfile.tempdir = usual
    return context


def _spawn(main: Callable[..., None], name: str, body: Callable[..., Any], arguments: tuple[Any, ...]) -> _Spawned:
    """A process that runs ``main(body, arguments, sender)``, and the other end of that pipe.

    The program's main module is hidden from multiprocessing, which would import it in the process. So a script that starts ranks
    needs no ``if __name__ == "__main__":``, and may be read from standard input.
    """
    context = start_fork_server()
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=main, args=(body, arguments, sender), name=name)
    main_module = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        process.start()
    finally:
        sys.modules["__main__"] = main_module
    sender.close()
    return process, receiver


def _run(body: Callable[..., int], arguments: tuple[Any, ...], reports: Connection) -> None:
    _begin_rank_process()

    def report(content: Any) -> None:
        with suppress(OSError):  # the supervisor reads no longer
            reports.send(content)

    status = body(*arguments, report)
    sys.stderr.flush()
    os._exit(status)  # a process group that lost a peer can hang in its own clean-up


def _answer(body: Callable[..., Any], arguments: tuple[Any, ...], answers: Connection) -> None:
    _begin_rank_process()
    try:
        outcome = body(*arguments)
    except Exception as error:
        outcome = error
    answers.send(outcome)
    os._exit(0)


def _begin_rank_process() -> None:
    """Ignore Ctrl-C, which is for the supervisor, and end when the supervisor ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    os.close(forkserver._forkserver._forkserver_alive_fd)  # type: ignore[attr-defined]  # the fork server ends with the supervisor
    supervisor = multiprocessing.parent_process()
    if supervisor is not None and not supervisor.is_alive():  # it ended before the line above
        os._exit(1)
