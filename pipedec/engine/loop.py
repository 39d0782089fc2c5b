"""The decode loop, the only place that decodes.

A driver of the loop is a ``Pipeline``: ``local`` (one process, no Redis) or ``rank_zero`` (a cluster). The scheduler decides
which rows enter, and follows the results. Both report to listeners: counters, traces, the publisher of answers, the live feed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Protocol

from pipedec.core.stage_message import RequestUpdate, StageMessage
from pipedec.core.verdict import Verdict
from pipedec.decoding import Request, Scheduler
from pipedec.decoding.events import Timestep


class Pipeline(Protocol):
    """The stages as rank 0 sees them."""

    def run_timestep(self, number: int, entering: StageMessage, passage: int, meanwhile: Callable[[], None]) -> Timestep:
        """Move every stage on by one timestep, the ``number``-th; ``meanwhile`` is rank 0's own work while the stages
        compute.

        ``entering`` has for each request concerned its opening, the verdict that the stages have yet to replay, and the rows
        that then enter the first stage: a chunk of the prompt, later rows of trees. The verdicts on them are among the results
        of the ``passage``-th timestep, counted from this one. So a timestep returns the results of one other, but of none or of
        several when the passage has changed: of several if none of them has results of the same request, since stages replay
        verdicts one by one. The passage is at least the number of groups.
        """

    def end_session(self, last: StageMessage) -> None:
        """Send the stages the verdicts that end the last answers. Rows in flight are not needed any more."""


def go_together(results: Iterable[RequestUpdate], more: Iterable[RequestUpdate]) -> bool:
    """Whether a timestep may return both: no request has results in either."""
    return not {one.number for one in results} & {one.number for one in more}


def decode(
    scheduler: Scheduler, pipeline: Pipeline, admit: Callable[[], None] = lambda: None
) -> Iterator[tuple[Request, Verdict]]:
    """Decode until no request is left; yields each verdict once its request has followed it. ``admit``, called before every
    timestep, opens and cancels requests.
    """
    for number in count(1):
        admit()
        if not scheduler.requests:
            pipeline.end_session(scheduler.entering())
            scheduler.closed()
            return
        timestep = pipeline.run_timestep(number, scheduler.entering(), scheduler.controller.passage, scheduler.draft)
        if timestep.timing is not None:
            scheduler.controller.record_timestep(timestep.timing)
        scheduler.emit(timestep)
        for result in timestep.results:
            if (taken := scheduler.take(result, number)) is not None:
                yield taken
        scheduler.end_failed()
