"""The ranks of a measurement: started together, read with a deadline, ended together. Knows nothing of what they measure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

from pipedec.cluster.processes import RankProcesses, describe_exit
from pipedec.core import PipedecError, RankLost

RankBody = Callable[[Any, Callable[[Any], None]], None]  # called with the rank's plan and a function that reports


class RankGroup:
    """Runs ``body(plans[rank], report)`` in a process per rank. Use as a context manager: on leaving, no process is left.

    ``body``, the plans and the reports must be picklable.
    """

    def __init__(self, body: RankBody, plans: Sequence[Any]) -> None:
        self._num_ranks = len(plans)
        self._processes = RankProcesses()
        try:
            for rank, plan in enumerate(plans):
                self._processes.start(rank, _run, body, plan)
        except BaseException:
            self._processes.kill()
            raise

    @property
    def pids(self) -> list[int]:
        return list(self._processes.pids.values())

    def collect(self, silence_seconds: float) -> list[list[Any]]:
        """Everything each rank reported, by rank, once all have ended.

        Raises:
            RankLost: a rank died, or no rank has reported anything for ``silence_seconds``.
            PipedecError: a rank failed; the message is its own.
        """
        reports: list[list[Any]] = [[] for _ in range(self._num_ranks)]
        while self._processes.reporting:
            arrived = self._processes.read(silence_seconds)
            if not arrived:
                silent = ", ".join(map(str, self._processes.reporting))
                raise RankLost(f"ranks {silent} have reported nothing for {silence_seconds:.0f} s")
            for rank, message in arrived:
                if message is None:
                    self._check_end(rank)
                    continue
                kind, content = message
                if kind == "error":
                    raise PipedecError(content)
                reports[rank].append(content)
        return reports

    def _check_end(self, rank: int) -> None:
        """Raise RankLost unless ``rank``, whose pipe has ended, ended in order."""
        status = self._processes.exit_status(rank)
        if status != 0:
            raise RankLost(f"rank {rank} {'does not end' if status is None else describe_exit(status)}")

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._processes.kill()


def _run(body: RankBody, plan: Any, report: Callable[[Any], None]) -> int:
    """What the process of a rank does; returns its exit status."""
    try:
        body(plan, lambda content: report(("report", content)))
        return 0
    except PipedecError as error:
        report(("error", str(error)))
    except Exception as error:
        report(("error", f"internal error: {type(error).__name__}: {error}"))
    return 1
