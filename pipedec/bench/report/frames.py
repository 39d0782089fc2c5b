"""The rows of a sweep as one data frame: an answer per row.

Owns the frame's columns, their order and which answers may appear in one figure. Knows no statistics. Columns: the fields of
``SweepRow``, and

- ``variant``: what decoded the answer, an ordered category; rows are sorted by it, ``prompt_set`` is an ordered category, too;
- ``question``: a number for what was asked, ``case`` one for the question and its sampling, ``draw`` one for repeat and seed.
  Two variants are compared over equal cases.

The index is the order of the rows in their files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pandas as pd
from msgspec.structs import asdict

from pipedec.bench.report.looks import method_rank, prompt_set_rank
from pipedec.bench.sweep.rows import SMALL_MODEL, PipelineColumns, SweepRow, TrainedBita, Tree, read_rows
from pipedec.core import UserError

TIMINGS = ("measured", "computed", "machine")
SAMPLING = ["temperature", "top_k", "top_p"]
_QUESTION = ["prompt_set", "prompt_index", "max_tokens", "ignore_eos"]
_DRAW = ["repeat", "seed"]


class NoFigure(UserError):
    """The rows do not contain what a figure or table needs; the message says what is missing."""


@dataclass(frozen=True)
class Variant:
    """What decoded an answer: a method with one tree (and, of ``bita``, one trained BiTA) on one pipeline."""

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

    Raises:
        UserError: a file is missing or empty, or holds a line that is no row of a sweep.
    """
    answers = pd.DataFrame(map(_record, read_rows(sources)))
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

    A timing without greedy answers is left out: no figure shows stochastic answers alone.

    Raises:
        UserError: the rows are of several pairs, or none is left.
    """
    models = sorted(answers["models"][answers["method"] != SMALL_MODEL].unique())
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


def at(table: Any, variant: Variant) -> Any:
    """The part of a table or column whose index begins with this variant, without that level of the index."""
    return table.xs(variant)


def prompt_sets(answers: pd.DataFrame) -> list[str]:
    """Those of the answers, in order."""
    return list(answers["prompt_set"].cat.remove_unused_categories().cat.categories)


def _record(row: SweepRow) -> dict[str, Any]:
    return {
        **asdict(row),
        **asdict(row.sampling),
        "timing": row.timing,
        "tokens": row.tokens,
        "variant": Variant(row.method, row.pipeline, row.tree, row.bita),
        "models": row.pair.digest or row.pair.target,
        "machine": row.machine,
    }


def _ordered(column: pd.Series, key: Any) -> pd.Categorical:
    return pd.Categorical(column, sorted(column.unique(), key=key), ordered=True)
