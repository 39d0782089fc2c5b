"""Statistics of replayed answers: figures by policy and prompt set, and a comparison with the rows of a sweep.

Knows neither recordings nor methods. A figure of a prompt set is a ratio of totals; over prompt sets it is the mean: geometric
for times and speed-ups, arithmetic for the others.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from math import isnan
from typing import Any

import numpy as np
from pandas import Categorical, DataFrame

from benchmarks.policy.replay import Replayed, TimestepLosses
from benchmarks.policy.study import PolicyAnswer, PolicyConfig
from pipedec.bench.load.offered import LIMITS
from pipedec.bench.record import Row, header, plain
from pipedec.bench.report.frames import SUMS, totals
from pipedec.bench.sweep.config import TUNED
from pipedec.core import SamplingParams, UserError

SCHEMA = "pipedec.policy/1"
_SETS = ["policy", "prompt_set"]
_CAUSES = [field.name for field in fields(TimestepLosses)]


@dataclass(frozen=True)
class PolicyFigures:
    """Data frames of all policies, in the order of the answers.

    Attributes:
        totals: by policy and prompt set, as ``report.statistics.totals``; times are emulated.
        causes: by policy and prompt set, the fields of ``TimestepLosses``.
        means: by policy, over prompt sets: ms_per_token, timesteps_per_token, hit_rate, timesteps_per_miss (beyond one per hit;
            NaN without misses) and speedup over the first policy.
        causes_per_token: by policy, over prompt sets: timesteps per decoded token by cause, which add up to
            timesteps_per_token; ``together`` is a share of tokens and not part of the sum.
    """

    totals: DataFrame
    causes: DataFrame
    means: DataFrame
    causes_per_token: DataFrame

    @classmethod
    def of(cls, answers: Iterable[PolicyAnswer]) -> PolicyFigures:
        """The figures of ``answers``; those of a single token are left out, since nothing is decoded.

        Raises:
            UserError: no answer has more than one token.
        """
        decoded = [one for one in answers if one.replayed.tokens]
        if not decoded:
            raise UserError("every answer has a single token, so nothing is decoded: use other prompts or more --max-tokens")
        sums, losses = _frame(decoded, _sums), _frame(decoded, lambda replayed: asdict(replayed.losses))
        table, causes = totals(sums, _SETS), losses.groupby(_SETS, observed=True)[_CAUSES].sum()
        means = (
            table[["timesteps_per_token"]].assign(hit_rate=table["hit_rate"].fillna(0.0)).groupby("policy", observed=True).mean()
        )
        means["ms_per_token"] = np.exp(np.log(table["tpot_ms"]).groupby("policy", observed=True).mean())
        means["timesteps_per_miss"] = totals(sums, "policy")["timesteps_per_miss"]
        means["speedup"] = means["ms_per_token"].iloc[0] / means["ms_per_token"]
        return cls(table, causes, means, causes.div(table["tokens"], axis=0).groupby("policy", observed=True).mean())


def _frame(answers: list[PolicyAnswer], record: Callable[[Replayed], Row]) -> DataFrame:
    """One row per answer; policies and prompt sets in the order of the answers."""
    frame = DataFrame({"policy": one.policy.name, "prompt_set": one.prompt.prompt_set, **record(one.replayed)} for one in answers)
    for key in _SETS:
        frame[key] = Categorical(frame[key], frame[key].unique(), ordered=True)
    return frame


def _sums(replayed: Replayed) -> Row:
    return {name: getattr(replayed, name) for name in SUMS}


def document(config: PolicyConfig, figures: PolicyFigures, comparisons: DataFrame) -> Row:
    """Everything as one JSON document."""
    pipeline = {"preset": config.preset, "cluster": config.shape.cluster}
    described = {**pipeline, **config.origin, "samples": config.samples, "seed": config.seed}
    policies = [
        {"policy": policy.name, "method": policy.method, "limits": policy.limits, **_policy_figures(figures, policy.name)}
        for policy in config.policies
    ]
    return {"schema": SCHEMA, **header("policy", described), "policies": policies, "check": comparisons.to_dict("records")}


def compare(config: PolicyConfig, answers: Iterable[PolicyAnswer], rows: Iterable[Row]) -> DataFrame:
    """Compare with ``rows`` of a sweep under single tasks, whose stages prune at once like those of the replay: answers of equal
    pipeline, models, sampling, policy and prompt.

    One row per policy and the sweep's clock and slow_motion. Columns: answers, their number; predicted and found, milliseconds
    per token of the replay and the sweep; ratio, predicted / found.
    """
    pipeline = config.preset, config.shape.dispatched("tasks").cluster, *config.origin.values()
    known = {_case(one, *pipeline): one for one in answers if one.replayed.tokens}
    pairs = [(known[case], row) for row in rows if (case := _case_of_row(row)) in known]
    names = ["policy", "clock", "slow_motion"]
    found = DataFrame(
        [
            (config.policies.index(one.policy), row["clock"], row["slow_motion"], one.replayed.tokens, one.replayed.decode_ms,
             row["decode_ms"])
            for one, row in pairs
        ],
        columns=[*names, "tokens", "predicted", "found"],
    )  # fmt: skip
    sums = found.assign(answers=1).groupby(names, as_index=False).sum()
    return DataFrame({
        "policy": [config.policies[number].name for number in sums["policy"]],
        **sums[["clock", "slow_motion", "answers"]],
        "predicted": sums["predicted"] / sums["tokens"],
        "found": sums["found"] / sums["tokens"],
        "ratio": sums["predicted"] / sums["found"],
    })  # fmt: skip


def _policy_figures(figures: PolicyFigures, name: str) -> Row:
    """One policy as plain JSON values."""
    means = figures.means.to_dict("index")[name]
    totals, causes = (frame.loc[[name]].droplevel("policy").to_dict("index") for frame in (figures.totals[SUMS], figures.causes))
    return {
        **{mean: means[mean] for mean in ("ms_per_token", "timesteps_per_token", "hit_rate")},
        "timesteps_per_miss": None if isnan(means["timesteps_per_miss"]) else means["timesteps_per_miss"],
        "timesteps_per_token_by_cause": figures.causes_per_token.to_dict("index")[name],
        "sets": {prompt_set: {**totals[prompt_set], "timesteps_by_cause": causes[prompt_set]} for prompt_set in totals},
    }


def _case(one: PolicyAnswer, *pipeline: Any) -> str:
    """Everything that must be equal in a sweep's row of the same answer."""
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
