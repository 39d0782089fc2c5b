"""What replayed answers show together: figures of a policy, of a prompt set, and beside the rows of a sweep.

Knows neither recordings nor methods. A figure of a prompt set is a ratio of totals; figures over sets are means, geometric ones
for times and speed-ups (as in ``figure_series``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from pipedec.bench.figure_series import Totals, geometric_mean
from pipedec.bench.policy import LIMITS, Policy, PolicyAnswer, PolicyConfig
from pipedec.bench.policy_losses import Losses
from pipedec.bench.policy_recording import Origin
from pipedec.bench.record import Row, header
from pipedec.bench.sweep import TUNED
from pipedec.core import SamplingParams, UserError

SCHEMA = "pipedec.policy/1"


@dataclass(frozen=True)
class SetFigures:
    """All answers of one policy to one prompt set."""

    totals: Totals
    losses: Losses

    @classmethod
    def of(cls, answers: Sequence[PolicyAnswer]) -> SetFigures:
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
    sets: dict[str, SetFigures]

    @classmethod
    def of(cls, answers: Iterable[PolicyAnswer]) -> list[PolicyFigures]:
        """Those of every policy, in order, without answers of a single token, which cost nothing.

        Raises:
            UserError: no answer has more than one token.
        """
        grouped: dict[Policy, dict[str, list[PolicyAnswer]]] = {}
        for one in answers:
            if one.replayed.tokens:
                grouped.setdefault(one.policy, {}).setdefault(one.answer.prompt_set, []).append(one)
        if not grouped:
            raise UserError("every answer has a single token: there is nothing to decode; use other prompts or more --max-tokens")
        return [
            cls(policy, {name: SetFigures.of(answered) for name, answered in by_set.items()})
            for policy, by_set in grouped.items()
        ]

    @property
    def ms_per_token(self) -> float:
        return geometric_mean(one.totals.ms_per_token for one in self.sets.values())

    @property
    def timesteps_per_token(self) -> float:
        return _mean(one.totals.timesteps_per_token for one in self.sets.values())

    @property
    def hit_rate(self) -> float:
        return _mean(one.totals.hit_rate or 0.0 for one in self.sets.values())

    @property
    def lost_per_miss(self) -> float | None:
        """Timesteps beyond one per hit, per miss, over all answers."""
        misses = sum(one.totals.misses for one in self.sets.values())
        return sum(one.totals.timesteps - one.totals.hits for one in self.sets.values()) / misses if misses else None

    @property
    def lost_per_token(self) -> dict[str, float]:
        """As of a set; what adds up there adds up here to ``timesteps_per_token``."""
        several = [one.lost_per_token for one in self.sets.values()]
        return {cause: _mean(one[cause] for one in several) for cause in several[0]}

    def speedup(self, other: PolicyFigures) -> float:
        """How much less time per token than ``other`` takes."""
        return other.ms_per_token / self.ms_per_token

    def row(self) -> Row:
        """As plain JSON values."""
        return {
            "policy": self.policy.name, "method": self.policy.method, "limits": self.policy.effective,
            "ms_per_token": self.ms_per_token, "timesteps_per_token": self.timesteps_per_token, "hit_rate": self.hit_rate,
            "timesteps_per_miss": self.lost_per_miss, "timesteps_per_token_by_cause": self.lost_per_token,
            "sets": {name: {**asdict(one.totals), "timesteps_by_cause": asdict(one.losses)} for name, one in self.sets.items()},
        }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Milliseconds per token of one policy over the answers that a sweep has, too, with one clock and slow motion."""

    policy: Policy
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
    origin = config.origin
    described = {
        "preset": config.preset, "cluster": config.shape.cluster, "pair": origin.pair, "sampling": origin.sampling,
        "samples": config.samples, "seed": config.seed,
    }  # fmt: skip
    compared = [{**asdict(one), "policy": one.policy.name, "ratio": one.ratio} for one in comparisons]
    return {"schema": SCHEMA, **header("policy", described), "policies": [one.row() for one in figures], "check": compared}


def compare(config: PolicyConfig, answers: Sequence[PolicyAnswer], rows: Iterable[Row]) -> list[Comparison]:
    """The answers beside those of ``rows``, a sweep's, that are of the same pipeline, pair and sampling.

    Raises:
        UserError: there are none.
    """
    known = {_case(one): one for one in answers if one.replayed.tokens}
    found: dict[tuple[Policy, str, float], list[tuple[PolicyAnswer, Row]]] = {}
    for row in rows:
        one = known.get(_case_of_row(row)) if _has_origin(row, config) else None
        if one is not None:
            found.setdefault((one.policy, row["clock"], row["slow_motion"]), []).append((one, row))
    if not found:
        raise UserError("--check: no row is of these policies, prompts, pipeline, pair and sampling")
    in_order = sorted(found, key=lambda case: (config.policies.index(case[0]), *case[1:]))
    return [_comparison(*case, found[case]) for case in in_order]


def _comparison(policy: Policy, clock: str, slow_motion: float, pairs: Sequence[tuple[PolicyAnswer, Row]]) -> Comparison:
    tokens = sum(one.replayed.tokens for one, _ in pairs)
    predicted = sum(one.replayed.decode_ms for one, _ in pairs) / tokens
    return Comparison(policy, clock, slow_motion, len(pairs), predicted, sum(row["decode_ms"] for _, row in pairs) / tokens)


def _has_origin(row: Row, config: PolicyConfig) -> bool:
    """Whether a sweep's row is of the same pipeline, pair and sampling."""
    origin, defaults = config.origin, Origin.create("", SamplingParams()).sampling
    found = row["preset"], row["cluster"], row["pair"]["digest"], {**defaults, **row["sampling"]}
    return found == (config.preset, config.shape.cluster, origin.pair, origin.sampling)


def _case(one: PolicyAnswer) -> tuple[object, ...]:
    """What must be equal in a sweep's row of the same answer."""
    policy, answer = one.policy, one.answer
    lengths = len(answer.prompt_token_ids), len(answer.token_ids)
    return policy.method, *policy.effective.values(), answer.prompt_set, answer.index, *lengths


def _case_of_row(row: Row) -> tuple[object, ...]:
    method = "stpp" if row["method"] == TUNED else row["method"]
    limits = [(row["tree"] or {}).get(name) for name in LIMITS.get(method, ())]
    values = [tuple(value) if isinstance(value, list) else value for value in limits]
    return method, *values, row["prompt_set"], row["prompt_index"], row["prompt_tokens"], row["output_tokens"]


def _mean(values: Iterable[float]) -> float:
    several = list(values)
    return sum(several) / len(several)
