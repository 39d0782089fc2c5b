"""What replayed answers show together: figures of a policy, of a prompt set, and beside the rows of a sweep.

Knows neither recordings nor methods. A figure of a prompt set is a ratio of totals; figures over sets are means, geometric ones
for times and speed-ups (as in ``report.statistics``).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, geometric_mean
from typing import Any, TypeVar

from pipedec.bench.policy import LIMITS, Policy, PolicyAnswer, PolicyConfig
from pipedec.bench.policy_losses import Losses
from pipedec.bench.record import Row, header, plain
from pipedec.bench.sweep.config import TUNED
from pipedec.core import SamplingParams, UserError

SCHEMA = "pipedec.policy/1"
_T = TypeVar("_T")
_Key = TypeVar("_Key")


@dataclass(frozen=True)
class Totals:
    """Sums over answers, and their ratios."""

    decode_ms: float
    tokens: int
    timesteps: int
    hits: int
    misses: int

    @property
    def ms_per_token(self) -> float:
        return self.decode_ms / self.tokens

    @property
    def timesteps_per_token(self) -> float:
        return self.timesteps / self.tokens

    @property
    def hit_rate(self) -> float | None:
        """Hits over all decoded tokens; None if the method does not count them."""
        verified = self.hits + self.misses
        return self.hits / verified if verified else None

    @property
    def lost_per_miss(self) -> float | None:
        """Timesteps beyond one per hit, per miss: the number of groups if each miss drains the pipeline once."""
        return (self.timesteps - self.hits) / self.misses if self.misses else None


@dataclass(frozen=True)
class AnswerFigures:
    """Some answers of one policy."""

    totals: Totals
    losses: Losses

    @classmethod
    def of(cls, answers: Iterable[PolicyAnswer]) -> AnswerFigures:
        replayed = [one.replayed for one in answers]
        figures = [(one.decode_ms, one.tokens, one.timesteps, one.hits, one.misses) for one in replayed]
        totals = Totals(*(sum(column) for column in zip(*figures, strict=True)))
        return cls(totals, Losses.total(one.losses for one in replayed))

    @property
    def lost_per_token(self) -> dict[str, float]:
        """Timesteps per decoded token by cause, which add up to all; and ``together``, a share of tokens."""
        return {cause: timesteps / self.totals.tokens for cause, timesteps in asdict(self.losses).items()}


@dataclass(frozen=True)
class PolicyFigures:
    """One policy over all prompt sets."""

    policy: Policy
    overall: AnswerFigures
    sets: dict[str, AnswerFigures]

    @classmethod
    def of(cls, answers: Iterable[PolicyAnswer]) -> list[PolicyFigures]:
        """Those of every policy, in order, without answers of a single token, which cost nothing.

        Raises:
            UserError: no answer has more than one token.
        """
        decoded = [one for one in answers if one.replayed.tokens]
        if not decoded:
            raise UserError("every answer has a single token, so nothing is decoded: use other prompts or more --max-tokens")
        figures = []
        for policy, found in _grouped(decoded, lambda one: one.policy).items():
            by_set = _grouped(found, lambda one: one.prompt.prompt_set)
            sets = {name: AnswerFigures.of(several) for name, several in by_set.items()}
            figures.append(cls(policy, AnswerFigures.of(found), sets))
        return figures

    @property
    def ms_per_token(self) -> float:
        return geometric_mean(one.totals.ms_per_token for one in self.sets.values())

    @property
    def timesteps_per_token(self) -> float:
        return fmean(one.totals.timesteps_per_token for one in self.sets.values())

    @property
    def hit_rate(self) -> float:
        return fmean(one.totals.hit_rate or 0.0 for one in self.sets.values())

    @property
    def lost_per_token(self) -> dict[str, float]:
        """As of a set; what adds up there adds up here to ``timesteps_per_token``."""
        several = [one.lost_per_token for one in self.sets.values()]
        return {cause: fmean(one[cause] for one in several) for cause in several[0]}

    def speedup(self, other: PolicyFigures) -> float:
        """How much less time per token than ``other`` takes."""
        return other.ms_per_token / self.ms_per_token

    def row(self) -> Row:
        """As plain JSON values."""
        return {
            "policy": self.policy.name, "method": self.policy.method, "limits": self.policy.limits,
            "ms_per_token": self.ms_per_token, "timesteps_per_token": self.timesteps_per_token, "hit_rate": self.hit_rate,
            "timesteps_per_miss": self.overall.totals.lost_per_miss, "timesteps_per_token_by_cause": self.lost_per_token,
            "sets": {name: {**asdict(one.totals), "timesteps_by_cause": asdict(one.losses)} for name, one in self.sets.items()},
        }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Milliseconds per token of one policy over the answers that a sweep has, too, with one clock and slow motion."""

    policy: str
    clock: str
    slow_motion: float
    answers: int
    predicted: float
    found: float

    @property
    def ratio(self) -> float:
        return self.predicted / self.found


def document(config: PolicyConfig, figures: Sequence[PolicyFigures], comparisons: Sequence[Comparison]) -> Row:
    """Everything as one JSON document."""
    pipeline = {"preset": config.preset, "cluster": config.shape.cluster}
    described = {**pipeline, **config.origin, "samples": config.samples, "seed": config.seed}
    compared = [{**asdict(one), "ratio": one.ratio} for one in comparisons]
    return {"schema": SCHEMA, **header("policy", described), "policies": [one.row() for one in figures], "check": compared}


def compare(config: PolicyConfig, answers: Iterable[PolicyAnswer], rows: Iterable[Row]) -> list[Comparison]:
    """The answers beside those of ``rows``, a sweep's, that are of the same pipeline, pair, sampling, policy and prompt."""
    pipeline = config.preset, config.shape.cluster, *config.origin.values()
    known = {_case(one, *pipeline): one for one in answers if one.replayed.tokens}
    found = [(known[case], row) for row in rows if (case := _case_of_row(row)) in known]
    groups = _grouped(found, lambda pair: (config.policies.index(pair[0].policy), pair[1]["clock"], pair[1]["slow_motion"]))
    return [_comparison(groups[key]) for key in sorted(groups)]


def _comparison(pairs: Sequence[tuple[PolicyAnswer, Row]]) -> Comparison:
    first, row = pairs[0]
    tokens = sum(one.replayed.tokens for one, _ in pairs)
    predicted, found = sum(one.replayed.decode_ms for one, _ in pairs), sum(row["decode_ms"] for _, row in pairs)
    return Comparison(first.policy.name, row["clock"], row["slow_motion"], len(pairs), predicted / tokens, found / tokens)


def _case(one: PolicyAnswer, *pipeline: Any) -> str:
    """All that must be equal in a sweep's row of the same answer."""
    policy, prompt = one.policy, one.prompt
    lengths = len(prompt.token_ids), len(one.token_ids)
    return json.dumps([*pipeline, policy.method, policy.limits, prompt.prompt_set, prompt.index, *lengths], sort_keys=True)


def _case_of_row(row: Row) -> str:
    method = "stpp" if row["method"] == TUNED else row["method"]
    limits = {name: (row["tree"] or {}).get(name) for name in LIMITS.get(method, ())}
    sampling = {**plain(SamplingParams()), **row["sampling"]}  # rows of earlier versions have fewer parameters
    pipeline = row["preset"], row["cluster"], row["pair"].get("digest"), sampling
    question = row["prompt_set"], row["prompt_index"], row.get("prompt_tokens"), row["output_tokens"]
    return json.dumps([*pipeline, method, limits, *question], sort_keys=True)


def _grouped(values: Iterable[_T], key: Callable[[_T], _Key]) -> dict[_Key, list[_T]]:
    groups: dict[_Key, list[_T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups
