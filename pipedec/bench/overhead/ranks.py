"""Runs a measurement in a process per rank and collects the reports. Knows nothing of what is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipedec.cluster.processes import RankProcesses, describe_exit
from pipedec.core import PipedecError, RankLost

RankBody = Callable[[Any, Callable[[Any], None]], None]  # called with the rank's plan and a function that reports


def run_ranks(body: RankBody, plans: Sequence[Any], silence_seconds: float) -> list[list[Any]]:
    """Run ``body(plans[rank], report)`` in a process per rank; everything each rank reported, by rank, once all have ended.

    ``body``, the plans and the reports must be picklable. All processes have ended when it returns or raises.

    Raises:
        RankLost: a rank died, or no rank has reported anything for ``silence_seconds``.
        PipedecError: a rank failed; the message is its own.
    """
    reports: list[list[Any]] = [[] for _ in plans]
    processes = RankProcesses()
    try:
        for rank, plan in enumerate(plans):
            processes.start(rank, _run, body, plan)
        while processes.reporting:
            arrived = processes.read(silence_seconds)
            if not arrived:
                silent = ", ".join(map(str, processes.reporting))
                raise RankLost(f"ranks {silent} have reported nothing for {silence_seconds:.0f} s")
            for rank, report in arrived:
                match report:
                    case None if (status := processes.exit_status(rank)) != 0:
                        raise RankLost(f"rank {rank} {'does not end' if status is None else describe_exit(status)}")
                    case "error", message:
                        raise PipedecError(message)
                    case "report", content:
                        reports[rank].append(content)
    finally:
        processes.kill()
    return reports


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
