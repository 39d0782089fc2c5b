"""The decode loop: propose, advance, accept, apply. The only place that decodes, with every driver.

A driver of the loop is a ``Pipeline``: ``local`` (one process, no Redis), ``windows`` and ``tasks`` (rank 0 of a cluster).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Protocol

from pipedec.core import StageMessage, Verdict
from pipedec.engine.records import Timestep
from pipedec.engine.request_pool import RequestPool


class Pipeline(Protocol):
    """The stages as rank 0 sees them."""

    def advance(self, number: int, entering: StageMessage, meanwhile: Callable[[], None]) -> Timestep:
        """Move every stage on by one timestep.

        Args:
            number: of the timestep, from 1.
            entering: for each request concerned its opening, the verdict that the stages have yet to replay, and the rows that
                then enter the first stage: a chunk of the prompt, later rows of trees.
            meanwhile: rank 0's own work while the stages compute.

        Returns:
            the timestep; its results are verdicts on rows that entered as many timesteps ago as the pipeline has groups.
        """

    def close(self, last: StageMessage) -> None:
        """Send the stages the verdicts that end the last answers. No more rows in flight are needed."""


def decode(pool: RequestPool, pipeline: Pipeline, admit: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Verdict]]:
    """Decode the requests of ``pool`` until there is none; yields (request number, verdict) once its method has followed it.

    Observers listen to ``pool``.

    Args:
        admit: called before every timestep; may open and cancel requests.
    """
    for number in count(1):
        admit()
        if not pool.running:
            pipeline.close(pool.entering())
            pool.closed()
            return
        timestep = pipeline.advance(number, pool.entering(), pool.batch.draft)
        if timestep.timing is not None:
            pool.batch.observe(timestep.timing)
        pool.emit(timestep)
        for result in timestep.results:
            verdict = pool.take(result, number)
            if verdict is not None:
                yield result.number, verdict
