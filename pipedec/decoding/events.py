"""Records of what happens while requests are decoded. Listeners receive them in order and do not influence decoding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from pipedec.core.stage_message import EMPTY, HiddenStates, Load, NewRequest, RequestUpdate, StageMessage, TokenLogprobs
from pipedec.core.verdict import Verdict
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.request import Request


@dataclass
class TimestepLoad:
    """The work of one timestep of a pipeline in one process; ``drafted`` and seconds only if devices are emulated."""

    drafted: list[Load] = field(default_factory=list)  # the load of each draft forward
    computed: dict[int, Load] = field(default_factory=dict)  # by rank
    sent: dict[int, int] = field(default_factory=dict)  # rows by sender
    deciding_seconds: float = 0.0  # rank 0's work between two timesteps, for which all stages wait
    beside_seconds: float = 0.0  # rank 0's work while the stages compute, without draft forwards


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
        entered: on rank 0, the message that entered the pipeline.
        results: on rank 0, those of the last stage for the rows of the oldest timesteps in flight.
        timing: on rank 0, how long the timestep took; None while the pipeline fills.
        load: the rows of every rank, if all are in this process.
        spans: the pieces of the rank's work.
        overran: whether work took longer than on the emulated device.
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

    request: Request


class Interrupted(Struct, frozen=True):
    """The request's lanes are lost: it waits, and continues when it is opened again."""

    request: Request


class RequestOpened(Struct, frozen=True):
    """The request begins, or continues after a pause. An answer in threads is decoded again from its first token."""

    request: Request
    opening: NewRequest


class Advanced(Struct, frozen=True):
    """Tokens were accepted; the method follows the verdict after this.

    Attributes:
        verdict: as far as the answer goes.
        logprobs: of the tokens that the last stage has accepted, if requested.
        timestep: its number.
    """

    request: Request
    verdict: Verdict
    logprobs: TokenLogprobs
    timestep: int


class PromptScored(Struct, frozen=True):
    """The log-probabilities of the next tokens of the prompt, or their hidden states; each once.

    Attributes:
        first: index of the first of these tokens, counted from the second token of the prompt on; for hidden states from the
            first.
    """

    request: Request
    first: int
    logprobs: TokenLogprobs
    hidden_states: HiddenStates | None = None


class RequestEnded(Struct, frozen=True):
    """The answer has ended, and the method has followed its last verdict. The next message informs the stages.

    Attributes:
        failure: what has gone wrong in a rank and has ended the answer.
    """

    request: Request
    reason: str
    failure: str | None = None


class RequestClosed(Struct, frozen=True):
    """No stage has a lane of the ended request."""

    request: Request


class Drained(Struct, frozen=True):
    """No stage has a lane of any request."""


Record = Timestep | Waits | Interrupted | RequestOpened | Advanced | PromptScored | RequestEnded | RequestClosed | Drained
Listener = Callable[[Record], None]
