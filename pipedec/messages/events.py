"""Events of answers, in the order in which they happen."""

from __future__ import annotations

from typing import Any, cast

import msgspec

from pipedec.core import Completion, PipedecError, Record, UserError
from pipedec.messages.encoding import EventRecord
from pipedec.messages.meeting import AddressEvent, CardEvent, LoadedEvent
from pipedec.validation import parse_json

TraceRow = tuple[int, str, str, int, int]  # the fields of a ``TraceEvent``


class ThreadNews(Record, frozen=True):
    """New tokens and text of one decode thread.

    Attributes:
        path: of ordinals, from the main thread's child down; empty for the main thread.
        text: since the last event.
        state: ``running``, ``waiting`` or ``ended``.
        tokens: number of its tokens so far.
        offset: how many characters of its text came before; after a recovery some may come again.
    """

    path: tuple[int, ...]
    text: str
    state: str
    tokens: int
    offset: int = 0


class TokensEvent(EventRecord, frozen=True, tag="tokens"):
    """New tokens of an answer and their text; of an answer whose threads are shown, also what is new of each.

    After a recovery tokens may come again.

    Attributes:
        index: how many tokens of this answer came before, not counting those that the request has brought with it.
        offset: how many characters.
    """

    token_ids: list[int]
    text: str
    threads: list[ThreadNews] | None = None
    index: int = 0
    offset: int = 0


class LogprobsEvent(EventRecord, frozen=True, tag="logprobs"):
    """For sampled tokens, in the order of sampling: (token id, log probability) of the chosen one, then of the most probable.

    Attributes:
        index: the ordinal of the first one among all sampled tokens, those that the request has brought with it included. What
            was sent earlier for the same ordinals counts no more.
    """

    logprobs: list[list[tuple[int, float]]]
    index: int = 0


class PromptLogprobsEvent(EventRecord, frozen=True, tag="prompt_logprobs"):
    """As ``LogprobsEvent``, for the next tokens of the prompt, from the second one on, which has index 0."""

    logprobs: list[list[tuple[int, float]]]
    index: int = 0


class TraceEvents(EventRecord, frozen=True, tag="trace"):
    """Tasks of one rank, or of the scheduler."""

    rows: list[TraceRow]


class OverranEvent(EventRecord, frozen=True, tag="overran"):
    """Timesteps in which a rank's work took longer than its emulated time."""

    timesteps: list[int]


class CacheSlotsEvent(EventRecord, frozen=True, tag="cache_slots"):
    """Capacity of a stage's KV cache, in rows, at the end of a traced answer."""

    rank: int
    slots: int


class PausedEvent(EventRecord, frozen=True, tag="paused"):
    """The request waits for KV memory: it has yet to begin, or its answer was paused. Until it goes on, silence is no fault."""


class ResumedEvent(EventRecord, frozen=True, tag="resumed"):
    """The request has KV memory: it begins, or its answer goes on.

    Attributes:
        epoch: in which it goes on, if the one before it has ended while the request was running; else None.
    """

    epoch: int | None = None


class CompletionEvent(EventRecord, frozen=True, tag="completion"):
    """The answer is complete.

    Attributes:
        sampled: of an answer in threads, for each token of the document its ordinal in the order of sampling; −1: it was forced.
    """

    completion: Completion
    sampled: list[int] | None = None


class ErrorEvent(EventRecord, frozen=True, tag="error"):
    """The request was refused."""

    message: str


class CancelledEvent(EventRecord, frozen=True, tag="cancelled"):
    """The request was cancelled before it began. Written by ``cancel.lua``."""


class AbortEvent(EventRecord, frozen=True, tag="abort"):
    """The run has failed; ``text`` says why. Written by ``abort.lua``."""

    text: str


Event = (
    TokensEvent | LogprobsEvent | PromptLogprobsEvent | TraceEvents | OverranEvent | CacheSlotsEvent | PausedEvent | ResumedEvent
    | CompletionEvent | ErrorEvent | CancelledEvent | AbortEvent | CardEvent | AddressEvent | LoadedEvent
)  # fmt: skip
_decoder = msgspec.json.Decoder(Event)


def event_from_json(text: str | bytes) -> Event:
    """Raises PipedecError, in one line, for anything that is no event."""
    try:
        return cast(Event, _decoder.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return cast(Event, parse_json(cast(Any, Event), text))  # which names the mistake
    except UserError as error:
        raise PipedecError(f"the cluster sent an event that this version does not understand: {error}") from None
