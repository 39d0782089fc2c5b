"""Statistics of replayed answers: figures by policy and prompt set, and a comparison with the rows of a sweep.

Knows neither recordings nor methods. A figure of a prompt set is a ratio of totals; over prompt sets it is the mean: geometric
for times and speed-ups, arithmetic for the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from math import isnan
from typing import Any

import numpy as np
from pandas import DataFrame, MultiIndex

from pipedec.bench.policy.losses import Losses
from pipedec.bench.policy.study import LIMITS, PolicyAnswer, PolicyConfig
from pipedec.bench.record import Row, header, plain
from pipedec.bench.sweep import TUNED
from pipedec.core import SamplingParams, UserError

SCHEMA = "pipedec.policy/1"
_TOTALS = ["decode_ms", "tokens", "timesteps", "hits", "misses"]
_CAUSES = [field.name for field in fields(Losses)]


@dataclass(frozen=True)
class PolicyFigures:
    """Data frames of all policies, in the order of the answers.

    Attributes:
        totals: by policy and prompt set, decode_ms (emulated), decoded tokens, timesteps, hits, misses, and ms_per_token.
        causes: by policy and prompt set, the fields of ``Losses``.
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
        sets = MultiIndex.from_tuples(
            [(one.policy.name, one.prompt.prompt_set) for one in decoded], names=["policy", "prompt_set"]
        )  # fmt: skip
        totals, causes = (
            DataFrame(rows, sets, names).groupby(level=[0, 1], sort=False).sum()
            for rows, names in (
                ([[getattr(one.replayed, name) for name in _TOTALS] for one in decoded], _TOTALS),
                ([asdict(one.replayed.losses) for one in decoded], _CAUSES),
            )
        )
        totals["ms_per_token"] = totals["decode_ms"] / totals["tokens"]
        ratios = DataFrame({
            "timesteps_per_token": totals["timesteps"] / totals["tokens"],
            "hit_rate": (totals["hits"] / (totals["hits"] + totals["misses"])).fillna(0.0),
        })  # fmt: skip
        means = ratios.groupby(level=0, sort=False).mean()
        means["ms_per_token"] = np.exp(np.log(totals["ms_per_token"]).groupby(level=0, sort=False).mean())
        sums = totals.groupby(level=0, sort=False).sum()
        means["timesteps_per_miss"] = (sums["timesteps"] - sums["hits"]) / sums["misses"].where(sums["misses"] > 0)
        means["speedup"] = means["ms_per_token"].iloc[0] / means["ms_per_token"]
        return cls(totals, causes, means, causes.div(totals["tokens"], axis=0).groupby(level=0, sort=False).mean())


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
    """Compare with ``rows`` of a sweep: answers of equal pipeline, models, sampling, policy and prompt.

    One row per policy and the sweep's clock and slow_motion. Columns: answers, their number; predicted and found, milliseconds
    per token of the replay and the sweep; ratio, predicted / found.
    """
    pipeline = config.preset, config.shape.cluster, *config.origin.values()
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
    totals, causes = (
        frame.loc[[name]].droplevel("policy").to_dict("index") for frame in (figures.totals[_TOTALS], figures.causes)
    )
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
