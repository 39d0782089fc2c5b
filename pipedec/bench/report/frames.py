"""The rows of a sweep as one data frame, an answer per row; its statistics; and the answers that a figure or table shows.

Columns of the frame: the fields of ``SweepRow``, and

- ``variant``: the way to decode, an ordered category; rows are sorted by it, ``prompt_set`` is an ordered category, too;
- ``question``: a number for the question, ``case`` one for the question and its sampling, ``draw`` one for repeat and seed.
  Two variants are compared over equal cases.

The index is the order of the rows in their files. A statistic of a prompt set is a ratio of totals (all its milliseconds over all
its tokens), so that a long answer weighs as much as its tokens. Over several prompt sets it is their mean: geometric for times
and ratios, arithmetic for hit rates.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import pandas as pd
from msgspec.structs import asdict

from pipedec.bench.report.style import method_rank, pipelined, prompt_set_rank
from pipedec.bench.sweep.rows import BITA, PipelineColumns, TrainedBita, Tree, read_rows
from pipedec.core.errors import UserError
from pipedec.methods import BitaOptions

REFERENCE_GROUPS = 14  # the pipeline on which the paper compares methods
REFERENCE_TREE = (32, 16)  # its width and children there
# "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models"
PAPER_PROMPT = ("deep", 16)  # prompting and prompt tokens (§4.1)
PAPER_TREE = ("efficient", 5)  # shape and candidates of each mask

SETS = ["variant", "prompt_set"]
SUMS = ["decode_ms", "tokens", "timesteps", "hits", "misses"]
_RESAMPLES = 2000
_FEWEST_PROMPTS = 3

TIMINGS = ("measured", "computed", "machine")
SAMPLING = ["temperature", "top_k", "top_p"]
_QUESTION = ["prompt_set", "prompt_index", "max_tokens", "ignore_eos"]
_DRAW = ["repeat", "seed"]


class NoFigure(UserError):
    """The rows do not contain what a figure or table needs; the message says what is missing."""


@dataclass(frozen=True)
class Variant:
    """A way to decode: a method with one tree (and, of ``bita``, one trained BiTA) on one pipeline."""

    method: str
    pipeline: PipelineColumns
    tree: Tree | None
    bita: TrainedBita | None = None

    @property
    def groups(self) -> int:
        return self.pipeline.groups

    @property
    def rank(self) -> tuple[object, ...]:
        """Sorts variants: by method, then stages, then tree."""
        tree, bita = self.tree or Tree(), self.bita
        sizes = [-1 if size is None else size for size in (tree.width, tree.children, tree.depth, tree.rows)]
        trained = (bita.prompt_tokens, bita.name, bita.digest) if bita else ()
        return method_rank(self.method), self.groups, self.pipeline.name, sizes, tree.shape or "", trained


def read_answers(sources: Iterable[Path]) -> pd.DataFrame:
    """The answers of several sweeps (directories, or JSONL files) together; of those measured twice, the later one.

    Raises UserError if a file is missing or empty, or holds a line that is no row of a sweep.
    """
    answers = pd.DataFrame(
        {
            **asdict(row),
            **asdict(row.sampling),
            "timing": row.timing,
            "tokens": row.tokens,
            "variant": Variant(row.method, row.pipeline, row.tree, row.bita),
            "models": row.pair.digest or row.pair.target,
            "machine": row.machine,
        }
        for row in read_rows(sources)
    )
    answers["seed"] = answers["seed"].astype("Int64")
    answers["question"] = answers.groupby(_QUESTION).ngroup()
    answers["draw"] = answers.groupby(_DRAW, dropna=False).ngroup()
    answers["case"] = answers.groupby(["question", *SAMPLING, "draw"]).ngroup()
    answers = answers.drop_duplicates(["timing", "models", "variant", "case"], keep="last")
    answers["variant"] = _ordered(answers["variant"], key=lambda variant: variant.rank)
    answers["prompt_set"] = _ordered(answers["prompt_set"], key=prompt_set_rank)
    return answers.sort_values("variant", kind="stable")


def studies(answers: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """The answers that may appear in one figure, by timing: more than one token, decoded by one pair of models.

    A timing without greedy answers is left out: no figure shows stochastic answers alone. Raises UserError if the rows are of
    several pairs, or none is left.
    """
    models = sorted(answers["models"].unique())
    if len(models) > 1:
        raise UserError(f"the rows are of several pairs of models ({', '.join(models)}): plot each pair's rows alone")
    by_timing = {timing: answers[(answers["timing"] == timing) & (answers["tokens"] > 0)] for timing in TIMINGS}
    kept = {timing: found for timing, found in by_timing.items() if len(greedy(found))}
    if not kept:
        raise UserError("no row holds a greedy answer of two tokens or more: sweep with --temperature 0 and --max-tokens above 1")
    return kept


def greedy(answers: pd.DataFrame) -> pd.DataFrame:
    return answers[answers["temperature"] == 0]


def variants(answers: pd.DataFrame) -> list[Variant]:
    """Those of the answers, in order."""
    return list(answers["variant"].unique())


def select(answers: pd.DataFrame, chosen: Iterable[Variant]) -> pd.DataFrame:
    """The answers of some variants."""
    return answers[answers["variant"].isin(list(chosen))]


def count_answers(answers: pd.DataFrame) -> dict[Variant, int]:
    return by_variant(answers["variant"].value_counts())


def by_variant(column: pd.Series) -> dict[Variant, Any]:
    """A column with a value per variant, without missing values."""
    return cast(dict[Variant, Any], column.dropna().to_dict())


def prompt_sets(answers: pd.DataFrame) -> list[str]:
    """Those of the answers, in order."""
    return list(answers["prompt_set"].cat.remove_unused_categories().cat.categories)


def _ordered(column: pd.Series, key: Callable[[Any], Any]) -> pd.Categorical:
    return pd.Categorical(column, sorted(column.unique(), key=key), ordered=True)


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
    ratios = ["tpot_ms", "timesteps_per_token", "tokens_per_pass", *(name for name in table if str(name).startswith("over "))]
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
    """The 95 % interval of TPOT over prompts (bootstrap, always the same draws); None for fewer than three prompts."""
    prompts = answers.groupby(["prompt_set", "prompt_index"], sort=False, observed=True)[["decode_ms", "tokens"]].sum()
    if len(prompts) < _FEWEST_PROMPTS:
        return None
    draws = np.random.default_rng(0).integers(len(prompts), size=(_RESAMPLES, len(prompts)))
    sums = prompts.to_numpy()[draws].sum(axis=1)  # [resamples, 2]
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return float(low), float(high)


def one_tree_each(answers: pd.DataFrame) -> pd.DataFrame:
    """One tree per method and pipeline: the paper's if it ran, else the one with most answers, of equals the fastest."""
    tpot_ms = by_variant(totals(answers, "variant")["tpot_ms"])
    counts = count_answers(answers)

    def preference(variant: Variant) -> tuple[object, ...]:
        tree = variant.tree
        return tree is None or (tree.width, tree.children) != REFERENCE_TREE, -counts[variant], tpot_ms[variant]

    best: dict[tuple[str, PipelineColumns], Variant] = {}
    for variant in sorted(variants(answers), key=preference):
        best.setdefault((variant.method, variant.pipeline), variant)
    return select(answers, best.values())


def one_bita(answers: pd.DataFrame) -> pd.DataFrame:
    """For figures that compare methods: of ``bita`` only the answers by one BiTA with one tree.

    Preferred are the paper's prompt and a tree of the default shape; else the choice with most answers, of equals the fastest.
    """
    choices: dict[tuple[TrainedBita | None, Tree | None], list[Variant]] = {}
    for one in variants(answers):
        if one.method == BITA:
            choices.setdefault((one.bita, one.tree), []).append(one)

    def preference(choice: tuple[TrainedBita | None, Tree | None]) -> tuple[object, ...]:
        found = select(answers, choices[choice]).sort_index()
        return -bita_preference(*choice), -len(found), found["decode_ms"].sum() / found["tokens"].sum(), found.index[0]

    chosen = choices[min(choices, key=preference)] if choices else []
    return answers[(answers["method"] != BITA) | answers["variant"].isin(chosen)]


def headline(answers: pd.DataFrame) -> pd.DataFrame:
    """The answers in the paper's comparison: pipelined methods on every pipeline, the others on the reference pipeline alone.

    The reference is the pipeline that most other methods ran on; of equals the one with 14 stages, else the longest. Presets
    with another number of stages than their own are left to ``stage_sweep``, unless the rows hold nothing else.
    """
    answers = one_tree_each(answers)
    everywhere = variants(answers)
    uncut = [one for one in everywhere if not one.pipeline.recut] or everywhere
    counts = Counter(one.pipeline for one in uncut if not pipelined(one.method))
    reference = max(counts, key=lambda it: (counts[it], it.groups == REFERENCE_GROUPS, it.groups), default=None)
    kept = (one for one in uncut if pipelined(one.method) or one.pipeline == reference)
    return select(answers, kept)


def stage_sweep(answers: pd.DataFrame) -> pd.DataFrame:
    """The pipelines that differ in the number of stages alone: one preset with several numbers, or presets as they are.

    Whichever has more numbers of stages is taken; presets as they are if both have the same. Of several pipelines with one
    number of stages, the one with most answers is taken.
    """
    everywhere = variants(answers)
    presets = sorted({one.pipeline.preset or "" for one in everywhere})
    ways = [[one for one in everywhere if not one.pipeline.recut]]
    ways += [[one for one in everywhere if (one.pipeline.preset or "") == preset] for preset in presets]
    way = max(ways, key=lambda way: len({one.groups for one in way}))
    counts = count_answers(answers)
    per_length: dict[int, Counter[PipelineColumns]] = {}
    for one in way:
        per_length.setdefault(one.groups, Counter())[one.pipeline] += counts[one]
    return select(answers, (one for one in way if one.pipeline == per_length[one.groups].most_common(1)[0][0]))


def over_shared_cases(answers: pd.DataFrame) -> pd.DataFrame:
    """In each prompt set the cases that all variants with answers to the set have answered."""
    num_variants = answers.groupby("prompt_set", observed=True)["variant"].transform("nunique")
    return answers[answers.groupby("case")["variant"].transform("nunique") == num_variants]


def bita_preference(trained: TrainedBita | None, tree: Tree | None) -> int:
    """Higher if closer to the paper's prompt, then to the default shape of tree, then to the paper's tree."""
    has_papers_prompt = trained is not None and (trained.prompting, trained.prompt_tokens) == PAPER_PROMPT
    is_default = tree is not None and tree.shape == BitaOptions().shape
    is_papers = tree is not None and (tree.shape, tree.children) == PAPER_TREE
    return 4 * has_papers_prompt + 2 * is_default + is_papers
