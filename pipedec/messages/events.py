"""Events of answers and of ranks, as JSON. Another program may have sent them, so they are checked when they are read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgspec

from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError
from pipedec.core.records import Record
from pipedec.core.stage_message import HiddenStates
from pipedec.messages.run import RankDescription
from pipedec.tracing import TraceEvent


class EventRecord(Record, frozen=True, tag_field="kind"):
    """An event, whose ``kind`` is the tag of its class."""


class CardEvent(EventRecord, frozen=True, tag="card"):
    """A rank's description of itself before the ranks connect.

    Attributes:
        host: its name in cluster.yaml, else the machine's own.
        machine: see ``network.machine_id``.
        address: its own address on the route to Redis.
        versions: of pipedec, torch, llguidance and the protocols in Redis and between ranks.
        configs: digests of the checkpoints without their weights, by model.
        settings: consequences of its flags that must be the same on all ranks.
        gpu: the identifier of the GPU on which it will load its weights; empty on a processor, and once they are loaded.
    """

    rank: int
    host: str
    machine: str
    address: str
    versions: Mapping[str, str]
    configs: Mapping[str, str]
    settings: Mapping[str, str] = {}
    gpu: str = ""


class AddressEvent(EventRecord, frozen=True, tag="address"):
    """Where a rank can be reached by the others.

    Attributes:
        port: a port on which it listens until all ranks have connected; on rank 0, that of the store in which they meet.
        kv_bytes: measured memory for keys and values; None if it has measured none.
        digests: of the tensors that the rank reads, by model and name, if there are several machines.
    """

    rank: int
    address: str
    port: int
    digests: Mapping[str, Mapping[str, str]]
    kv_bytes: int | None = None


class LoadedEvent(EventRecord, frozen=True, tag="loaded"):
    """A rank has loaded its weights."""

    description: RankDescription


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
    """New tokens of an answer and their text; with ``show_threads`` also news of each thread. After a recovery tokens may be
    repeated.

    Attributes:
        index: how many tokens of this answer came before, without those that the request contained.
        offset: how many characters came before.
    """

    token_ids: list[int]
    text: str
    threads: list[ThreadNews] | None = None
    index: int = 0
    offset: int = 0


class LogprobsEvent(EventRecord, frozen=True, tag="logprobs"):
    """For sampled tokens, in the order of sampling: (token id, log probability) of the chosen one, then of the most probable.

    Attributes:
        index: the ordinal of the first one among all sampled tokens, including those that the request contained. Earlier values
            for the same ordinals are void.
    """

    logprobs: list[list[tuple[int, float]]]
    index: int = 0


class PromptLogprobsEvent(EventRecord, frozen=True, tag="prompt_logprobs"):
    """As ``LogprobsEvent``, for the next tokens of the prompt, from the second one on, which has index 0."""

    logprobs: list[list[tuple[int, float]]]
    index: int = 0


class HiddenStatesEvent(EventRecord, frozen=True, tag="hidden_states"):
    """The hidden states of the next tokens of the prompt, of which the first has index 0. Later ones are void.

    Large: Redis keeps those of a whole prompt, 4/3 of their bytes, until the client closes the answer.
    """

    hidden_states: HiddenStates
    index: int = 0


class TraceEvents(EventRecord, frozen=True, tag="trace"):
    """Tasks of one rank, or of the scheduler."""

    rows: list[TraceEvent]


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
    """The request has KV memory: it begins or goes on; in ``epoch``, if the one before has ended while it was running."""

    epoch: int | None = None


class CompletionEvent(EventRecord, frozen=True, tag="completion"):
    """The answer is complete. For an answer in threads, ``sampled`` has each token's ordinal in the order of sampling; -1 for a
    forced token.
    """

    completion: Completion
    sampled: list[int] | None = None


class ErrorEvent(EventRecord, frozen=True, tag="error"):
    """The request was refused; or, if ``is_fault``, a rank cannot answer it."""

    message: str
    is_fault: bool = False


class CancelledEvent(EventRecord, frozen=True, tag="cancelled"):
    """The request was cancelled before it began. Written by ``cancel.lua``."""


class AbortEvent(EventRecord, frozen=True, tag="abort"):
    """The run has failed; ``text`` says why. Written by ``abort.lua``."""

    text: str


Event = (
    TokensEvent | LogprobsEvent | PromptLogprobsEvent | HiddenStatesEvent | TraceEvents | OverranEvent | CacheSlotsEvent
    | PausedEvent | ResumedEvent | CompletionEvent | ErrorEvent | CancelledEvent | AbortEvent | CardEvent | AddressEvent
    | LoadedEvent
)  # fmt: skip
_decoder = msgspec.json.Decoder(Event)


def event_from_json(text: str | bytes) -> Event:
    """Raises PipedecError, in one line, for anything but an event."""
    try:
        return cast(Event, _decoder.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PipedecError(f"the cluster sent an event that this version does not understand: {str(error)[:200]}") from None
