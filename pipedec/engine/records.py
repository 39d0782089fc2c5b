"""Records of events on rank 0: a ``Timestep`` for the whole pipeline, the others for one request each.

The decode loop and its pool emit them to a list of listeners: counters, traces, the publisher of answers, the live feed.
Listeners do not influence decoding. Other ranks keep records of their own timesteps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import Struct

from pipedec.core import EMPTY, NewRequest, Request, RequestUpdate, StageMessage, TokenLogprobs, Verdict
from pipedec.decoding import TimestepTiming
from pipedec.engine.emulated_time import TimestepLoad
from pipedec.threads import NewSequence


class TimedSpan(NamedTuple):
    """A piece of a rank's work, as traces show it. Times are seconds of ``time.perf_counter``."""

    label: str
    category: str
    began: float
    ended: float


@dataclass(frozen=True)
class Timestep:
    """One timestep of one rank. Its verdicts follow as ``Advanced`` records.

    Attributes:
        number: counted from 1; in task dispatch 0 and less in prefill.
        entered: rank 0: the envelope that entered the pipeline.
        results: rank 0: the last stage's results for the rows of the oldest timestep in flight.
        timing: rank 0: how long the timestep took; None while the pipeline fills.
        load: the rows of every rank, if all are in this process.
        spans: the pieces of the rank's work.
        overran: work took longer than on the emulated device.
    """

    number: int
    entered: StageMessage = EMPTY
    results: tuple[RequestUpdate, ...] = ()
    timing: TimestepTiming | None = None
    load: TimestepLoad | None = None
    spans: tuple[TimedSpan, ...] = ()
    overran: bool = False


class Waits(Struct, frozen=True):
    """No KV memory is free for the request now: it begins later or, if it has begun, it is paused."""

    number: int


class Interrupted(Struct, frozen=True):
    """The request's lanes are lost: it waits, and continues when it is opened again."""

    number: int


class RequestOpened(Struct, frozen=True):
    """The request begins, or continues after a pause. An answer in threads is decoded again from its first token.

    Attributes:
        new_sequence: makes the sequence of the answer.
        is_prefilling: no verdict yet. False only for a listener that joins later.
    """

    number: int
    request: Request
    new_sequence: NewSequence
    opening: NewRequest
    is_prefilling: bool = True


class Advanced(Struct, frozen=True):
    """Tokens were accepted; the method follows the verdict after this.

    Attributes:
        verdict: as far as the answer goes.
        logprobs: of the tokens that the last stage has accepted, if requested.
        timestep: its number.
    """

    number: int
    verdict: Verdict
    logprobs: TokenLogprobs
    timestep: int


class PromptScored(Struct, frozen=True):
    """The log-probabilities of the next tokens of the prompt, from the second one on; each once."""

    number: int
    logprobs: TokenLogprobs


class RequestEnded(Struct, frozen=True):
    """The answer has ended, and the method has followed its last verdict. The stages learn it with the next envelope.

    Attributes:
        hits, misses: see ``Metrics``.
        bad_stage: the first one to compute NaN or infinity for the request, which has ended the answer.
    """

    number: int
    reason: str
    hits: int
    misses: int
    bad_stage: int | None = None


class RequestClosed(Struct, frozen=True):
    """No stage has a lane of the ended request."""

    number: int


class Drained(Struct, frozen=True):
    """No stage has a lane of any request."""


Record = Timestep | Waits | Interrupted | RequestOpened | Advanced | PromptScored | RequestEnded | RequestClosed | Drained
Listener = Callable[[Record], None]
