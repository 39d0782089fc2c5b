"""The grid of a load benchmark: one row for each method, load and limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated

from msgspec import structs

from benchmarks.load.offered import Conversation, OfferedLoad, Pattern
from benchmarks.load.replayed import OnReplay
from benchmarks.load.results import Goals, LoadOutcome
from pipedec.bench.options import Counts, Positive
from pipedec.bench.policy import Policy
from pipedec.bench.record import Row, SweepProgress, header, plain
from pipedec.core.errors import UserError
from pipedec.core.limits import MAX_NUM_SEQS
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.flags import Help
from pipedec.messages.request import PromptRequest

SCHEMA = "pipedec.load/1"


@dataclass(frozen=True)
class LoadConfig:
    """All methods get the same prompts in the same order, with every load and limit.

    With ``intruder`` each load is offered a second time, with that prompt; the row then has the field ``intruder``. Raises
    UserError if there is no load, a number is below 1, or the number of an intruder's neighbours is not fixed.
    """

    policies: tuple[Policy, ...]
    patterns: tuple[Pattern, ...]
    requests: Annotated[Positive | None, Help("Requests of each load (default: 4 × concurrency, or 64).")] = None
    max_num_seqs: Annotated[
        Counts, Help("Maximum number of requests in the pipeline at the same time; with 1, one is answered after the other.")
    ] = (MAX_NUM_SEQS,)
    goals: Goals = Goals()
    seed: int = 0
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    turns: Annotated[
        Positive,
        Help("Turns of each conversation: the next prompt of the set follows the whole conversation once it is answered."),
    ] = 1
    intruder: Annotated[
        Positive | None, Help("One more prompt of N random tokens arrives when all others have begun.")
    ] = None  # fmt: skip

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
        return pattern.concurrency or 1 if self.intruder is not None else self.requests or 4 * (pattern.concurrency or 16)

    def request(self, raw: bool) -> PromptRequest:
        """A request without a prompt; ``raw`` for prompts without the chat template."""
        sampling = structs.replace(self.sampling, seed=self.seed) if self.sampling.is_stochastic else self.sampling
        return PromptRequest("", raw, "pp", sampling)

    @property
    def most(self) -> int:
        """Conversations of the longest load."""
        return max(map(self.count, self.patterns))

    @property
    def runs(self) -> int:
        """Answers of all loads."""
        answers = sum(map(self.count, self.patterns)) * self.turns
        if self.intruder is not None:
            answers = 2 * answers + len(self.patterns)
        return answers * len(self.policies) * len(self.max_num_seqs)


@dataclass(frozen=True)
class MeasuredLoad:
    """One load by one method, with its outcome and its row."""

    load: OfferedLoad
    outcome: LoadOutcome
    row: Row


def bench_load(
    config: LoadConfig, place: OnReplay, conversations: Sequence[Conversation], progress: SweepProgress
) -> Iterator[MeasuredLoad]:
    """Offer every load to ``place``, by every method. Shorter loads take the first of ``conversations``."""
    progress.start(config.runs)
    first = {"schema": SCHEMA, **header("load", {**plain(config), "clock": "computed"})}
    for limit, pattern, policy in product(config.max_num_seqs, config.patterns, config.policies):
        progress.busy(f"{policy.name}, {pattern.label}")
        count = config.count(pattern)
        load = OfferedLoad(policy, conversations[:count], pattern.arrivals(count, config.seed), limit, progress.row)
        outcome = place.offer(load)
        row: Row = {
            **first, "policy": policy.name, "method": policy.method, "options": policy.limits,
            "pattern": asdict(pattern), "max_num_seqs": limit, "clock": "computed", "cluster": place.cluster,
            **outcome.figures(pattern.concurrency, config.goals),
            "served": [asdict(one) for one in outcome.served],
        }  # fmt: skip
        yield MeasuredLoad(load, outcome, row)
