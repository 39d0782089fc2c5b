"""What travels through Redis as JSON: requests and their openings, verdicts, events of answers, the description of a run.

The one place that knows these formats. Classes are plain dataclasses, written by ``to_json`` as they are. What comes from another
program (requests, events, descriptions) is checked when it is read; ranks trust each other's verdicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pipedec.config import NONE, Settings
from pipedec.core import (
    FINISH_REASONS,
    Accepted,
    Completion,
    Envelope,
    Opening,
    PipedecError,
    SamplingParams,
    TokenLogprobs,
    Update,
    UserError,
    Verdict,
)
from pipedec.validation import parse_json, validated

TraceRow = tuple[int, str, str, int, int]  # the fields of a ``TraceEvent``


@dataclass(frozen=True)
class PromptRequest:
    """A client's request before tokenization.

    Attributes:
        prompt: text, or token ids, which are taken as they are.
        raw: skip the chat template.
        method: None for the default.
        options: what is set of the method's options, by name; rank 0 fills in the rest.
        trace: record every task of every rank.
        threads: a dialect as JSON text (``Dialect.to_json``); None for an answer in one thread.
        show_threads: send the text of every thread as it grows.
        priority: requests of a lower one are served first.
        resume: token ids of the answer so far: it goes on behind them, and only what follows is streamed. They need the seed
            with which they were drawn, if they were.
    """

    prompt: str | tuple[int, ...]
    raw: bool = False
    method: str | None = None
    sampling: SamplingParams = SamplingParams()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    trace: bool = False
    threads: str | None = None
    show_threads: bool = False
    priority: int = 0
    resume: tuple[int, ...] = ()

    def seeded(self) -> PromptRequest:
        """The request as it is submitted: with a seed, if its tokens are drawn. Whoever answers it again draws the same ones.

        Raises:
            UserError: it goes on with an answer that was drawn with a seed that it does not give.
        """
        if self.resume and self.sampling.is_stochastic and self.sampling.seed is None:
            raise UserError("the answer to resume was drawn at random: give its seed, which was reported with it")
        return replace(self, sampling=self.sampling.seeded())

    def to_json(self) -> str:
        return to_json(self)

    @classmethod
    def from_json(cls, text: str) -> PromptRequest:
        """Raises UserError for anything that is not such a request. Options are checked when the method is known."""
        return parse_json(cls, text, "the request")


@dataclass(frozen=True)
class Choice:
    """What a rank has chosen, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class RankDescription:
    """Where a rank runs, and how it computes and sends.

    Attributes:
        host: in cluster.yaml, else what the machine calls itself.
        device: ``cpu``, or a GPU as its driver names it.
        dtype: of its model, with what its weights are quantized to.
        transport: the backend of the steps that it sends.
        interface: its network interface.
        attention: the kernel of its layers.
        remarks: what else a user should know.
        since_epoch: in which its process has loaded its weights.
    """

    rank: int
    host: str
    device: str
    dtype: Choice
    transport: Choice
    interface: Choice
    attention: Choice
    remarks: tuple[str, ...] = ()
    since_epoch: int = 0

    def __str__(self) -> str:
        sending = f"{self.transport.name} over {self.interface.name} ({self.transport.why}; {self.interface.why})"
        attention = f"{self.attention.name} attention ({self.attention.why})"
        computing = f"{self.device}, {self.dtype.name} ({self.dtype.why})"
        return "; ".join([computing, sending, attention, *self.remarks])


@dataclass(frozen=True)
class BitaDescription:
    """A trained BiTA (see ``BitaConfig``)."""

    num_masks: int
    num_prompt_tokens: int
    prompting: str


@dataclass(frozen=True)
class RunDescription:
    """A run as its clients see it: how its pipeline is cut, and what it is made of.

    Attributes:
        groups: the stage ranks of each group (see ``Topology``).
        layers: for each stage, its first layer of the target and the layer behind its last.
        settings: completed: every model is a directory or ``none``, and the dtype of the target is never ``auto``. With a
            ``draft_dtype`` of ``auto`` rank 0 has chosen: ``ranks`` have what each computes in.
        emulation: name of the emulated partition.
        ranks: where each rank runs, and how.
        digests: of the weights by model (``target``, ``draft``, ``bita``), where ranks on several hosts have compared them.
        trained_bita: what ``bita`` holds.
    """

    settings: Settings
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, int], ...]
    emulation: str | None = None
    ranks: tuple[RankDescription, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict, hash=False)
    trained_bita: BitaDescription | None = None

    @property
    def target(self) -> str:
        """The directory of the target."""
        return str(self.settings.models.target)

    @property
    def draft(self) -> str | None:
        """The directory of the draft; None without one."""
        return None if self.settings.models.draft == NONE else self.settings.models.draft

    @property
    def bita(self) -> str | None:
        """The directory of the BiTA; None without one."""
        return None if self.settings.models.bita == NONE else self.settings.models.bita


@dataclass(frozen=True)
class KVUsage:
    """The KV memory of a run, the same on every stage.

    Attributes:
        capacity: slots of each stage's pool.
        used: slots of running requests.
        kept: slots that hold prefixes of ended requests.
        queried_tokens: tokens of all requests that might have been cached.
        cached_tokens: those of them that were.
        pauses: how often a request was paused.
    """

    capacity: int
    used: int
    kept: int
    queried_tokens: int
    cached_tokens: int
    pauses: int


@dataclass(frozen=True)
class Histogram:
    """How often values fell between bounds.

    Attributes:
        bounds: ascending.
        counts: for each bound the values at most it and above the one before; then those above all.
        total: sum of the values.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


@dataclass(frozen=True)
class RunStats:
    """What rank 0 has counted since the run started, told about once per second.

    Attributes:
        running: requests in the pipeline now.
        waiting: requests that rank 0 has taken and that wait for KV memory now.
        timesteps: in which requests were running.
        prompt_rows, root_rows, draft_rows, mask_rows: rows that entered the pipeline: of prompts (and of answers that go on
            behind a pause), roots of trees, which are certain, other tokens of trees, which are guesses, and masks.
        drafts: roots that entered an empty pipeline.
        accepted_tokens: guesses that were accepted (``Metrics.hits``); so 1 + accepted_tokens / drafts is tokens per refill.
        accepted_per_pos: the same by their depth below the root that entered, from 1; deeper ones are left out.
        rows_per_timestep: of timesteps in which rows entered.
        timestep_seconds: of timesteps of a full pipeline.
        corrupted: requests that have failed because a stage computed NaN or infinity.
    """

    kv: KVUsage
    running: int
    waiting: int
    timesteps: int
    prompt_rows: int
    root_rows: int
    draft_rows: int
    mask_rows: int
    drafts: int
    accepted_tokens: int
    accepted_per_pos: tuple[int, ...]
    rows_per_timestep: Histogram
    timestep_seconds: Histogram
    corrupted: int = 0


@dataclass(frozen=True)
class StageStats:
    """What a stage has counted since the run started, told about once per second.

    Attributes:
        rows: computed.
        pruned_rows: dropped without having been accepted, before they were computed or when a verdict pruned their tree.
        compute_seconds: in which rows were computed and verdicts replayed; on an emulated device, its time.
        wait_seconds: in which it waited for the rank before it, while requests were running; not counted for single tasks.
    """

    rank: int
    timesteps: int
    rows: int
    pruned_rows: int
    compute_seconds: float
    wait_seconds: float


@dataclass(frozen=True)
class Activity:
    """What a rank does, as its lease tells.

    Attributes:
        kind: ``idle``, ``computing``, ``waiting`` (for a transfer), ``loading``, ``meeting`` or ``connecting`` (to another host).
        peer: the rank that it waits for, or whose host it tries to reach.
        seconds: for how long it had done so when it told this.
        longest_seconds: of its completed timesteps.
        age_seconds: how long ago it told this, by Redis' clock.
    """

    kind: str
    peer: int | None = None
    seconds: float = 0.0
    longest_seconds: float = 0.0
    age_seconds: float = 0.0

    @property
    def began(self) -> float:
        """Of activities that are looked at together, the greater one has lasted longer, if it still lasts."""
        return self.seconds + self.age_seconds


@dataclass(frozen=True)
class Recovery:
    """An epoch that has begun because ranks, or Redis, were lost.

    Attributes:
        epoch: its number.
        lost: ranks whose processes are replaced.
        at_us: when the one before it ended, on Redis's clock, in µs since 1970.
        served_us: when its ranks served; None if they do not yet.
    """

    epoch: int
    lost: tuple[int, ...]
    reason: str
    at_us: int
    served_us: int | None = None

    @property
    def seconds(self) -> float | None:
        """For how long nobody served; None while nobody does."""
        return None if self.served_us is None else (self.served_us - self.at_us) / 1e6


@dataclass(frozen=True)
class ThreadNews:
    """What is new of one decode thread.

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


@dataclass(frozen=True)
class TokensEvent:
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


@dataclass(frozen=True)
class LogprobsEvent:
    """For sampled tokens, in the order of sampling: (token id, log probability) of the chosen one, then of the most probable.

    Attributes:
        index: the ordinal of the first one among all sampled tokens, those that the request has brought with it included. What
            was sent earlier for the same ordinals counts no more.
    """

    logprobs: list[list[tuple[int, float]]]
    index: int = 0


@dataclass(frozen=True)
class PromptLogprobsEvent:
    """As ``LogprobsEvent``, for the next tokens of the prompt, from the second one on, which has index 0."""

    logprobs: list[list[tuple[int, float]]]
    index: int = 0


@dataclass(frozen=True)
class TraceEvents:
    """Tasks of one rank, or of the scheduler."""

    rows: list[TraceRow]


@dataclass(frozen=True)
class OverranEvent:
    """Timesteps in which a rank's work took longer than its emulated time."""

    timesteps: list[int]


@dataclass(frozen=True)
class CacheSlotsEvent:
    """Capacity of a stage's KV cache, in rows, at the end of a traced answer."""

    rank: int
    slots: int


@dataclass(frozen=True)
class PausedEvent:
    """The request waits for KV memory: it has yet to begin, or its answer was paused. Until it goes on, silence is no fault."""


@dataclass(frozen=True)
class ResumedEvent:
    """The request has KV memory: it begins, or its answer goes on.

    Attributes:
        epoch: in which it goes on, if the one before it has ended while the request was running; else None.
    """

    epoch: int | None = None


@dataclass(frozen=True)
class CompletionEvent:
    """The answer is complete.

    Attributes:
        sampled: of an answer in threads, for each token of the document its ordinal in the order of sampling; −1: it was forced.
    """

    completion: Completion
    sampled: list[int] | None = None


@dataclass(frozen=True)
class ErrorEvent:
    """The request was refused."""

    message: str


@dataclass(frozen=True)
class CancelledEvent:
    """The request was cancelled before it began. Written by ``cancel.lua``."""


@dataclass(frozen=True)
class AbortEvent:
    """The run has failed; ``text`` says why. Written by ``abort.lua``."""

    text: str


@dataclass(frozen=True)
class CardEvent:
    """What a rank says of itself before the ranks connect.

    Attributes:
        host: in cluster.yaml, else what the machine calls itself.
        machine: the same for ranks that share a machine and its network, and for no others.
        address: its own address on the way to Redis.
        versions: of pipedec, torch, llguidance and the protocol in Redis.
        configs: digests of what is not weights, and of the first row of every tensor, by model.
        settings: what follows from its flags and must be the same everywhere.
    """

    rank: int
    host: str
    machine: str
    address: str
    versions: Mapping[str, str]
    configs: Mapping[str, str]
    settings: Mapping[str, str] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class AddressEvent:
    """Where a rank can be reached by the others.

    Attributes:
        port: a port on which it listens until all ranks have connected; on rank 0, the one of the store in which they meet.
        digests: of the weights by model, from the first rank of every machine, if there are several.
    """

    rank: int
    address: str
    port: int
    digests: Mapping[str, str]


@dataclass(frozen=True)
class LoadedEvent:
    """A rank has loaded its weights."""

    description: RankDescription


Event = (
    TokensEvent | LogprobsEvent | PromptLogprobsEvent | TraceEvents | OverranEvent | CacheSlotsEvent | PausedEvent | ResumedEvent
    | CompletionEvent | ErrorEvent | CancelledEvent | AbortEvent | CardEvent | AddressEvent | LoadedEvent
)  # fmt: skip
_KINDS = {
    TokensEvent: "tokens", LogprobsEvent: "logprobs", PromptLogprobsEvent: "prompt_logprobs", TraceEvents: "trace",
    OverranEvent: "overran", CacheSlotsEvent: "cache_slots", PausedEvent: "paused", ResumedEvent: "resumed",
    CompletionEvent: "completion", ErrorEvent: "error", CancelledEvent: "cancelled", AbortEvent: "abort", CardEvent: "card",
    AddressEvent: "address", LoadedEvent: "loaded",
}  # fmt: skip
_EVENTS = {kind: event for event, kind in _KINDS.items()}


def to_json(message: PromptRequest | Opening | RunDescription | RunStats | StageStats | Activity | Event) -> str:
    """The message as JSON. An event has its ``kind`` beside its fields."""
    return json.dumps(message, default=_fields)


def _fields(message: Any) -> dict[str, Any]:
    kind = _KINDS.get(type(message))
    return vars(message) if kind is None else {"kind": kind, **vars(message)}


def event_from_json(text: str | bytes) -> Event:
    """Raises PipedecError, in one line, for anything that is no event."""
    try:
        fields = json.loads(text)
        event: type[Event] = _EVENTS[fields.pop("kind")]
        return validated(event, fields)
    except UserError as error:
        reason = str(error)
    except (ValueError, RecursionError):
        reason = "not valid JSON"
    except (AttributeError, KeyError, TypeError):
        reason = "of no known kind"
    raise PipedecError(f"the cluster sent an event that this version does not understand: {reason}")


def opening_from_payload(payload: Mapping[str, Any]) -> Opening:
    return validated(Opening, payload, "the opening of a request")


def description_from_json(text: str) -> RunDescription:
    """Raises UserError if another version has written it."""
    return parse_json(RunDescription, text, "the description of the run")


def stats_from_json(text: str) -> RunStats:
    """Raises UserError if another version has written it."""
    return parse_json(RunStats, text, "the counters of the run")


def activity_from_json(text: str) -> Activity:
    """Raises PipedecError if another version has written it."""
    return parse_json(Activity, text, "the rank's activity")


def recovery_from_json(text: str) -> Recovery:
    """Raises PipedecError if another version has written it."""
    return parse_json(Recovery, text, "the recovery")


def stage_stats_from_json(text: str) -> StageStats:
    """Raises UserError if another version has written it."""
    return parse_json(StageStats, text, "the counters of a stage")


def verdict_to_payload(verdict: Verdict) -> dict[str, Any]:
    """As plain JSON values, for the payload of a task."""
    return {"accepted": _accepted_values(verdict), "finished": verdict.finished, "bad_stage": verdict.bad_stage}


def verdict_from_payload(payload: Mapping[str, Any]) -> Verdict:
    return _verdict(payload["accepted"], payload["finished"], payload.get("bad_stage"))


def _accepted_values(verdict: Verdict) -> list[Any]:
    return [[thread, list(tokens), list(map(list, forecast))] for thread, tokens, forecast in verdict.accepted]


def _verdict(accepted: Any, finished: Any, bad_stage: Any) -> Verdict:
    if finished not in FINISH_REASONS:
        raise ValueError(f"unknown finish reason {str(finished)[:100]}")
    parts = (Accepted(_int(thread), _ints(tokens), tuple(map(_ints, forecast))) for thread, tokens, forecast in accepted)
    return Verdict(tuple(parts), finished, None if bad_stage is None else _int(bad_stage))


def _int(value: Any) -> int:
    """A whole number that a tensor can hold."""
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise ValueError("not an integer of 64 bits")
    return value


def _ints(values: Any) -> tuple[int, ...]:
    return tuple(map(_int, values))


def envelope_to_payload(envelope: Envelope) -> list[Any]:
    """What an envelope says besides rows, as plain JSON values: an array for each update, in the order of ``_update``."""
    return [
        [
            update.number,
            None if update.opening is None else _fields_of(update.opening),
            None if update.verdict is None else _accepted_values(update.verdict),
            None if update.verdict is None else update.verdict.finished,
            0 if update.step is None else update.step.num_rows,
            update.logprobs,
            update.slots,
            update.prompt_logprobs,
            *([] if update.verdict is None or update.verdict.bad_stage is None else [update.verdict.bad_stage]),
        ]
        for update in envelope.updates
    ]


def envelope_from_payload(payload: Any, ends_session: bool) -> tuple[Envelope, list[int]]:
    """The envelope without its rows, and the number of rows of each update. Raises ValueError if ``payload`` is none."""
    try:
        updates = tuple(_update(*fields) for fields in payload)
        counts = [_int(fields[4]) for fields in payload]
    except (KeyError, TypeError, IndexError, AttributeError, OverflowError, UserError):
        raise ValueError("these are no updates") from None
    if min(counts, default=0) < 0 or len({update.number for update in updates}) < len(updates):
        raise ValueError("a negative number of rows, or two updates of one request")
    return Envelope(updates, ends_session), counts


def _update(
    number: Any,
    opening: Any,
    accepted: Any,
    finished: Any,
    rows: Any,
    logprobs: Any,
    slots: Any,
    prompt: Any,
    bad_stage: Any = None,
) -> Update:
    return Update(
        _int(number),
        None if opening is None else opening_from_payload(opening),
        None if accepted is None else _verdict(accepted, finished, bad_stage),
        logprobs=_logprobs(logprobs),
        slots=tuple((_int(first), _int(count)) for first, count in slots),
        prompt_logprobs=_logprobs(prompt),
    )


def _logprobs(rows: Any) -> TokenLogprobs:
    return tuple(tuple((_int(token), float(value)) for token, value in row) for row in rows)


def _fields_of(opening: Opening) -> dict[str, Any]:
    structure = opening.sampling.structured_outputs
    sampling = vars(opening.sampling) | {"structured_outputs": None if structure is None else vars(structure)}
    return {**vars(opening), "sampling": sampling}
