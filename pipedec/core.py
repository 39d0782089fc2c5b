"""The data types and errors that every layer may use. Messages to other processes are msgspec Structs.

Knows no layer, and computes nothing. Tensors appear only in annotations, so that a client imports this module without torch.
"""

from __future__ import annotations

import json
import secrets
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta, Struct
from msgspec import field as struct_field
from msgspec.structs import force_setattr, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from torch import Tensor

MAX_LOGPROBS = 20
NUM_ROW_IDS = 3  # of each row that is sent: token id, parent, thread
ROW_ID_BYTES = 8 * NUM_ROW_IDS  # as int64
DEFAULT_METHOD = "pipedec-bestfirst"
STRUCTURES = ("json", "regex", "choice", "grammar", "json_object")  # of ``StructuredOutputs``
KNEE_ROWS = 64  # rows that most GPUs compute in about the time of one, if the plan has no better value (see ``hardware``)
DRAFTED_ROWS = 32  # maximum rows of one request in one draft forward: more make no answer faster
MAX_FORWARDS = 8  # maximum draft forwards per timestep
MAX_PASSAGE = 128  # timesteps from a row's entry to its verdict
SLOW_SECONDS = 0.005  # of the links around the ring of ranks together, from which they count as slow
MAX_NUM_SEQS = 64  # requests in the pipeline at the same time
MAX_WAITING = 1000  # requests that wait for a place among them
LARGEST = sys.float_info.max  # an integer in JSON may be larger
LOWEST_LOGPROB = -9999.0  # JSON has no infinity
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # the range of a tensor's integers
_GENERATED_SEED_BITS = 53  # integers that every JSON parser represents exactly


class Record(Struct, frozen=True, forbid_unknown_fields=True):
    """A message from another process: an immutable struct that refuses unknown fields."""


class PipedecError(Exception):
    """An error that ends a command with one line and a non-zero exit, never with a traceback."""


class UserError(PipedecError):
    """A mistake of the user. The message names the mistake and its remedy in one line."""


class BadValue(UserError, ValueError):
    """A value that is not allowed, as ``KEY: must be …``.

    Also a ValueError, so that msgspec catches it and the path of a nested key can be put in front.
    """


class RequestFailed(PipedecError):
    """A rank cannot answer a request, which has ended; the message names the rank. The run and its other requests go on."""


class QueueFull(UserError):
    """The run has as many unfinished requests as it allows: the same request may be accepted later."""


class RankLost(PipedecError):
    """A rank died or stopped answering; the message names it."""


class SchedulerLost(PipedecError):
    """Redis refused the connection, refused the password, or died."""


class SchedulerBusy(SchedulerLost):
    """Redis executes no commands at present: its memory is full, it is loading its data, or it is busy."""


class OutOfDescriptors(SchedulerBusy):
    """This process may open no further connection to Redis: nothing is wrong with the run."""


class SchedulerInterrupted(SchedulerLost):
    """The connection to Redis broke during a command, which may have been executed: the run continues in its next epoch."""


class EpochEnded(PipedecError):
    """The run has left the caller's epoch: a rank or Redis was lost, and all ranks have to meet again."""


def check_sets_of_tokens(vocab_size: int, **given: Collection[int] | None) -> None:
    """Raises UserError as ``check_token_ids`` by name, and if there are more tokens than ``vocab_size``."""
    for name, token_ids in given.items():
        if token_ids and len(token_ids) > vocab_size:
            raise UserError(f"{name} must have at most {vocab_size} tokens, as many as the vocabulary, not {len(token_ids)}")
        check_token_ids(name, token_ids or (), vocab_size)


def check_token_ids(name: str, token_ids: Collection[int], vocab_size: int) -> None:
    """Raises UserError, whose message begins with ``name``, if a model of ``vocab_size`` embeddings lacks a token."""
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        token = next(token for token in token_ids if not 0 <= token < vocab_size)
        raise UserError(
            f"{name} names token {str(token)[:100]}, but the vocabulary has {vocab_size} tokens: leave it out, ids are from 0 to "
            f"{vocab_size - 1}"
        )


class StructuredOutputs(Record, frozen=True):
    """The required form of an answer, with vLLM's names. Exactly one is given.

    Attributes:
        json: a JSON Schema, as text or as a value. It is kept as text.
        regex: a regular expression that the whole answer matches.
        choice: the answer is one of these texts.
        grammar: a context-free grammar, in Lark's syntax as llguidance reads it, or GBNF.
        json_object: the answer is a JSON object with any content. Never False.

    Raises:
        UserError: none or more than one is given, or the value is empty, of another type or not JSON.
    """

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "json_object", self.json_object or None)
        given = [name for name in STRUCTURES if getattr(self, name) is not None]
        if len(given) != 1:
            raise UserError(f"structured_outputs must have one of {', '.join(STRUCTURES)}, not {' and '.join(given) or 'none'}")
        name, value = given[0], getattr(self, given[0])
        if name == "json":
            force_setattr(self, name, _schema_text(value))
        elif name == "choice":
            if not (isinstance(value, list | tuple) and value and all(isinstance(text, str) for text in value)):
                raise UserError("structured_outputs.choice must be a list of texts that is not empty")
            force_setattr(self, name, tuple(value))
        elif name != "json_object" and not (isinstance(value, str) and value):
            raise UserError(f"structured_outputs.{name} must be a text that is not empty")

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in STRUCTURES if getattr(self, name) is not None)


def _schema_text(schema: Any) -> str:
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema, ensure_ascii=False)
        if isinstance(json.loads(text), dict | bool):
            return text
    except (ValueError, TypeError, RecursionError) as error:
        raise UserError(f"structured_outputs.json must be a JSON Schema: {str(error)[:200]}") from None
    raise UserError("structured_outputs.json must be a JSON Schema: an object, true or false")


class SamplingParams(Record, frozen=True):
    """Sampling parameters of a request, with vLLM's names, meanings and ranges. The default is greedy decoding.

    They apply in this order: logit bias, penalties, temperature, min_p, top_k, top_p. The last three also keep tokens that are
    exactly as probable as the least probable token they keep.

    Attributes:
        temperature: controls randomness. 0 is greedy: the most probable token, in a tie the one with the lowest id.
        top_k: number of most probable tokens to sample from. 0 or −1 considers all tokens.
        top_p: cumulative probability of the most probable tokens to sample from, in (0, 1]. 1 considers all tokens.
        min_p: minimum probability of a token, relative to the most probable one, in [0, 1]. 0 disables it.
        seed: random seed. The same seed gives the same tokens with every method; None or -1 takes a random one, which is
            reported.
        max_tokens: maximum number of tokens to generate.
        stop: string or strings that stop the generation. The returned text does not contain them.
        stop_token_ids: tokens that stop the generation, besides the model's end tokens.
        repetition_penalty: values above 1 penalize tokens of the prompt and the generated text: positive logits are divided
            by it, negative ones multiplied.
        presence_penalty: subtracted from the logits of tokens that the generated text contains, in [−2, 2].
        frequency_penalty: subtracted as often as the generated text contains the token, in [−2, 2].
        logit_bias: by token id, a value in [−100, 100] that is added to its logit.
        logprobs: number of most probable tokens whose log probabilities are returned per output token, besides the chosen
            one. They are taken before bias, penalties and temperature. None returns none.
        ignore_eos: continue after the model's end tokens.
        prompt_logprobs: as ``logprobs``, for the tokens of the prompt. None returns none.
        structured_outputs: the required form of the answer; not with ``ignore_eos``. Tokens that it forbids are excluded
            before everything else. None for any text.

    Raises:
        UserError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: str | tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        force_setattr(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        force_setattr(self, "stop_token_ids", tuple(self.stop_token_ids))
        if self.seed == -1:  # as in vLLM and llama.cpp
            force_setattr(self, "seed", None)
        bias = self.logit_bias or {}
        for name, is_allowed, allowed in (
            ("temperature", 0 <= self.temperature <= LARGEST, "finite and at least 0"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "at least 0 and below 2**64"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("stop", all(self.stop), "strings that are not empty"),
            ("repetition_penalty", 0 < self.repetition_penalty <= LARGEST, "finite and above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("logit_bias", all(token >= 0 for token in bias), "of token ids, which are at least 0"),
            ("logit_bias", all(-100 <= value <= 100 for value in bias.values()), "between -100 and 100"),
            ("logprobs", 0 <= (self.logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
            ("prompt_logprobs", 0 <= (self.prompt_logprobs or 0) <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
        ):
            if not is_allowed:
                raise UserError(f"{name} must be {allowed}, not {str(getattr(self, name))[:100]}")
        if self.structured_outputs is not None and self.ignore_eos:
            raise UserError("structured_outputs end with the model's end token: leave out ignore_eos")

    def __hash__(self) -> int:
        return hash((self.temperature, self.seed, self.max_tokens))  # a bias is a mapping

    @property
    def is_stochastic(self) -> bool:
        return self.temperature > 0

    def seeded(self) -> SamplingParams:
        """The parameters, with a random seed if one is needed and none is given."""
        if self.seed is not None or not self.is_stochastic:
            return self
        return replace(self, seed=secrets.randbits(_GENERATED_SEED_BITS))

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether decoding takes the most probable token of the unchanged logits."""
        return not (self.is_stochastic or self.has_penalties or self.logit_bias)


class MethodOptions(Record, frozen=True):
    """The options of one decoding method. Every method has a class of its own (see ``methods``)."""


@dataclass(frozen=True)
class Request:
    """One prompt to answer, already tokenized.

    Attributes:
        number: counts the requests of a run from 0.
        method: a name of the table in ``methods``.
        options: an instance of the method's options class; None for its defaults.
        trace: record every task of every rank.
        threads: the dialect in which the model may open decode threads (``Dialect.to_json``); None for a single thread.
        priority: requests with a lower value are served first.
        output_token_ids: earlier tokens of an answer in one thread, after which it continues.
        tenant: whose earlier answers may be a draft source, and to whose this one is added; None: no one's, and it is not kept.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    method: str = DEFAULT_METHOD
    options: MethodOptions | None = None
    trace: bool = False
    threads: str | None = None
    priority: int = 0
    output_token_ids: tuple[int, ...] = ()
    tenant: str | None = None


@dataclass(frozen=True)
class MaskParams:
    """The mask rows of a method (BiTA): ``count`` per group, each of which proposes ``named`` tokens."""

    count: int = 0
    named: int = 0


NO_MASKS = MaskParams()


@dataclass
class Step:
    """The rows that enter a stage at one timestep (PipeDec's data flow df).

    Token ids, parents and threads are on the host; only activations are on a device.

    Attributes:
        token_ids: int64 [R]. The m-th mask row of a group has the id −m; mask rows come after all other rows.
        parents: int64 [R], indices into the receiving rank's PredictionTree (whose rows are in order of entry), −1 for
            a root. The parent may be in the same step: its rows are numbered after the receiver's present rows.
        hidden: [R, E] activations of the previous stage; None on the way into the first stage.
        threads: int64 [R], the decode thread of each row; ``parents`` are indices into that thread's tree. None: thread 0.
        log_probs: [R], of each row's token given its parent; None if the method does not know them. They stay on rank 0.
    """

    token_ids: Tensor
    parents: Tensor
    hidden: Tensor | None = None
    threads: Tensor | None = None
    log_probs: Sequence[float] | Tensor | None = None

    @property
    def num_rows(self) -> int:
        return self.token_ids.shape[0]


class Accepted(NamedTuple):
    """The tokens of one decode thread that a verdict accepts.

    Attributes:
        tokens: accepted token ids, in order.
        forecast: the mask rows' predictions: for each position after the last accepted token, nearest first, the most probable
            tokens, best first. Empty without mask rows.
        surprisals: negative log-probabilities of the tokens of ``forecast``, in ``SURPRISAL_UNIT`` nats, with the noise that
            will choose sampled tokens. Empty if they are unknown.
    """

    thread: Int64
    tokens: tuple[Int64, ...]
    forecast: tuple[tuple[Int64, ...], ...] = ()
    surprisals: tuple[tuple[Int64, ...], ...] = ()


SURPRISAL_UNIT = 1 / 256
MAX_SURPRISAL = 2**13  # of a token that cannot be chosen, or whose logit is no number

FinishReason = Annotated[str, Meta(pattern=r"^(stop|length|cancelled|cache_full|paused|corrupted|failed)\Z")]


class Verdict(Record, frozen=True):
    """The result of verification: the accepted tokens of each decode thread. An answer in one thread is thread 0.

    Attributes:
        accepted: in the order of verification; each thread at most once.
        finished: why the answer ended: ``"stop"`` (end token or stop string), ``"length"`` (max_tokens), ``"cancelled"`` or, for
            an answer in several threads, ``"cache_full"``; None while it continues. ``"paused"`` closes the request's lanes like
            the others, but the answer continues later, in new lanes. ``"corrupted"``: a stage has computed NaN or infinity.
            ``"failed"``: something else has gone wrong in a rank while it worked for the request.
        failure: what has gone wrong and where, of an answer that is corrupted or has failed.
    """

    accepted: tuple[Accepted, ...] = ()
    finished: FinishReason | None = None
    failure: str | None = None

    @classmethod
    def of(cls, *tokens: int, finished: FinishReason | None = None, forecast: tuple[tuple[int, ...], ...] = ()) -> Verdict:
        """The verdict that accepts ``tokens`` in the main thread."""
        return cls((Accepted(0, tokens, forecast),) if tokens else (), finished)

    @property
    def tokens(self) -> tuple[int, ...]:
        """All accepted token ids, thread after thread."""
        if len(self.accepted) == 1:
            return self.accepted[0].tokens
        return tuple(token for part in self.accepted for token in part.tokens)


SlotRuns = tuple[tuple[Int64, Int64], ...]  # slots of a KV pool, in order: (first slot, number of slots), in whole blocks


class NewRequest(Record, frozen=True):
    """Everything that a rank must know about a request before its first rows.

    Attributes:
        prompt_length: tokens of the prompt.
        tokens_per_mask: tokens that each mask row predicts; 0 without masks.
        threads: the dialect (``Dialect.to_json``); None for an answer in one thread.
        trace: record every task.
        output_token_ids: earlier tokens of the answer, after which the request continues. They and the prompt enter first.
        slots: of every stage's KV pool, for the request's rows; ``RequestUpdate.slots`` adds more.
        cached: how many of the tokens that enter first, from the first one on, are in these slots already; never all of them.
        copied: the last ``copied[1]`` of the ``cached`` tokens are in the pool from slot ``copied[0]`` on; each stage copies them
            to the request's own slots when it opens the request. The slots before are shared with other requests.
    """

    prompt_length: Int64
    sampling: SamplingParams
    tokens_per_mask: Int64 = 0
    threads: str | None = None
    trace: bool = False
    output_token_ids: tuple[Int64, ...] = struct_field(default=(), name="said")  # its name in messages between ranks
    slots: SlotRuns = ()
    cached: Int64 = 0
    copied: tuple[Int64, Int64] = (0, 0)


TokenLogprobs = tuple[tuple[tuple[Int64, float], ...], ...]  # by token: (token id, log-probability), the chosen one first


class Load(NamedTuple):
    """The work of one forward.

    Attributes:
        rows: of all requests.
        past: KV cache entries that its rows attend to, summed over the requests that have rows.
    """

    rows: int = 0
    past: int = 0


NO_LOAD = Load()


class RequestUpdate(Struct, frozen=True):
    """The changes to one request at a timestep, in order: its opening, a verdict to replay, rows to compute. Each is optional.

    Attributes:
        opening: the request begins, or continues after a pause: every rank opens a lane for it.
        verdict: accepted tokens. With ``finished`` every rank drops the request's lane, and its rows in flight.
        step: a chunk of the prompt (and of the answer's earlier tokens) until all has entered, then rows of the answer's trees.
        logprobs: from the last stage, with a verdict: log-probabilities of the accepted tokens, if requested.
        prompt_logprobs: from the last stage, while the prompt enters: the same for its next tokens, from the second on.
        slots: of every stage's KV pool, in addition to those that the request has. They are assigned before the rows.
        failure: what has gone wrong in a stage that has dropped the request's lane. Later ones pass it on to rank 0.
    """

    number: int
    opening: NewRequest | None = None
    verdict: Verdict | None = None
    step: Step | None = None
    logprobs: TokenLogprobs = ()
    slots: SlotRuns = ()
    prompt_logprobs: TokenLogprobs = ()
    failure: str | None = None


@dataclass(frozen=True)
class StageMessage:
    """A message from one rank to the next at a timestep: at most one update for each request.

    A message without updates only signals that the timestep has reached this rank. Activations may still be on their way when
    everything else has been received, so that verdicts are replayed meanwhile.

    Attributes:
        ends_session: no timestep follows until the scheduler grants the next session.
        await_hidden: call this before activations are used, on the host or by work queued on the device; a second call has no
            effect. Raises RankLost if they cannot arrive any more.
        tensors: small ones by name, which travel in host memory beside the activations.
    """

    updates: tuple[RequestUpdate, ...] = ()
    ends_session: bool = False
    await_hidden: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)
    tensors: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    @property
    def num_rows(self) -> int:
        return sum(update.step.num_rows for update in self.updates if update.step is not None)


EMPTY = StageMessage()


class Metrics(Struct, forbid_unknown_fields=True):
    """Counters of one request. ``timesteps`` = ``hits`` + groups × ``misses`` for the layer-wise method (PipeDec §3.3.4).

    A decoded token is a *hit* if the row that yields it was already in flight when the token before it was accepted: it comes
    one timestep later. It is a *miss* if its row had to enter the empty pipeline. The first token comes from prefill and is
    neither, so ``hits`` + ``misses`` = decoded tokens − 1.

    With the static tree (``stpp``) every root is a miss, and each accepted row below it is a hit in the same verdict:
    ``timesteps`` = (groups + 1) × ``misses``, because the stages wait for the draft for one timestep.

    Attributes:
        draft_tokens: rows that entered the pipeline as guesses (roots and mask rows are none). Every hit is an accepted one.
        ttft_seconds: time to first token, from submitting the request; queueing and prefill are included. None without a client.
        tpot_seconds: time per output token after the first. None without a client, or if there is only one token.
        e2e_seconds: end-to-end latency, from submitting the request to its completion. None without a client.
        queue_seconds: the part of ``ttft_seconds`` that is not prefill: waiting for a place in the pipeline. None without a
            client.
        cached_tokens: tokens of the prompt that were not computed, because another request's KV cache had them.
        pauses: how often the answer was paused because KV memory ran short.
        resumed_tokens: tokens of the answer that were not decoded, because the request contained them (``Request``).
        recoveries: how often the answer was interrupted because ranks, or Redis, were lost.
    """

    timesteps: int = 0
    hits: int = 0
    misses: int = 0
    draft_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None
    e2e_seconds: float | None = None
    queue_seconds: float | None = None
    cached_tokens: int = 0
    pauses: int = 0
    resumed_tokens: int = 0
    recoveries: int = 0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens / draft tokens; None if nothing was drafted."""
        return self.hits / self.draft_tokens if self.draft_tokens else None


class Completion(Struct, forbid_unknown_fields=True):
    """A finished answer with its metrics.

    Attributes:
        seed: the request's, or the random one that was chosen for it; None for a greedy answer without one.
        logprobs: if requested, per output token {token id: log probability}, the chosen token first, then the most probable
            ones. A token that was forced on a thread has the log probability 0.
        prompt_logprobs: if requested, for each token of the prompt as ``logprobs``; None for the first one.
        threads: the texts of decode threads in document order, their metrics and anomalies; None for an answer in one thread.
            ``token_ids`` and ``text`` are in document order.
    """

    method: str
    stages: int
    prompt_tokens: int
    token_ids: list[int] = []
    text: str = ""
    finish_reason: str | None = None
    metrics: Metrics = struct_field(default_factory=Metrics)
    seed: int | None = None
    logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[dict[int, float] | None] | None = None
    threads: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, object]:
        """The JSON document of ``--json``. Rates are 0 if nothing was decoded after the first token."""
        metrics = self.metrics
        decoded = max(0, len(self.token_ids) - metrics.resumed_tokens - 1)
        verified = metrics.hits + metrics.misses
        return {
            "method": self.method,
            "stages": self.stages,
            "token_ids": self.token_ids,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            **({} if self.logprobs is None else {"logprobs": self.logprobs}),
            **({} if self.threads is None else {"threads": self.threads}),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": metrics.cached_tokens,
            "pauses": metrics.pauses,
            "recoveries": metrics.recoveries,
            "output_tokens": len(self.token_ids),
            "prefill_seconds": metrics.prefill_seconds,
            "decode_seconds": metrics.decode_seconds,
            "ttft_seconds": metrics.ttft_seconds,
            "tpot_seconds": metrics.tpot_seconds,
            "e2e_seconds": metrics.e2e_seconds,
            "queue_seconds": metrics.queue_seconds,
            "tokens_per_second": decoded / metrics.decode_seconds if metrics.decode_seconds > 0 else 0.0,
            "timesteps": metrics.timesteps,
            "timesteps_per_token": metrics.timesteps / decoded if decoded else 0.0,
            "hits": metrics.hits,
            "misses": metrics.misses,
            "hit_rate": metrics.hits / verified if verified else 0.0,
            "draft_tokens": metrics.draft_tokens,
            "acceptance_rate": metrics.acceptance_rate,
        }
