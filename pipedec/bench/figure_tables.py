"""The figures of a sweep as Markdown tables, beside the paper's; and measured beside computed times.

Owns the paper's numbers. Knows rows of one timing (``sweep_rows.studies``); needs no matplotlib.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipedec.bench.bita_rows import shown
from pipedec.bench.bita_tables import bita_parts
from pipedec.bench.figure_methods import BASELINE, method_looks
from pipedec.bench.figure_sampling import greedy_and_stochastic, sampling_text
from pipedec.bench.figure_series import NoFigure, Series, chosen_series, geometric_mean, provenance, speedups, spread
from pipedec.bench.markdown import markdown_table
from pipedec.bench.sweep_rows import PROMPT_SETS, SweepRow, greedy

STATIC = ("stpp", "stpp-tuned")
BASELINES = (BASELINE, *STATIC)


@dataclass(frozen=True)
class PaperSpeedup:
    """A speed-up that the paper reports: the lowest and the highest of its six data sets, and the mean."""

    lowest: float
    highest: float
    mean: float


# "PipeDec: Low-Latency Pipeline-based Inference with Dynamic Speculative Decoding towards Large-scale Models": ranges from the
# abstract and §4.3.2, means from §1. LLaMA 3.1-70B with LLaMA 3.2-1B, greedy; HumanEval, DROP, MMLU, WMT14, TriviaQA, GSM8K.
PAPER_PRESET = "paper-14"
PAPER_METHOD = "pipedec"
PAPER_SPEEDUPS = {BASELINE: PaperSpeedup(4.46, 7.79, 6.17), "stpp": PaperSpeedup(2.2, 2.69, 2.53)}

_ABOUT = (
    "ms/token and timesteps/token of a prompt set: totals over tokens, of all prompts the method answered. Speed-ups: ratios "
    "of ms/token over the prompts that both methods answered on the same pipeline. Means: geometric over prompt sets, plain for "
    "hit rates. The paper's figures are those of its PipeDec-14 on six data sets of its own: the mean, and lowest to highest."
)


def tables(studies: Mapping[str, Sequence[SweepRow]]) -> str:
    """All tables as one Markdown document.

    By timing the means of every method on every pipeline, then prompt set by prompt set each pipeline as its preset has it, all
    of greedy answers; then greedy beside stochastic answers where there are both, and BiTA by itself; at the end measured beside
    computed latency. Of several BiTA the first and the last tables have one.
    """
    parts = [_ABOUT]
    compared_rows = {timing: shown(rows) for timing, rows in studies.items()}
    for timing, rows in compared_rows.items():
        series = sorted(chosen_series(greedy(rows)), key=_place)
        parts += [f"## Means over prompt sets, {timing}", f"{provenance(series)}.", _table(_means(one, series) for one in series)]
        for pipeline in dict.fromkeys(one.pipeline for one in series if not one.pipeline.recut):
            members = [one for one in series if one.pipeline == pipeline]
            lines = [line for one in members for line in (*_sets(one, series), _means(one, series))]
            parts += [f"## {pipeline.name}, {timing}", f"{provenance(members)}.", _table(lines)]
        parts += _stochastic_part(rows, timing)
        parts += bita_parts(greedy(studies[timing]), timing)
    measured = chosen_series(greedy(compared_rows.get("measured", ())))
    compared = [one for one in measured if any(row.computed_ms_per_token for row in one.rows)]
    if compared:
        parts += ["## Measured beside computed latency", _computed_table(compared)]
    return "\n\n".join(parts) + "\n"


def _sets(one: Series, series: Sequence[Series]) -> Iterator[list[str]]:
    """A line for each prompt set of ``one``."""
    ratios = [{} if one.method == baseline else speedups(one, series, baseline) for baseline in BASELINES]
    for name, part in one.sets.items():
        totals = part.totals
        yield [
            one.pipeline.name, _label(one.method), PROMPT_SETS.get(name, name), str(part.num_prompts),
            f"{totals.ms_per_token:.1f}", *(_times(by_set.get(name)) for by_set in ratios), _percent(one, totals.hit_rate),
            f"{totals.timesteps_per_token:.2f}", "",
        ]  # fmt: skip


def _means(one: Series, series: Sequence[Series]) -> list[str]:
    """The line of the means over the prompt sets of ``one``."""
    ratios = [{} if one.method == baseline else speedups(one, series, baseline) for baseline in BASELINES]
    return [
        one.pipeline.name, _label(one.method), "mean", str(one.num_prompts), f"{one.ms_per_token:.1f}",
        *(_times(geometric_mean(by_set.values()) if by_set else None) for by_set in ratios), _percent(one, one.hit_rate),
        f"{one.timesteps_per_token:.2f}", _paper(one),
    ]  # fmt: skip


def _table(lines: Iterable[list[str]]) -> str:
    titles = ["cluster", "method", "prompt set", "prompts", "ms/token", *(f"over {_label(method)}" for method in BASELINES)]
    return markdown_table([*titles, "hit rate", "timesteps/token", "paper, PipeDec-14"], lines, left=(0, 1, 2, 10))


def _stochastic_part(rows: Sequence[SweepRow], timing: str) -> list[str]:
    """Heading, small print and table of the methods that decoded both ways; nothing if none did."""
    try:
        pairs = greedy_and_stochastic(rows)
    except NoFigure:
        return []
    members = [one for pair in pairs for one in pair.ways.values()]
    lines = [
        line
        for pair in pairs
        for way, one in pair.ways.items()
        for line in _way_lines(one, way, [other.ways[way] for other in pairs])
    ]
    titles = ["cluster", "method", "decoding", "prompt set", "prompts", "repeats", "ms/token", "ms/token of repeats"]
    titles += [*(f"over {_label(method)}" for method in STATIC), "hit rate", "hit rate of repeats"]
    about = f"{provenance(members, 'method and decoding')}. {sampling_text(pairs)}. Of repeats: the lowest and the highest."
    return [f"## Greedy beside stochastic decoding, {timing}", about, markdown_table(titles, lines, left=(0, 1, 2, 3))]


def _way_lines(one: Series, way: str, others: Sequence[Series]) -> Iterator[list[str]]:
    """A line for each prompt set of a method decoding one way, and one of the means; ``others`` decoded the same way."""
    ratios = [{} if one.method == baseline else speedups(one, others, baseline) for baseline in STATIC]
    begin = [one.pipeline.name, _label(one.method), way]
    for name, part in one.sets.items():
        yield [
            *begin, PROMPT_SETS.get(name, name), str(part.num_prompts), str(part.num_repeats),
            f"{part.totals.ms_per_token:.1f}", _range(spread(part, lambda totals: totals.ms_per_token), "{:.1f}"),
            *(_times(by_set.get(name)) for by_set in ratios),
            _percent(part, part.totals.hit_rate), _range(spread(part, lambda totals: totals.hit_rate or 0.0), "{:.1%}"),
        ]  # fmt: skip
    yield [
        *begin, "mean", str(one.num_prompts), str(one.num_repeats), f"{one.ms_per_token:.1f}", "",
        *(_times(geometric_mean(by_set.values()) if by_set else None) for by_set in ratios), _percent(one, one.hit_rate), "",
    ]  # fmt: skip


def _computed_table(compared: Sequence[Series]) -> str:
    """Latency measured and by arithmetic, over the rows that have both; the share of timesteps that overran, over timesteps."""
    rows = []
    for one in sorted(compared, key=_place):
        both = [(row, row.computed_ms_per_token) for row in one.rows if row.computed_ms_per_token]
        prompts = {(row.prompt_set, row.prompt_index) for row, _ in both}
        tokens = sum(row.tokens for row, _ in both)
        measured = sum(row.decode_ms for row, _ in both) / tokens
        computed = sum(ms * row.tokens for row, ms in both) / tokens
        told = [row for row, _ in both if row.overran is not None]
        timesteps = sum(row.timesteps for row in told)
        overran = sum((row.overran or 0.0) * row.timesteps for row in told) / timesteps if timesteps else None
        rows.append([
            one.pipeline.name, _label(one.method), str(len(prompts)), f"{measured:.1f}", f"{computed:.1f}",
            f"{measured / computed:.3f}", "–" if overran is None else f"{overran:.1%}",
        ])  # fmt: skip
    titles = ["preset", "method", "prompts", "measured ms/token", "computed ms/token", "measured / computed", "timesteps overrun"]
    return markdown_table(titles, rows, left=(0, 1))


def _paper(series: Series) -> str:
    """What the paper says of this method on this cluster: speed-ups over PP and STPP."""
    if (series.method, series.pipeline.preset, series.pipeline.recut) != (PAPER_METHOD, PAPER_PRESET, False):
        return ""
    told = {_label(baseline): f"{it.mean:g}× ({it.lowest:g}–{it.highest:g}×)" for baseline, it in PAPER_SPEEDUPS.items()}
    return ", ".join(f"{figure} over {baseline}" for baseline, figure in told.items())


def _label(method: str) -> str:
    return method_looks([method])[method].name()


def _place(series: Series) -> tuple[bool, int, str]:
    """Presets as they are before those cut anew; then by length. Within a pipeline methods keep their order."""
    return series.pipeline.recut, series.groups, series.pipeline.name


def _times(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio:.2f}×"


def _range(ends: tuple[float, float] | None, form: str) -> str:
    return "–" if ends is None else "–".join(form.format(end) for end in ends)


def _percent(series: Series, rate: float | None) -> str:
    """A hit rate; a method without a tree has none."""
    return "–" if rate is None or series.tree is None else f"{rate:.1%}"
