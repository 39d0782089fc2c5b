"""The decode loop: propose, advance, accept, apply. However rows get from stage to stage, this is the only place that decodes.

A driver of the loop is a ``Pipeline``: ``local`` (one process, no Redis), ``windows`` and ``tasks`` (rank 0 of a cluster).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from typing import Protocol

from torch import Tensor

from pipedec.core import Envelope, Request, Verdict
from pipedec.decoding import Method
from pipedec.engine.prefill import prefill_chunks
from pipedec.engine.recorder import Timestep

Listener = Callable[[Timestep], None]


class Pipeline(Protocol):
    """The stages as rank 0 sees them."""

    def prefill(self, chunks: Sequence[list[int]], compute: Callable[[Tensor], None]) -> Verdict:
        """Send the prompt through all stages, while rank 0 computes each chunk (int64 [R]) too; the verdict on its last token."""

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        """Move every stage on by one timestep.

        Args:
            number: of the timestep, from 1.
            entering: the verdict that the stages have yet to replay, and the rows that enter the first stage behind it.
            meanwhile: rank 0's own work while the stages compute.

        Returns:
            what happened; its verdict is on the step that entered as many timesteps ago as the pipeline has groups.
        """

    def close(self, last: Verdict) -> None:
        """Tell the stages of the verdict that ends the answer, and discard the rows in flight."""


def decode(
    request: Request,
    method: Method,
    pipeline: Pipeline,
    accept: Callable[[Verdict], Verdict] = lambda verdict: verdict,
    listeners: Iterable[Listener] = (),
) -> Iterator[Verdict]:
    """Decode ``request``; yields each verdict once ``method`` has followed it, the last one before the pipeline is closed.

    Args:
        accept: called with the verdicts of the pipeline; returns them, or cut and finished where the answer ends earlier.
        listeners: called with the record of every timestep.
    """
    result: Verdict | None = pipeline.prefill(prefill_chunks(request.prompt_token_ids, method.masks.count), method.prefill)
    for number in count(1):
        verdict = None if result is None else accept(result)
        if verdict is not None:
            method.apply(verdict)
            yield verdict
            if verdict.finished:
                pipeline.close(verdict)
                return
        timestep = pipeline.advance(number, Envelope(method.propose(), verdict), method.draft)
        if timestep.timing is not None:
            method.observe(timestep.timing)
        for listen in listeners:
            listen(timestep)
        result = timestep.verdict
