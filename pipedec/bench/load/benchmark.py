"""What a load benchmark runs, in which order, and the rows that it writes: one for each method, load and limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Annotated

from pipedec.bench.load.arrivals import AtTimes, Pattern
from pipedec.bench.load.places import Place
from pipedec.bench.load.questions import Conversation
from pipedec.bench.load.served import Goals, Outcome
from pipedec.bench.options import Counts, Positive
from pipedec.bench.policy.study import Policy
from pipedec.bench.progress import SweepProgress
from pipedec.bench.record import Row, header, plain
from pipedec.core import MAX_NUM_SEQS, SamplingParams, UserError
from pipedec.flags import Help, check_fields

SCHEMA = "pipedec.load/1"


@dataclass(frozen=True)
class LoadConfig:
    """What is measured.

    Attributes:
        policies: the methods.
        patterns: the loads; all methods get the same prompts in the same order.
        max_num_seqs: each is measured with every method and load.
        intruder: the row then says how much longer the others took per token while it was prefilled.

    Raises:
        UserError: there is no load, a number is below 1, or an intruder finds no fixed number of others, or conversations.
    """

    policies: tuple[Policy, ...]
    patterns: tuple[Pattern, ...]
    requests: Annotated[Positive | None, Help("Requests of each load (default: 4 × concurrency, or 64).")] = None
    max_num_seqs: Annotated[
        Counts, Help("Maximum number of requests in the pipeline at the same time; with 1, one is answered after the other.")
    ] = (MAX_NUM_SEQS,)
    goals: Goals = Goals()
    intruder: Annotated[
        Positive | None, Help("With --replay: one more prompt of N random tokens arrives when all others have begun.")
    ] = None
    seed: int = 0
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    turns: Annotated[
        Positive,
        Help("Turns of each conversation: the next prompt of the set follows the whole conversation once it is answered."),
    ] = 1

    def __post_init__(self) -> None:
        if not self.patterns:
            raise UserError("no load: give --concurrency N or --rate R")
        check_fields(self)
        if self.intruder is not None and self.turns > 1:
            raise UserError("--intruder needs others that are submitted once: leave out --turns")
        if self.intruder is not None and any(pattern.concurrency is None for pattern in self.patterns):
            raise UserError("--intruder needs a fixed number of others: give --concurrency, and no --rate")

    def count(self, pattern: Pattern) -> int:
        """Conversations of a load; with an intruder, those beside it."""
        if self.intruder is not None and pattern.concurrency is not None:
            return pattern.concurrency
        return self.requests or 4 * (pattern.concurrency or 16)

    @property
    def most(self) -> int:
        return max(map(self.count, self.patterns))

    @property
    def runs(self) -> int:
        """Answers of all loads."""
        each = sum(
            self.count(pattern) * (self.turns if self.intruder is None else 2) + (self.intruder is not None)
            for pattern in self.patterns
        )
        return each * len(self.policies) * len(self.max_num_seqs)


@dataclass(frozen=True)
class Measured:
    """One load by one method: its row, and what the row was made of."""

    row: Row
    outcome: Outcome


def bench_load(
    config: LoadConfig,
    place: Place,
    conversations: Sequence[Conversation],
    progress: SweepProgress,
    intruder: Conversation | None = None,
    on_row: Callable[[Row], None] = lambda row: None,
) -> list[Measured]:
    """Offer every load to ``place``, by every method.

    Args:
        conversations: of the longest load; shorter ones take the first of them.
        intruder: the prompt of ``config.intruder`` tokens.
        on_row: receives each row as soon as it is measured.
    """
    progress.start(config.runs)
    first = header("load", {**plain(config), "clock": place.clock})
    measured = []
    for limit in config.max_num_seqs:
        for pattern in config.patterns:
            for policy in config.policies:
                progress.busy(f"{policy.name}, {pattern.label}")
                one = _one_load(config, place, conversations, progress, intruder, (policy, pattern, limit))
                measured.append(replace(one, row={"schema": SCHEMA, **first, **one.row}))
                on_row(measured[-1].row)
    return measured


def _one_load(
    config: LoadConfig,
    place: Place,
    conversations: Sequence[Conversation],
    progress: SweepProgress,
    intruder: Conversation | None,
    what: tuple[Policy, Pattern, int],
) -> Measured:
    policy, pattern, limit = what
    count = config.count(pattern)
    outcome = place.offer(policy, conversations[:count], pattern.arrivals(count, config.seed), limit, progress.row)
    row: Row = {
        "policy": policy.name, "method": policy.method, "options": policy.limits, "pattern": asdict(pattern),
        "max_num_seqs": limit, "clock": place.clock, "cluster": place.cluster,
        **outcome.figures(pattern.concurrency, config.goals),
        "served": [asdict(one) for one in outcome.served],
    }  # fmt: skip
    if intruder is not None:
        begun = max(one.events[0][0] for one in outcome.served)
        arrivals = AtTimes([0.0] * count + [begun])
        disturbed = place.offer(policy, [*conversations[:count], intruder], arrivals, limit, progress.row)
        row["intruder"] = disturbance(outcome, disturbed)
    return Measured(row, outcome)


def disturbance(alone: Outcome, disturbed: Outcome) -> Row:
    """What the last request of ``disturbed`` costs the others, which are those of ``alone``: their time per token while it is
    prefilled, in ms, and in the same time without it."""
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


def _tpot_within(events: Sequence[tuple[float, int]], window: tuple[float, float]) -> float:
    """Seconds per token from the last event before a window, or on its edge, to the first one after it."""
    begin, end = window
    first = max((at for at, _ in events if at <= begin), default=begin)
    last = min((at for at, _ in events if at >= end), default=end)
    return (last - first) / max(1, sum(tokens for at, tokens in events if first < at <= last))
