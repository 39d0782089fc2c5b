"""What a load benchmark runs, in which order, and the rows that it writes: one for each method, load and limit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated

from msgspec.structs import replace

from pipedec.bench.load.arrivals import Pattern
from pipedec.bench.load.places import OfferedLoad, Place
from pipedec.bench.load.policy import Policy
from pipedec.bench.load.questions import Conversation
from pipedec.bench.load.served import Goals, LoadOutcome
from pipedec.bench.options import Counts, Positive
from pipedec.bench.progress import SweepProgress
from pipedec.bench.record import Row, header, plain
from pipedec.core import MAX_NUM_SEQS, SamplingParams, UserError
from pipedec.flags import Help, check_fields
from pipedec.messages import PromptRequest

SCHEMA = "pipedec.load/1"


@dataclass(frozen=True)
class LoadConfig:
    """What is measured.

    Attributes:
        policies: the methods.
        patterns: the loads; all methods get the same prompts in the same order.
        max_num_seqs: each is measured with every method and load.

    Raises:
        UserError: there is no load, or a number is below 1.
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

    def __post_init__(self) -> None:
        if not self.patterns:
            raise UserError("no load: give --concurrency N or --rate R")
        check_fields(self)

    def count(self, pattern: Pattern) -> int:
        """Conversations of a load."""
        return self.requests or 4 * (pattern.concurrency or 16)

    def request(self, raw: bool) -> PromptRequest:
        """A request without a prompt; ``raw`` for prompts without the chat template."""
        sampling = replace(self.sampling, seed=self.seed) if self.sampling.is_stochastic else self.sampling
        return PromptRequest("", raw, "pp", sampling)

    @property
    def most(self) -> int:
        return max(map(self.count, self.patterns))

    @property
    def runs(self) -> int:
        """Answers of all loads."""
        return sum(map(self.count, self.patterns)) * self.turns * len(self.policies) * len(self.max_num_seqs)


@dataclass(frozen=True)
class MeasuredLoad:
    """One load by one method: its row, and what the row was made of."""

    load: OfferedLoad
    outcome: LoadOutcome
    row: Row


def bench_load(
    config: LoadConfig, place: Place, conversations: Sequence[Conversation], progress: SweepProgress
) -> Iterator[MeasuredLoad]:
    """Offer every load to ``place``, by every method.

    Args:
        conversations: of the longest load; shorter ones take the first of them.
    """
    progress.start(config.runs)
    first = {"schema": SCHEMA, **header("load", {**plain(config), "clock": place.clock})}
    for limit in config.max_num_seqs:
        for pattern in config.patterns:
            for policy in config.policies:
                progress.busy(f"{policy.name}, {pattern.label}")
                count = config.count(pattern)
                load = OfferedLoad(policy, conversations[:count], pattern.arrivals(count, config.seed), limit, progress.row)
                outcome = place.offer(load)
                row: Row = {
                    **first, "policy": policy.name, "method": policy.method, "options": policy.limits,
                    "pattern": asdict(pattern), "max_num_seqs": limit, "clock": place.clock, "cluster": place.cluster,
                    **outcome.figures(pattern.concurrency, config.goals),
                    "served": [asdict(one) for one in outcome.served],
                }  # fmt: skip
                yield MeasuredLoad(load, outcome, row)
