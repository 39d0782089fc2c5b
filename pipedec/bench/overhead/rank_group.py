"""Processes of a measurement, one per rank: started together, listened to with a deadline, and gone together.

Knows processes and pipes; what the ranks measure and report is theirs.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from pipedec.cluster.processes import begin_rank_process, rank_context
from pipedec.core import PipedecError, RankLost

_END_SECONDS = 10.0

RankBody = Callable[[Any, Callable[[Any], None]], None]  # its plan, and how it reports


class RankGroup:
    """Runs ``body(plans[rank], report)`` in a process per rank. Use as a context manager: on leaving, no process is left.

    Processes are forked from a server that has imported torch once, so ``body`` and the plans must be picklable.
    """

    def __init__(self, body: RankBody, plans: Sequence[Any]) -> None:
        context = rank_context()
        self._processes = []
        self._pipes: list[Connection] = []
        try:
            for rank, plan in enumerate(plans):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run, args=(body, plan, sender), name=f"pipedec bench rank {rank}")
                process.start()
                sender.close()
                self._processes.append(process)
                self._pipes.append(receiver)
        except BaseException:
            self.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes if process.pid is not None]

    def collect(self, silence_seconds: float) -> list[list[Any]]:
        """Everything each rank reported, by rank, once all have ended.

        Raises:
            RankLost: a rank died, or no rank has said anything for ``silence_seconds``.
            PipedecError: a rank failed, and said why.
        """
        reports: list[list[Any]] = [[] for _ in self._pipes]
        listening = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        while listening:
            ready = wait(list(listening), timeout=silence_seconds)
            if not ready:
                silent = ", ".join(str(rank) for rank in listening.values())
                raise RankLost(f"ranks {silent} have reported nothing for {silence_seconds:.0f} s")
            for pipe in ready:
                assert isinstance(pipe, Connection)
                if not self._receive(pipe, reports[listening[pipe]], listening[pipe]):
                    del listening[pipe]
        return reports

    def _receive(self, pipe: Connection, reports: list[Any], rank: int) -> bool:
        """Take one report; False at the end of a rank that ended well."""
        try:
            kind, content = pipe.recv()
        except EOFError:
            self._processes[rank].join(_END_SECONDS)
            status = self._processes[rank].exitcode
            if status == 0:
                return False
            ending = f"was killed by {signal.Signals(-status).name}" if status and status < 0 else f"ended with status {status}"
            raise RankLost(f"rank {rank} {ending}") from None
        if kind == "error":
            raise PipedecError(content)
        reports.append(content)
        return True

    def kill(self) -> None:
        """End whatever still runs."""
        for process in self._processes:
            if process.exitcode is None:
                process.kill()
        deadline = time.monotonic() + _END_SECONDS
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for pipe in self._pipes:
            pipe.close()

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.kill()


def _run(body: RankBody, plan: Any, reports: Connection) -> None:
    """What the process of a rank does."""
    begin_rank_process()
    failure: str | None = None
    try:
        body(plan, lambda content: reports.send(("report", content)))
    except PipedecError as error:
        failure = str(error)
    except Exception as error:
        failure = f"internal error: {type(error).__name__}: {error}"
    with suppress(OSError):  # a parent that is gone needs no reason
        if failure is not None:
            reports.send(("error", failure))
        reports.close()
    os._exit(0 if failure is None else 1)  # a process group that lost a peer can hang in its own clean-up
