"""A finished answer and its counters."""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from msgspec import field as struct_field


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
        resumed_tokens: tokens of the answer that were not decoded, because the request contained them (``TokenizedRequest``).
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
        stop_reason: the stop string or the one of ``stop_token_ids`` that ended the answer, as in vLLM; None for the model's end
            token, and for any ``finish_reason`` but ``stop``.
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
    stop_reason: str | int | None = None

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
            "stop_reason": self.stop_reason,
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
