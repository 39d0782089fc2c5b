"""What became of requests under load, and the figures that are made of it. Knows neither clusters nor methods."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import fmean

from pipedec.bench.record import Row

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True)
class ServedRequest:
    """One request. All times are seconds since the load began.

    Attributes:
        events: by event that brought tokens, its time and their number.
        ended: when it was complete.
        queue_seconds: waiting for a place in the pipeline.
        timesteps: from the first token to the last.
        refused: why it was not answered; None if it was.
        turn: of its conversation, from 1.
        cached_tokens: tokens of the prompt that were not computed, because another request's KV cache had them.
        pauses: how often it was paused because KV memory ran short.
        ttft_timesteps: timesteps of the pipeline from its submission to the first token; None if only rank 0 knows.
    """

    prompt_set: str
    index: int
    prompt_tokens: int
    submitted: float
    events: tuple[tuple[float, int], ...]
    ended: float
    queue_seconds: float = 0.0
    timesteps: int = 0
    hits: int = 0
    misses: int = 0
    draft_tokens: int = 0
    refused: str | None = None
    turn: int = 1
    cached_tokens: int = 0
    pauses: int = 0
    ttft_timesteps: int | None = None

    @property
    def output_tokens(self) -> int:
        return sum(tokens for _, tokens in self.events)

    @property
    def ttft(self) -> float:
        return self.events[0][0] - self.submitted

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None if there is only one."""
        tokens = self.output_tokens
        return (self.events[-1][0] - self.events[0][0]) / (tokens - 1) if tokens > 1 else None

    @property
    def e2e(self) -> float:
        return self.ended - self.submitted

    @property
    def itl(self) -> list[float]:
        """The times between events that bring tokens."""
        return [after - before for (before, _), (after, _) in pairwise(self.events)]

    def meets(self, goals: Goals) -> bool:
        """Whether it was answered within the goals. An answer of one token meets any TPOT."""
        if self.refused is not None or (goals.ttft_ms is not None and 1000 * self.ttft > goals.ttft_ms):
            return False
        return goals.tpot_ms is None or self.tpot is None or 1000 * self.tpot <= goals.tpot_ms


@dataclass(frozen=True)
class Goals:
    """What goodput counts: requests whose times are at most these."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    @property
    def are_given(self) -> bool:
        return self.ttft_ms is not None or self.tpot_ms is not None


@dataclass(frozen=True)
class KVUse:
    """The KV memory of a pipeline during a run.

    Attributes:
        capacity: slots of every rank's pool.
        peak: the most slots that running requests had; shared ones count once.
        mean: over the timesteps.
        slot_bytes: of one slot on all ranks together.
    """

    capacity: int
    peak: int
    mean: float
    slot_bytes: int

    @classmethod
    def of(cls, slots: Sequence[int], capacity: int, slot_bytes: int) -> KVUse:
        """From the slots of running requests by timestep."""
        return cls(capacity, max(slots, default=0), fmean(slots) if slots else 0.0, slot_bytes)

    def figures(self) -> Row:
        return {
            "capacity_slots": self.capacity, "peak_slots": self.peak, "peak_bytes": self.peak * self.slot_bytes,
            "peak_utilisation": round(self.peak / self.capacity, 4), "mean_utilisation": round(self.mean / self.capacity, 4),
        }  # fmt: skip


@dataclass(frozen=True)
class LoadOutcome:
    """A whole run of one method under one load.

    Attributes:
        timesteps: of the pipeline, while any request was in it; None if only its own rank 0 knows.
        rows: that entered it; None likewise.
        own_seconds: rank 0's own work in the timesteps; None likewise.
        fill: by timestep, for each group the requests and their numbers of rows there; empty if not recorded.
        overran: share of the answers' timesteps in which real work took longer than its emulated time.
        kv: None if only the pipeline's own rank 0 knows.
    """

    served: tuple[ServedRequest, ...]
    timesteps: int | None = None
    rows: int | None = None
    own_seconds: float | None = None
    fill: Sequence[Sequence[dict[int, int]]] = field(default=(), repr=False)
    overran: float = 0.0
    kv: KVUse | None = None

    def figures(self, concurrency: int | None, goals: Goals) -> Row:
        """All figures: times in ms, throughput in tokens per second, goodput in requests per second."""
        answered = [one for one in self.served if one.refused is None and one.events]
        tokens, makespan = sum(one.output_tokens for one in answered), self.makespan
        figures: Row = {
            "requests": len(self.served),
            "refused": sum(one.refused is not None for one in self.served),
            "output_tokens": tokens,
            "makespan_s": round(makespan, 6),
            "tokens_per_s": _rounded(tokens / makespan if makespan else None),
            "steady_tokens_per_s": _rounded(steady_throughput(answered, concurrency)),
            "goodput_per_s": _rounded(sum(one.meets(goals) for one in answered) / makespan if goals.are_given else None),
            "timesteps": self.timesteps,
            "rows_per_timestep": _rounded(self.rows / self.timesteps if self.rows and self.timesteps else None),
            "own_ms_per_timestep": _rounded(
                1000 * self.own_seconds / self.timesteps if self.own_seconds and self.timesteps else None
            ),
            "tokens_per_timestep": _rounded(tokens / self.timesteps if self.timesteps else None),
            "overran": round(self.overran, 4),
            "pauses": sum(one.pauses for one in self.served),
            "kv": self.kv.figures() if self.kv else None,
            "turns": self._turns(),
            **_prompt_figures(answered),
        }
        figures["ttft_ms"] = _distribution(one.ttft for one in answered)
        figures["itl_ms"] = _distribution(gap for one in answered for gap in one.itl)
        figures["tpot_ms"] = _distribution(one.tpot for one in answered if one.tpot is not None)
        figures["e2e_ms"] = _distribution(one.e2e for one in answered)
        figures["queue_ms"] = _distribution(one.queue_seconds for one in answered)
        return figures

    def _turns(self) -> list[Row]:
        """By turn of the conversations; empty if each has only one."""
        turns = {
            turn: [one for one in self.served if one.turn == turn and one.events] for turn in {one.turn for one in self.served}
        }
        return [
            {
                "turn": turn, **_prompt_figures(some), "ttft_ms": _distribution(one.ttft for one in some),
                "ttft_timesteps": max((one.ttft_timesteps or 0 for one in some), default=0) or None,
            }
            for turn, some in sorted(turns.items())
            if len(turns) > 1
        ]  # fmt: skip

    @property
    def makespan(self) -> float:
        """Seconds from the first submission to the last end."""
        return max(one.ended for one in self.served) - min(one.submitted for one in self.served)


def steady_throughput(answered: Sequence[ServedRequest], concurrency: int | None) -> float | None:
    """Tokens per second while the load is full; None if it never is.

    With a fixed concurrency the load is full from when as many requests have their first token until the last one is submitted;
    else from the first submission to the last.
    """
    if not answered:
        return None
    begins = sorted(one.events[0][0] for one in answered)
    start = begins[min(concurrency, len(begins)) - 1] if concurrency else min(one.submitted for one in answered)
    end = max(one.submitted for one in answered)
    tokens = sum(count for one in answered for at, count in one.events if start < at <= end)
    return tokens / (end - start) if end > start else None


def _prompt_figures(served: Sequence[ServedRequest]) -> Row:
    """Tokens of all prompts, and how many of them were computed."""
    prompts, cached = sum(one.prompt_tokens for one in served), sum(one.cached_tokens for one in served)
    return {"prompt_tokens": prompts, "cached_tokens": cached, "prefilled_tokens": prompts - cached}


def _distribution(seconds: Iterable[float]) -> Row | None:
    """Mean, percentiles and the largest in ms; None of nothing."""
    ordered = sorted(seconds)
    if not ordered:
        return None
    ranks = {f"p{share}": ordered[min(len(ordered) - 1, len(ordered) * share // 100)] for share in PERCENTILES}
    return {name: round(1000 * value, 3) for name, value in {"mean": fmean(ordered), **ranks, "max": ordered[-1]}.items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
