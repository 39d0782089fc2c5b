"""What is compared in pictures and tables: the answers of one method on one pipeline, and the figures of such a series.

Owns the grouping, the pairing and the statistics. It knows rows (``sweep_rows``) but not how they were read, and draws nothing.
Everywhere: a figure of a prompt set is a ratio of totals (all its milliseconds over all its tokens), so that a long answer weighs
as much as its tokens; figures of several prompt sets are means over the sets, geometric ones for times and speed-ups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import numpy as np

from pipedec.bench.figure_methods import BASELINE, method_rank, pipelined
from pipedec.bench.sweep_rows import PROMPT_SETS, SMALL_MODEL, Pipeline, SweepRow, TrainedBita, Tree
from pipedec.core import UserError

REFERENCE_GROUPS = 14  # the pipeline on which the paper compares methods
REFERENCE_TREE = (32, 16)  # its width and children there
_RESAMPLES = 2000
_FEWEST_PROMPTS = 3


class NoFigure(UserError):
    """The rows do not hold what a picture needs; the message says what is missing."""


@dataclass(frozen=True)
class Totals:
    """Sums over answers. Every figure of a series is a ratio of two of them."""

    decode_ms: float
    tokens: int
    timesteps: int
    hits: int
    misses: int

    @classmethod
    def of(cls, rows: Iterable[SweepRow]) -> Totals:
        figures = [(row.decode_ms, row.tokens, row.timesteps, row.hits, row.misses) for row in rows]
        return cls(*(sum(column) for column in zip(*figures, strict=True)))

    @property
    def ms_per_token(self) -> float:
        return self.decode_ms / self.tokens

    @property
    def timesteps_per_token(self) -> float:
        return self.timesteps / self.tokens

    @property
    def hit_rate(self) -> float | None:
        """Hits over all decoded tokens; None if the method does not count them."""
        judged = self.hits + self.misses
        return self.hits / judged if judged else None

    @property
    def lost_per_miss(self) -> float | None:
        """Timesteps beyond one per hit, per miss: the number of groups if each miss drains the pipeline once."""
        return (self.timesteps - self.hits) / self.misses if self.misses else None


@dataclass(frozen=True)
class Series:
    """All answers of one method with one tree (and, of ``bita``, one trained BiTA) on one pipeline."""

    method: str
    pipeline: Pipeline
    tree: Tree | None
    rows: tuple[SweepRow, ...]
    bita: TrainedBita | None = None

    @property
    def groups(self) -> int:
        return self.pipeline.groups

    @property
    def totals(self) -> Totals:
        return Totals.of(self.rows)

    @property
    def sets(self) -> dict[str, Series]:
        """The series of each prompt set, in the paper's order."""
        names = sorted({row.prompt_set for row in self.rows}, key=prompt_set_rank)
        return {name: replace(self, rows=tuple(row for row in self.rows if row.prompt_set == name)) for name in names}

    @property
    def cases(self) -> set[tuple[object, ...]]:
        return {row.case for row in self.rows}

    @property
    def num_prompts(self) -> int:
        return len({(row.prompt_set, row.prompt_index) for row in self.rows})

    @property
    def num_repeats(self) -> int:
        return len({row.draw for row in self.rows})

    @property
    def ms_per_token(self) -> float:
        """Geometric mean over prompt sets."""
        return geometric_mean(part.totals.ms_per_token for part in self.sets.values())

    @property
    def timesteps_per_token(self) -> float:
        """Geometric mean over prompt sets."""
        return geometric_mean(part.totals.timesteps_per_token for part in self.sets.values())

    @property
    def hit_rate(self) -> float | None:
        """Plain mean over prompt sets."""
        rates = [rate for part in self.sets.values() if (rate := part.totals.hit_rate) is not None]
        return sum(rates) / len(rates) if rates else None

    def only(self, cases: set[tuple[object, ...]]) -> Series:
        """The answers to ``cases``."""
        return replace(self, rows=tuple(row for row in self.rows if row.case in cases))


def prompt_set_rank(name: str) -> tuple[int, str]:
    """Sorts prompt sets: the known ones in their order, then the others by name."""
    return (list(PROMPT_SETS).index(name) if name in PROMPT_SETS else len(PROMPT_SETS)), name


def geometric_mean(values: Iterable[float]) -> float:
    logarithms = [log(value) for value in values]
    return exp(sum(logarithms) / len(logarithms))


def all_series(rows: Iterable[SweepRow]) -> list[Series]:
    """Every method × pipeline × tree × BiTA of ``rows``: by method, then stages, then tree."""
    grouped: dict[tuple[str, Pipeline, Tree | None, TrainedBita | None], list[SweepRow]] = {}
    for row in rows:
        grouped.setdefault((row.method, row.pipeline, row.tree, row.bita), []).append(row)
    series = [
        Series(method, pipeline, tree, tuple(members), bita) for (method, pipeline, tree, bita), members in grouped.items()
    ]  # fmt: skip
    return sorted(series, key=_rank)


def chosen_series(rows: Iterable[SweepRow]) -> list[Series]:
    """One tree per method and pipeline: the paper's where it ran, else the one with most answers, of equals the fastest."""
    best: dict[tuple[str, Pipeline], Series] = {}
    for one in all_series(rows):
        key = (one.method, one.pipeline)
        best[key] = min(best.get(key, one), one, key=_preference)
    return list(best.values())


def headline_series(rows: Iterable[SweepRow]) -> list[Series]:
    """What the paper's comparison shows: pipelined methods on every pipeline, the others on the reference pipeline alone.

    The reference is the pipeline that most other methods ran on; of equals the one with 14 stages, else the longest. Presets
    cut into other numbers of stages are left to ``stage_sweep`` unless nothing else is there.
    """
    series = chosen_series(rows)
    uncut = [one for one in series if not one.pipeline.recut or one.method == SMALL_MODEL] or series
    counts = Counter(one.pipeline for one in uncut if not pipelined(one.method) and one.method != SMALL_MODEL)
    reference = max(counts, key=lambda it: (counts[it], it.groups == REFERENCE_GROUPS, it.groups), default=None)
    return [one for one in uncut if pipelined(one.method) or one.method == SMALL_MODEL or one.pipeline == reference]


def stage_sweep(series: Sequence[Series]) -> list[Series]:
    """The series along which only the number of stages grows: one preset cut anew, or presets as they are.

    Whichever holds more numbers of stages is taken; presets as they are if both hold the same. Of several pipelines with one
    number of stages, the one with most answers is taken.
    """
    presets = sorted({one.pipeline.preset or "" for one in series})
    ways = [[one for one in series if not one.pipeline.recut]]
    ways += [[one for one in series if (one.pipeline.preset or "") == preset] for preset in presets]
    way = max(ways, key=lambda way: len({one.groups for one in way}))
    answers: dict[int, Counter[Pipeline]] = {}
    for one in way:
        answers.setdefault(one.groups, Counter())[one.pipeline] += len(one.rows)
    return [one for one in way if one.pipeline == answers[one.groups].most_common(1)[0][0]]


def over_shared_cases(series: Sequence[Series]) -> list[Series]:
    """The series cut down, in each prompt set, to what all of them that know the set have answered; none without answers."""
    shared: set[tuple[object, ...]] = set()
    for name in {row.prompt_set for one in series for row in one.rows}:
        answered = [one.sets[name].cases for one in series if name in one.sets]
        shared |= set.intersection(*answered)
    cut = [one.only(shared) for one in series]
    return [one for one in cut if one.rows]


def speedups(series: Series, others: Iterable[Series], baseline: str = BASELINE) -> dict[str, float]:
    """How many times faster than ``baseline`` on the same pipeline, by prompt set, over the cases that both answered.

    Empty without such answers. The mean over prompt sets is ``geometric_mean`` of the values.
    """
    base = next((one for one in others if one.method == baseline and one.pipeline == series.pipeline), None)
    if base is None:
        return {}
    shared = base.cases & series.cases
    ours, theirs = series.only(shared).sets, base.only(shared).sets
    return {name: theirs[name].totals.ms_per_token / part.totals.ms_per_token for name, part in ours.items()}


def interval(series: Series) -> tuple[float, float] | None:
    """The 95 % interval of ms per token over prompts, by resampling prompts (bootstrap, always the same draws).

    None for fewer than three prompts.
    """
    prompts: dict[tuple[str, int], list[SweepRow]] = {}
    for row in series.rows:
        prompts.setdefault((row.prompt_set, row.prompt_index), []).append(row)
    if len(prompts) < _FEWEST_PROMPTS:
        return None
    totals = [Totals.of(rows) for rows in prompts.values()]
    figures = np.array([(total.decode_ms, total.tokens) for total in totals])  # [prompts, 2]
    draws = np.random.default_rng(0).integers(len(figures), size=(_RESAMPLES, len(figures)))
    sums = figures[draws].sum(axis=1)  # [resamples, 2]
    low, high = np.quantile(sums[:, 0] / sums[:, 1], (0.025, 0.975))
    return float(low), float(high)


def spread(series: Series, figure: Callable[[Totals], float]) -> tuple[float, float] | None:
    """The lowest and the highest of a figure over repeats, each over all prompts; None for a single repeat."""
    repeats: dict[object, list[SweepRow]] = {}
    for row in series.rows:
        repeats.setdefault(row.draw, []).append(row)
    figures = [figure(Totals.of(rows)) for rows in repeats.values()]
    return (min(figures), max(figures)) if len(figures) > 1 else None


def provenance(series: Sequence[Series], what: str = "method") -> str:
    """Where the figures of a picture come from, in one line of small print; ``what`` is what a series is in that picture."""
    rows = [row for one in series for row in one.rows]
    prompts, tokens = _span(one.num_prompts for one in series), _span(one.totals.tokens for one in series)
    return "; ".join([_origin(rows), *_models(rows), f"{prompts} prompts and {tokens} decoded tokens per {what}"])


def tree_text(series: Iterable[Series]) -> str:
    """The tree of pipelined methods, for small print; empty if they differ."""
    trees = {(one.tree.width, one.tree.children) for one in series if pipelined(one.method) and one.tree}
    return "Tree: width {}, {} children".format(*trees.pop()) if len(trees) == 1 else ""


def _origin(rows: Sequence[SweepRow]) -> str:
    machines = " and ".join(f"1 {name} machine" for name in sorted({row.machine for row in rows}))
    if rows[0].timing == "machine":
        return f"Measured on {machines}, nothing emulated"
    ordered = sorted(rows, key=lambda row: (row.method == SMALL_MODEL, row.pipeline.recut, row.pipeline.groups))
    presets = dict.fromkeys(row.pipeline.preset for row in ordered)
    emulated = f"Emulated ({', '.join(str(preset) for preset in presets)})"
    if rows[0].timing == "computed":
        return f"{emulated}, computed: times by arithmetic"
    factors = {row.slow_motion for row in rows}
    motion = "" if factors == {1.0} else f", slow motion ×{_span(factors)}"
    return f"{emulated}, {machines}{motion}"


def _models(rows: Sequence[SweepRow]) -> list[str]:
    """What is emulated; the small model by itself."""
    large = {f"{row.pipeline.model} in {row.pipeline.dtype}" for row in rows if row.pipeline.model and row.method != SMALL_MODEL}
    small = {f"SLM: {row.pipeline.model}" for row in rows if row.pipeline.model and row.method == SMALL_MODEL}
    return [*sorted(large), *sorted(small)]


def _span(values: Iterable[float]) -> str:
    """One number, or the lowest and the highest."""
    ordered = sorted(set(values))
    return "–".join(f"{value:,.10g}" for value in dict.fromkeys((ordered[0], ordered[-1])))


def _preference(series: Series) -> tuple[bool, int, float]:
    tree = series.tree
    return tree is None or (tree.width, tree.children) != REFERENCE_TREE, -len(series.rows), series.totals.ms_per_token


def _rank(series: Series) -> tuple[object, ...]:
    tree, bita = series.tree or Tree(None, None), series.bita
    sizes = [-1 if size is None else size for size in (tree.width, tree.children, tree.depth, tree.rows)]
    trained = (bita.prompt_tokens, bita.name, bita.digest) if bita else ()
    return method_rank(series.method), series.groups, series.pipeline.name, sizes, tree.shape or "", trained
