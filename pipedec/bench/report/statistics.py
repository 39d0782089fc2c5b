"""The statistics of figures and tables: totals, means over prompt sets, speed-ups, intervals.

Everywhere: a statistic of a prompt set is a ratio of totals (all its milliseconds over all its tokens), so that a long answer
weighs as much as its tokens. Over several prompt sets it is their mean: geometric for times and ratios, arithmetic for hit rates.
Knows the frame of answers (``frames``), not how it was read; draws nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

SETS = ["variant", "prompt_set"]
SUMS = ["decode_ms", "tokens", "timesteps", "hits", "misses"]
_RESAMPLES = 2000
_FEWEST_PROMPTS = 3


def totals(answers: pd.DataFrame, by: str | list[str]) -> pd.DataFrame:
    """Sums over the answers (columns SUMS) of each group, and their ratios; NaN if the group has nothing to divide by.

    ``timesteps_per_miss`` are those beyond one per hit: as many as pipeline groups if each miss drains the pipeline once.
    ``tokens_per_pass`` is for ``bita``, whose passes each begin with a miss.
    """
    table = answers.groupby(by, observed=True)[SUMS].sum()
    table["tpot_ms"] = table["decode_ms"] / table["tokens"]
    table["timesteps_per_token"] = table["timesteps"] / table["tokens"]
    table["hit_rate"] = table["hits"] / (table["hits"] + table["misses"])
    table["timesteps_per_miss"] = (table["timesteps"] - table["hits"]) / table["misses"].replace(0, np.nan)
    table["tokens_per_pass"] = table["tokens"] / table["misses"].clip(lower=1)
    return table


def by_prompt_set(answers: pd.DataFrame, baselines: Sequence[str] = ()) -> pd.DataFrame:
    """``totals`` by variant and prompt set, the number of prompts, and speed-ups in the columns ``over METHOD``."""
    table = totals(answers, SETS)
    table["prompts"] = answers.groupby(SETS, observed=True)["prompt_index"].nunique()
    for baseline in baselines:
        table[f"over {baseline}"] = speedups(answers, baseline)
    return table


def means(table: pd.DataFrame) -> pd.DataFrame:
    """By variant the means of ``by_prompt_set`` over prompt sets; of prompts the sum."""
    groups = table.groupby("variant", observed=True)
    ratios = [
        "tpot_ms",
        "timesteps_per_token",
        "tokens_per_pass",
        *(name for name in table if str(name).startswith("over ")),
    ]
    result = table[ratios].apply(np.log).groupby("variant", observed=True).mean().apply(np.exp)
    result["hit_rate"] = groups["hit_rate"].mean()
    result["prompts"] = groups["prompts"].sum()
    return result


def speedups(answers: pd.DataFrame, baseline: str) -> pd.Series:
    """By variant and prompt set: the TPOT of ``baseline`` on the same pipeline over that of the variant.

    Over the cases that both answered; variants and prompt sets without such cases are absent, and so is the baseline itself.
    """
    is_baseline = answers["method"] == baseline
    base = answers.loc[is_baseline, ["pipeline", "case", "decode_ms", "tokens"]]
    pairs = answers[~is_baseline].merge(base, on=["pipeline", "case"], suffixes=("", "_base"))
    sums = pairs.groupby(SETS, observed=True)[["decode_ms", "tokens", "decode_ms_base", "tokens_base"]].sum()
    return (sums["decode_ms_base"] / sums["tokens_base"]) / (sums["decode_ms"] / sums["tokens"])


def interval(answers: pd.DataFrame) -> tuple[float, float] | None:
    """The 95 % interval of TPOT over prompts, by resampling prompts (bootstrap, always the same draws).

    None for fewer than three prompts.
    """
    prompts = answers.groupby(["prompt_set", "prompt_index"], sort=False, observed=True)[["decode_ms", "tokens"]].sum()
    if len(prompts) < _FEWEST_PROMPTS:
        return None
    draws = np.random.default_rng(0).integers(len(prompts), size=(_RESAMPLES, len(prompts)))
    sums = prompts.to_numpy()[draws].sum(axis=1)  # [resamples, 2]
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return float(low), float(high)


def spread(answers: pd.DataFrame, statistic: str) -> tuple[float, float] | None:
    """The lowest and the highest of a column of ``totals`` over repeats, each over all prompts; None for a single repeat."""
    repeats = totals(answers, "draw")[statistic].fillna(0.0)
    return (float(repeats.min()), float(repeats.max())) if len(repeats) > 1 else None
