"""The shared nouns: plain dataclasses that every layer may use.

Nothing here computes. Tensors are only named in annotations, so that a client that never touches a model can import
this module without importing torch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOGPROBS = 20
MAX_VERDICT_TOKENS = 125  # with those of its forecast, and one for every share: it must fit into a message's header
PROPOSERS = ("draft", "ngrams")
SHAPES = ("likeliest", "efficient", "straightforward", "full")  # of BiTA's candidates
LARGEST = sys.float_info.max  # whole numbers of JSON may be larger


class PipedecError(Exception):
    """Something that ends a command with one line and a non-zero exit, never with a traceback."""


class UserError(PipedecError):
    """The user's mistake: the message says in one line what was wrong and what to do."""


class RankLost(PipedecError):
    """A rank died or stopped answering; the message names it."""


class SchedulerLost(PipedecError):
    """Redis refused the connection, refused the password, or died."""


@dataclass(frozen=True)
class SamplingParams:
    """How to decode one request: vLLM's field names, meanings and ranges. By default decoding is greedy.

    Filters apply in the order min_p, top_k, top_p, all after the temperature; tokens equal to the last one kept are kept, too.

    Attributes:
        temperature: 0 takes the likeliest token (the lowest id among equals); above 0 draws from the target's distribution.
        top_k: draw from so many likeliest tokens; 0 or −1 for all.
        top_p: draw from the likeliest tokens that together have this probability.
        min_p: draw from tokens at least so many times as likely as the likeliest.
        seed: the same seed gives the same tokens by every method; None draws one.
        max_tokens: output tokens at most, at least 1.
        stop: texts that end the answer: its text is cut before the first of them, its tokens after the one that completes it.
            One string may be given as it is.
        stop_token_ids: token ids that end the answer besides the model's own end tokens.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output.
        presence_penalty, frequency_penalty: taken from the logits of tokens in the output, once or for each time.
        logit_bias: token id to what is added to its logit, before the penalties.
        logprobs: so many top log-probabilities per output token, and the chosen token's; None for none. They are the
            target's own: before bias, penalties and temperature.
        ignore_eos: go on after the model's end tokens until ``max_tokens``.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = field(default=None, hash=False)
    logprobs: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        bias = self.logit_bias or {}
        for name, is_allowed, allowed in (
            ("temperature", 0 <= self.temperature <= LARGEST, "finite and at least 0"),
            ("top_k", self.top_k >= -1, "at least 1, or 0 or -1 for all tokens"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p <= 1, "between 0 and 1"),
            ("seed", self.seed is None or 0 <= self.seed < 2**64, "at least 0 and below 2**64"),
            ("max_tokens", self.max_tokens >= 1, "at least 1"),
            ("stop", all(self.stop), "texts that are not empty"),
            ("repetition_penalty", 0 < self.repetition_penalty <= LARGEST, "finite and above 0"),
            ("presence_penalty", -2 <= self.presence_penalty <= 2, "between -2 and 2"),
            ("frequency_penalty", -2 <= self.frequency_penalty <= 2, "between -2 and 2"),
            ("logit_bias", all(token >= 0 for token in bias), "of token ids, which are at least 0"),
            ("logit_bias", all(-100 <= value <= 100 for value in bias.values()), "between -100 and 100"),
            ("logprobs", self.logprobs is None or 0 <= self.logprobs <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}"),
        ):
            if not is_allowed:
                raise UserError(f"{name} must be {allowed}, not {str(getattr(self, name))[:100]}")

    @property
    def is_stochastic(self) -> bool:
        return self.temperature > 0

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def is_plainly_greedy(self) -> bool:
        """Whether the likeliest token of the target's own logits is taken, and nothing else matters."""
        return not (self.is_stochastic or self.has_penalties or self.logit_bias)


@dataclass(frozen=True)
class TreeParams:
    """Limits of the prediction tree: rows per timestep (paper's w) and children per row (paper's c).

    None leaves a limit to the method: ``pipedec`` and ``stpp`` take the paper's (see ``with_defaults``), ``pipedec-bestfirst``
    finds its own while it decodes.

    Attributes:
        depth: of trees that enter in one step: their layers below the root; None for 4 (``stpp``), or one layer for each
            trained mask (``bita``).
        shape: of ``bita`` alone: its tree of candidates, of SHAPES.
        rows: of the static tree: keep only so many of its likeliest rows, the root not counted, whatever their layers; None keeps
            layers of ``width`` rows whole. Of ``bita``'s likeliest tree: its rows, masks and all; None for 64.
        forwards: of ``pipedec-bestfirst`` alone: draft forwards per timestep.
        proposers: of ``pipedec-bestfirst`` alone: who may name tokens, of PROPOSERS.
    """

    width: int | None = None
    children: int | None = None
    depth: int | None = None
    rows: int | None = None
    forwards: int | None = None
    proposers: tuple[str, ...] = PROPOSERS
    shape: str = "likeliest"

    def __post_init__(self) -> None:
        for name in ("width", "children", "depth", "rows", "forwards"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"tree {name} must be at least 1, not {value}")
        object.__setattr__(self, "proposers", tuple(self.proposers))
        if not self.proposers or not set(self.proposers) <= set(PROPOSERS):
            raise UserError(f"tree proposers must be some of {', '.join(PROPOSERS)}, not {', '.join(self.proposers) or 'none'}")
        if self.shape not in SHAPES:
            raise UserError(f"tree shape must be one of {', '.join(SHAPES)}, not {self.shape[:100]}")

    def with_defaults(self) -> PaperTree:
        """The limits with the paper's 32 rows and 16 children where none are set."""
        return PaperTree(self.width or 32, self.children or 16, self.depth or 4, self.rows)


@dataclass(frozen=True)
class PaperTree:
    """Limits of the paper's trees, all set (see ``TreeParams``)."""

    width: int
    children: int
    depth: int
    rows: int | None


@dataclass(frozen=True)
class Request:
    """One prompt to answer, already tokenized. ``number`` counts the requests of a run from 0.

    ``threads`` is the dialect in which the model may open decode threads (``Dialect.to_json``); None: it answers in one.
    """

    number: int
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams = SamplingParams()
    method: str = "pipedec-bestfirst"
    tree: TreeParams = TreeParams()
    trace: bool = False
    threads: str | None = None


@dataclass(frozen=True)
class MaskParams:
    """The mask rows of a method (BiTA): ``count`` of them stand in a group, and each names ``named`` tokens."""

    count: int = 0
    named: int = 0


NO_MASKS = MaskParams()


@dataclass
class Step:
    """The rows that enter a stage at one timestep (the paper's data flow df).

    Attributes:
        token_ids: int64 [R]. The m-th mask of a group has the id −m; masks come behind all other rows.
        parents: int64 [R], indices into the receiving rank's PredictionTree (whose rows are in order of entry), −1 for
            a root. A row may name a parent in the same step: its own rows follow the receiver's present rows.
        hidden: [R, E] activations of the previous stage; None on the way into the first stage.
        threads: int64 [R], the decode thread of each row, whose own tree ``parents`` counts in; None: all are in thread 0.
    """

    token_ids: Tensor
    parents: Tensor
    hidden: Tensor | None = None
    threads: Tensor | None = None

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


class Share(NamedTuple):
    """How much of a verdict belongs to a decode thread: so many of its tokens, and so many places of its forecast."""

    thread: int
    tokens: int
    places: int = 0


class Part(NamedTuple):
    """What a verdict says of one decode thread."""

    thread: int
    tokens: tuple[int, ...]
    forecast: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What verification says: the accepted token ids, in order, and why the answer ended (None while it goes on).

    ``finished`` is ``"stop"`` (end token or stop string), ``"length"`` (max_tokens), ``"cancelled"`` or, of an answer in several
    threads, ``"cache_full"``. ``forecast`` is what mask
    rows say of the places behind the last accepted token's: for each place, the nearest first, the likeliest tokens, the best
    first. It is empty where there are no masks. Of an answer in several threads, ``shares`` says whose tokens and places
    these are, thread after thread; it is empty where there is but one.
    """

    tokens: tuple[int, ...]
    finished: str | None = None
    forecast: tuple[tuple[int, ...], ...] = ()
    shares: tuple[Share, ...] = ()

    @classmethod
    def of_parts(cls, parts: list[Part], finished: str | None = None) -> Verdict:
        """What it says of several threads."""
        return cls(
            tuple(token for part in parts for token in part.tokens),
            finished,
            tuple(place for part in parts for place in part.forecast),
            tuple(Share(part.thread, len(part.tokens), len(part.forecast)) for part in parts),
        )

    def parts(self) -> Iterator[Part]:
        """What it says of each thread; without shares, of thread 0."""
        if not self.shares:
            yield Part(0, self.tokens, self.forecast)
        token = place = 0
        for share in self.shares:
            until, beyond = token + share.tokens, place + share.places
            yield Part(share.thread, self.tokens[token:until], self.forecast[place:beyond])
            token, place = until, beyond


@dataclass
class Metrics:
    """Counters of one request. ``timesteps`` = ``hits`` + groups × ``misses`` for the layer-wise method (paper §3.3.4).

    A decoded token is a *hit* when the row that yields it was already in flight at the verdict before it, so that it
    comes one timestep later; it is a *miss* when its row had to enter the empty pipeline. The first token comes from
    prefill and is neither. So ``hits`` + ``misses`` are the decoded tokens but the first.

    With the static tree (``stpp``) every root is such a miss, and each accepted row below it is a hit, whose token comes in
    the same verdict: ``timesteps`` = (groups + 1) × ``misses``, because the draft works one timestep alone.

    Attributes:
        draft_tokens: rows that entered the pipeline as guesses (roots and mask rows are none). Every hit is an accepted one.
        ttft_seconds: time to first token, from submitting the request; queueing and prefill are included. None without a client.
        tpot_seconds: time per output token after the first. None without a client, or if there is only one token.
    """

    timesteps: int = 0
    hits: int = 0
    misses: int = 0
    draft_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    ttft_seconds: float | None = None
    tpot_seconds: float | None = None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted draft tokens / draft tokens; None if nothing was drafted."""
        return self.hits / self.draft_tokens if self.draft_tokens else None


@dataclass
class Completion:
    """A finished answer: what was said, and how the pipeline got there.

    Attributes:
        seed: the request's, or the one that was drawn for it; None for a greedy answer without one.
        logprobs: if asked for, per output token {token id: log-probability}, the chosen token first, then the top ones. A token
            that a thread was given and did not choose has the probability 1.
        threads: of an answer in several decode threads: what each said, in document order, their metrics and anomalies.
            ``token_ids`` and ``text`` are in document order.
    """

    method: str
    stages: int
    prompt_tokens: int
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    seed: int | None = None
    logprobs: list[dict[int, float]] | None = None
    threads: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, object]:
        """The one JSON document of ``--json``. Rates are 0 where nothing was decoded after the first token."""
        metrics = self.metrics
        decoded = max(0, len(self.token_ids) - 1)
        judged = metrics.hits + metrics.misses
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
            "output_tokens": len(self.token_ids),
            "prefill_seconds": metrics.prefill_seconds,
            "decode_seconds": metrics.decode_seconds,
            "ttft_seconds": metrics.ttft_seconds,
            "tpot_seconds": metrics.tpot_seconds,
            "tokens_per_second": decoded / metrics.decode_seconds if metrics.decode_seconds > 0 else 0.0,
            "timesteps": metrics.timesteps,
            "timesteps_per_token": metrics.timesteps / decoded if decoded else 0.0,
            "hits": metrics.hits,
            "misses": metrics.misses,
            "hit_rate": metrics.hits / judged if judged else 0.0,
            "draft_tokens": metrics.draft_tokens,
            "acceptance_rate": metrics.acceptance_rate,
        }
