"""Messages between processes as JSON, through Redis: requests, descriptions of runs, their counters, events of answers.

The one place that knows these formats. Messages that another program may have sent (requests, events, descriptions) are checked
when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, cast

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from pipedec.config import NONE, Settings
from pipedec.core import Completion, PipedecError, Record, SamplingParams, UserError
from pipedec.tracing import TraceEvent
from pipedec.validation import parse_json

LOCAL_TENANT = "local"  # of all requests that do not come through an HTTP server: who can send them can also read the others


def to_json(message: msgspec.Struct) -> str:
    """Raises UnicodeEncodeError for a text that is not UTF-8."""
    return msgspec.json.encode(message).decode()


class PromptRequest(Record, frozen=True):
    """A client's request before tokenization.

    Attributes:
        prompt: text, or token ids, which are taken as they are.
        raw: skip the chat template.
        method: None for the default.
        options: the method's options that are set, by name; rank 0 fills in the rest.
        threads: a dialect as JSON text (``Dialect.to_json``); None for an answer in one thread.
        priority: requests of a lower one are served first.
        resume: token ids of the answer so far: it continues after them, and only the rest is streamed. They need the seed
            with which they were drawn, if they were.
        tenant: requests of the same tenant draft from each other's answers; None: from no other answer.
    """

    prompt: str | tuple[int, ...]
    raw: bool = False
    method: str | None = None
    sampling: SamplingParams = SamplingParams()
    options: Mapping[str, Any] = {}
    trace: bool = False
    threads: str | None = None
    show_threads: bool = False
    priority: int = 0
    resume: tuple[int, ...] = ()
    tenant: Annotated[str, Meta(min_length=1, max_length=64)] | None = None

    def __hash__(self) -> int:
        return hash((self.prompt, self.method))  # options are a mapping

    def seeded(self) -> PromptRequest:
        """The request as it is submitted: with a seed, if its tokens are drawn. Another attempt then draws the same tokens.

        Raises UserError if it resumes an answer that was drawn at random, without its seed.
        """
        if self.resume and self.sampling.is_stochastic and self.sampling.seed is None:
            raise UserError("the answer to resume was drawn at random: give its seed, which was reported with it")
        return replace(self, sampling=self.sampling.seeded())

    def to_json(self) -> str:
        """Raises UserError for a text that is not UTF-8."""
        try:
            return to_json(self)
        except UnicodeEncodeError:
            raise UserError("the request: a text that is not UTF-8") from None

    @classmethod
    def from_json(cls, text: str) -> PromptRequest:
        """Raises UserError for anything that is not such a request. Options are checked when the method is known."""
        return parse_json(cls, text, "the request")


class Choice(Record, frozen=True):
    """A choice that a rank has made, and the reason."""

    name: str
    why: str


class LinkSpeed(Record, frozen=True):
    """The speed of the link from a rank to the one to which it sends, as measured when the ranks met.

    Attributes:
        latency_seconds: of one way, half the shortest round trip.
        bytes_per_second: at least. A burst of a few hundred milliseconds is over before TCP uses all of a long link.
    """

    latency_seconds: float
    bytes_per_second: float

    def __str__(self) -> str:
        return f"{1000 * self.latency_seconds:.3g} ms, at least {8e-6 * self.bytes_per_second:,.0f} Mbit/s"


class RankDescription(Record, frozen=True):
    """Where a rank runs, and how it computes and sends.

    Attributes:
        host: its name in cluster.yaml, else the machine's own.
        device: ``cpu``, or the driver's name of a GPU.
        dtype: of its model, with the format of quantized weights.
        transport, interface: of the steps that it sends.
        attention: the kernel of its layers.
        remarks: further notes for users.
        since_epoch: the epoch in which its process has loaded its weights.
        link: to the next rank, or from the last to rank 0; None if all ranks are on one machine.
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
    link: LinkSpeed | None = None

    def __str__(self) -> str:
        sending = f"{self.transport.name} over {self.interface.name} ({self.transport.why}; {self.interface.why})"
        attention = f"{self.attention.name} attention ({self.attention.why})"
        computing = f"{self.device}, {self.dtype.name} ({self.dtype.why})"
        links = [] if self.link is None else [f"to the next rank {self.link}"]
        return "; ".join([computing, sending, *links, attention, *self.remarks])


class BitaDescription(Record, frozen=True):
    """A trained BiTA (see ``BitaConfig``)."""

    num_masks: int
    num_prompt_tokens: int
    prompting: str


class RunDescription(Record, frozen=True):
    """A run's description for clients: its settings, and how its pipeline is cut and computed.

    Attributes:
        groups: see ``Topology``.
        layers: for each stage, its first layer of the target and the layer after its last.
        settings: completed: every model is a directory or ``none``, and the dtype of the target is never ``auto``. With a
            ``draft_dtype`` of ``auto`` rank 0 has chosen: ``ranks`` have what each computes in.
        emulation: name of the emulated partition.
        digests: of the weights by model (``target``, ``draft``, ``bita``), where ranks on several hosts have compared them.
        kv_slots: of every rank's KV pool, if ranks have measured their GPUs' memory; in all epochs the same. 0 if it follows from
            the settings.
        vocab_size: embeddings of the target, of which its tokenizer may name more or fewer. 0 without a target.
    """

    settings: Settings
    groups: tuple[tuple[int, ...], ...]
    layers: tuple[tuple[int, int], ...]
    emulation: str | None = None
    ranks: tuple[RankDescription, ...] = ()
    digests: Mapping[str, str] = {}
    trained_bita: BitaDescription | None = None
    kv_slots: int = 0
    vocab_size: int = 0

    @property
    def target(self) -> str:
        """The directory of the target."""
        return str(self.settings.models.target)

    @property
    def ring_latency_seconds(self) -> float:
        """The sum of the latencies of all links around the ring of ranks; 0 if all are on one machine."""
        return sum(rank.link.latency_seconds for rank in self.ranks if rank.link is not None)

    @property
    def draft(self) -> str | None:
        """The directory of the draft; None without one."""
        return None if self.settings.models.draft == NONE else self.settings.models.draft

    @property
    def bita(self) -> str | None:
        """The directory of the BiTA; None without one."""
        return None if self.settings.models.bita == NONE else self.settings.models.bita


class KVUsage(Record, frozen=True):
    """The KV memory of a run, the same on every stage.

    Attributes:
        capacity, used, kept: slots of each stage's pool; those of running requests; those that hold prefixes of ended requests.
        queried_tokens, cached_tokens: tokens of all requests that might have been cached; those of them that were.
    """

    capacity: int
    used: int
    kept: int
    queried_tokens: int
    cached_tokens: int
    pauses: int


class Histogram(Record, frozen=True):
    """How often values fell between ascending bounds.

    ``counts`` has for each bound the values at most it and above the one before, then those above all; ``total`` is their sum.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class RunStats(Record, frozen=True):
    """Rank 0's counters since the run started, published about once per second.

    Attributes:
        running: requests in the pipeline now.
        waiting: requests that rank 0 has taken and that wait for KV memory now.
        timesteps: in which requests were running.
        prompt_rows, root_rows, draft_rows, mask_rows: rows that entered the pipeline: of prompts (and of answers that go on
            after a pause), roots of trees, which are certain, other tokens of trees, which are guesses, and masks.
        drafts: roots that entered an empty pipeline.
        accepted_tokens: accepted guesses (``Metrics.hits``), so that tokens per refill are 1 + accepted_tokens / drafts.
        accepted_per_pos: the same by depth below the root that entered, from 1; greater depths are left out.
        rows_per_timestep: of timesteps in which rows entered.
        timestep_seconds: of timesteps of a full pipeline.
        corrupted: requests that have failed because a stage computed NaN or infinity.
        passage: timesteps from a row's entry to its verdict, now, of requests that keep the pipeline full.
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
    passage: int = 0


class StageStats(Record, frozen=True):
    """A stage's counters since the run started, published about once per second.

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


class ActivityReport(Record, frozen=True):
    """The activity of a rank, as its lease reports it.

    Attributes:
        kind: ``idle``, ``computing``, ``warming`` (a computation that may take long because it is the first of its kind),
            ``waiting`` (for a transfer), ``loading``, ``meeting`` or ``connecting`` (to another host).
        peer: the rank that it waits for, or whose host it tries to reach.
        seconds: how long the activity had lasted at the time of the report.
        longest_seconds: the longest of its completed timesteps.
        warmed_seconds: how long ago it last was ``warming``; None if it never was.
        link_seconds: the latency of its link to the next rank; 0 if all ranks are on one machine.
        age_seconds: the age of the report, by Redis's clock.
    """

    kind: str
    peer: int | None = None
    seconds: float = 0.0
    longest_seconds: float = 0.0
    warmed_seconds: float | None = None
    link_seconds: float = 0.0
    age_seconds: float = 0.0

    @property
    def began(self) -> float:
        """Seconds since the activity began, if it still lasts."""
        return self.seconds + self.age_seconds

    def __str__(self) -> str:
        """For example ``waiting for rank 2, 3.1 s``."""
        return f"{self.kind}{'' if self.peer is None else f' for rank {self.peer}'}, {self.began:.1f} s"


class Recovery(Record, frozen=True):
    """An epoch that has begun because ranks, or Redis, were lost.

    Attributes:
        lost: ranks whose processes are replaced.
        at_us: when the one before it ended, on Redis's clock, in µs since 1970.
        served_us: when its ranks served; None if they do not yet.
        request: the request that was found to be the cause; None if none was.
    """

    epoch: int
    lost: tuple[int, ...]
    reason: str
    at_us: int
    served_us: int | None = None
    request: int | None = None

    @property
    def seconds(self) -> float | None:
        """How long the run was not served; None while it is not."""
        return None if self.served_us is None else (self.served_us - self.at_us) / 1e6


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
    TokensEvent | LogprobsEvent | PromptLogprobsEvent | TraceEvents | OverranEvent | CacheSlotsEvent | PausedEvent | ResumedEvent
    | CompletionEvent | ErrorEvent | CancelledEvent | AbortEvent | CardEvent | AddressEvent | LoadedEvent
)  # fmt: skip
_decoder = msgspec.json.Decoder(Event)


def event_from_json(text: str | bytes) -> Event:
    """Raises PipedecError, in one line, for anything but an event."""
    try:
        return cast(Event, _decoder.decode(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        return cast(Event, parse_json(cast(Any, Event), text))  # which names the mistake
    except UserError as error:
        raise PipedecError(f"the cluster sent an event that this version does not understand: {error}") from None
