"""A load that one long prompt disturbs: how much longer the other requests take per token while it is prefilled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Annotated

from pipedec.bench.load.benchmark import LoadConfig, MeasuredLoad, Place
from pipedec.bench.load.offered import AtTimes, Conversation, Pattern
from pipedec.bench.load.results import LoadOutcome
from pipedec.bench.options import Positive
from pipedec.bench.record import Row
from pipedec.core import UserError
from pipedec.flags import Help


@dataclass(frozen=True)
class ReplayedLoadConfig(LoadConfig):
    """A load on recorded answers.

    Attributes:
        intruder: each load is offered a second time with this prompt; the row then has the field ``intruder``.

    Raises:
        UserError: as ``LoadConfig``, or the number of other requests is not fixed.
    """

    intruder: Annotated[
        Positive | None, Help("One more prompt of N random tokens arrives when all others have begun.")
    ] = None  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.intruder is not None and self.turns > 1:
            raise UserError("--intruder needs others that are submitted once: leave out --turns")
        if self.intruder is not None and any(pattern.concurrency is None for pattern in self.patterns):
            raise UserError("--intruder needs a fixed number of others: give --concurrency, and no --rate")

    def count(self, pattern: Pattern) -> int:
        """Conversations of a load; with an intruder, those beside it."""
        return super().count(pattern) if self.intruder is None else pattern.concurrency or 1

    @property
    def runs(self) -> int:
        """Answers of all loads."""
        if self.intruder is None:
            return super().runs
        return sum(2 * self.count(pattern) + 1 for pattern in self.patterns) * len(self.policies) * len(self.max_num_seqs)


def disturbed(measured: MeasuredLoad, place: Place, intruder: Conversation) -> Row:
    """Offer the same load once more, with the intruder. Returns the row's field ``intruder``."""
    others = measured.load.conversations
    begun = max(one.events[0][0] for one in measured.outcome.served)
    arrivals = AtTimes([0.0] * len(others) + [begun])
    return disturbance(
        measured.outcome, place.offer(replace(measured.load, conversations=[*others, intruder], arrivals=arrivals))
    )


def disturbance(alone: LoadOutcome, disturbed: LoadOutcome) -> Row:
    """Compare the other requests of ``disturbed`` with the same requests of ``alone``, while the last one is prefilled.

    Returns their time per token in ms, with the last request and without it.
    """
    *others, late = disturbed.served
    window = late.submitted, late.events[0][0]
    during, without = (fmean(_tpot_within(one.events, window) for one in several) for several in (others, alone.served))
    return {
        "prompt_tokens": late.prompt_tokens,
        "ttft_ms": round(1000 * late.ttft, 3),
        "tpot_ms": round(1000 * during, 3),
        "tpot_without_ms": round(1000 * without, 3),
        "ratio": round(during / without, 4),
    }


def disturbance_text(late: Row) -> str:
    """The field ``intruder`` of a row as a sentence."""
    return (
        f"while {late['prompt_tokens']} prompt tokens are prefilled ({late['ttft_ms']:.0f} ms), the others take "
        f"{late['tpot_ms']:.1f} ms per token, {late['ratio']:.2f} × the {late['tpot_without_ms']:.1f} ms without it"
    )


def _tpot_within(events: Sequence[tuple[float, int]], window: tuple[float, float]) -> float:
    """Seconds per token from the last event before a window, or on its edge, to the first one after it."""
    begin, end = window
    first = max((at for at, _ in events if at <= begin), default=begin)
    last = min((at for at, _ in events if at >= end), default=end)
    return (last - first) / max(1, sum(tokens for at, tokens in events if first < at <= last))
