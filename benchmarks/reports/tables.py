"""The results of a sweep as Markdown tables, beside the papers'; and measured beside computed times.

Owns the papers' numbers. Needs no matplotlib.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isnan

import pandas as pd

from benchmarks.output import markdown_table
from benchmarks.reports import compared
from benchmarks.reports.compared import Ablation, Value, at, spread
from pipedec.bench.report.figures import provenance
from pipedec.bench.report.frames import (
    PAPER_TREE,
    NoFigure,
    Variant,
    by_prompt_set,
    greedy,
    means,
    one_bita,
    one_tree_each,
    prompt_sets,
    select,
    variants,
)
from pipedec.bench.report.style import BASELINE, PROMPT_SETS, method_looks
from pipedec.bench.sweep.rows import Tree

STATIC = ("stpp", "stpp-tuned")
BASELINES = (BASELINE, *STATIC)


@dataclass(frozen=True)
class PaperSpeedup:
    """A speed-up that the paper reports: lowest and highest of its six data sets, and their mean."""

    lowest: float
    highest: float
    mean: float


# "PipeDec: Low-Latency Pipeline-based Inference with Dynamic Speculative Decoding towards Large-scale Models": ranges from the
# abstract and §4.3.2, means from §1. LLaMA 3.1-70B with LLaMA 3.2-1B, greedy; HumanEval, DROP, MMLU, WMT14, TriviaQA, GSM8K.
PAPER_PRESET = "paper-14"
PAPER_METHOD = "pipedec"
PAPER_SPEEDUPS = {BASELINE: PaperSpeedup(4.46, 7.79, 6.17), "stpp": PaperSpeedup(2.2, 2.69, 2.53)}

_ABOUT = (
    "TPOT is the time per output token. TPOT and timesteps/token of a prompt set: totals over tokens, of all prompts that the "
    "method answered. Speed-ups: ratios of TPOT over the prompts that both methods answered on the same pipeline. Means over "
    "prompt sets: geometric, of hit rates arithmetic. The paper's numbers are those of its PipeDec-14 on its own six data sets: "
    "the mean, and lowest to highest."
)


def tables(studies: Mapping[str, pd.DataFrame]) -> str:
    """All tables as one Markdown document.

    By timing the means of every method on every pipeline, then prompt set by prompt set each pipeline with its preset's number
    of stages, all of greedy answers; then greedy beside stochastic answers if there are both, and the ablations of BiTA; at the
    end measured beside computed latency. Of several BiTA the first and the last tables show one.
    """
    parts = [_ABOUT]
    studied = {timing: one_bita(answers) for timing, answers in studies.items()}
    for timing, answers in studied.items():
        title = "measured, nothing emulated" if timing == "machine" else timing
        parts += _methods_part(one_tree_each(greedy(answers)), title)
        parts += _stochastic_part(answers, title)
        parts += bita_parts(greedy(studies[timing]), title)
    if "measured" in studied:
        parts += _computed_part(one_tree_each(greedy(studied["measured"])))
    return "\n\n".join(parts) + "\n"


def _methods_part(answers: pd.DataFrame, timing: str) -> Iterator[str]:
    table = by_prompt_set(answers, BASELINES)
    mean = means(table)
    ordered = sorted(variants(answers), key=_place)
    mean_lines = {one: _line(one, "mean", at(mean, one), _paper(one)) for one in ordered}
    lines = {one: [*(_line(one, str(name), row) for name, row in at(table, one).iterrows()), mean_lines[one]] for one in ordered}
    yield f"## Means over prompt sets, {timing}"
    yield f"{provenance(answers)}."
    yield _table(mean_lines.values())
    for pipeline in dict.fromkeys(one.pipeline for one in ordered if not one.pipeline.recut):
        members = [one for one in ordered if one.pipeline == pipeline]
        yield f"## {pipeline.name}, {timing}"
        yield f"{provenance(select(answers, members))}."
        yield _table(line for one in members for line in lines[one])


def _line(one: Variant, name: str, results: pd.Series, paper: str = "") -> list[str]:
    return [
        one.pipeline.name, _label(one.method), PROMPT_SETS.get(name, name), f"{results['prompts']:.0f}",
        f"{results['tpot_ms']:.1f}", *(_times(results[f"over {baseline}"]) for baseline in BASELINES),
        _hit_rate(one, results["hit_rate"]), f"{results['timesteps_per_token']:.2f}", paper,
    ]  # fmt: skip


def _table(lines: Iterable[list[str]]) -> str:
    titles = ["cluster", "method", "prompt set", "prompts", "TPOT (ms)", *(f"over {_label(method)}" for method in BASELINES)]
    return markdown_table([*titles, "hit rate", "timesteps/token", "paper, PipeDec-14"], lines, left=(0, 1, 2, 10))


def _stochastic_part(answers: pd.DataFrame, timing: str) -> list[str]:
    """Heading, small print and table of the methods that decoded both ways; nothing if none did."""
    try:
        both = compared.greedy_and_stochastic(answers)
    except NoFigure:
        return []
    lines = {way: _way_lines(found, way) for way, found in both.ways.items()}
    titles = ["cluster", "method", "decoding", "prompt set", "prompts", "repeats", "TPOT (ms)", "TPOT of repeats"]
    titles += [*(f"over {_label(method)}" for method in STATIC), "hit rate", "hit rate of repeats"]
    about = f"{provenance(both.answers, 'method and decoding')}. {both.sampling_text}. Of repeats: the lowest and the highest."
    body = [line for method in both.methods for way in lines for line in lines[way][method]]
    return [f"## Greedy beside stochastic decoding, {timing}", about, markdown_table(titles, body, left=(0, 1, 2, 3))]


def _way_lines(answers: pd.DataFrame, way: str) -> dict[str, list[list[str]]]:
    """Lines of each method: one for each prompt set, and one of the means."""
    table = by_prompt_set(answers, STATIC)
    mean = means(table)
    lines: dict[str, list[list[str]]] = {}
    for one in variants(answers):
        own = select(answers, [one])
        parts = {str(name): (own[own["prompt_set"] == name], results) for name, results in at(table, one).iterrows()}
        for name, (part, results) in {**parts, "mean": (own, at(mean, one))}.items():
            ranges = ("", "") if name == "mean" else (_range(part, "tpot_ms", "{:.1f}"), _range(part, "hit_rate", "{:.1%}"))
            lines.setdefault(one.method, []).append([
                one.pipeline.name, _label(one.method), way, PROMPT_SETS.get(name, name), f"{results['prompts']:.0f}",
                str(part["draw"].nunique()), f"{results['tpot_ms']:.1f}", ranges[0],
                *(_times(results[f"over {baseline}"]) for baseline in STATIC), _hit_rate(one, results["hit_rate"]), ranges[1],
            ])  # fmt: skip
    return lines


def _computed_part(answers: pd.DataFrame) -> list[str]:
    """Latency measured and by arithmetic, over the answers that have both; the share of timesteps that overran."""
    both = answers[answers["computed_ms_per_token"].fillna(0.0) > 0]
    lines = []
    for one in sorted(variants(both), key=_place):
        found = select(both, [one])
        tokens = found["tokens"].sum()
        measured, computed = found["decode_ms"].sum() / tokens, (found["computed_ms_per_token"] * found["tokens"]).sum() / tokens
        known = found[found["overran"].notna()]
        overran = (known["overran"] * known["timesteps"]).sum() / known["timesteps"].sum() if len(known) else None
        lines.append([
            one.pipeline.name, _label(one.method), str(len(found[["prompt_set", "prompt_index"]].drop_duplicates())),
            f"{measured:.1f}", f"{computed:.1f}", f"{measured / computed:.3f}", "–" if overran is None else f"{overran:.1%}",
        ])  # fmt: skip
    titles = ["preset", "method", "prompts", "measured TPOT", "computed TPOT", "measured / computed", "timesteps overrun"]
    return ["## Measured beside computed latency", markdown_table(titles, lines, left=(0, 1))] if lines else []


def _paper(one: Variant) -> str:
    """The figures that the paper reports for this method on this cluster: speed-ups over PP and STPP."""
    if (one.method, one.pipeline.preset, one.pipeline.recut) != (PAPER_METHOD, PAPER_PRESET, False):
        return ""
    ratios = {_label(baseline): f"{it.mean:g}× ({it.lowest:g}–{it.highest:g}×)" for baseline, it in PAPER_SPEEDUPS.items()}
    return ", ".join(f"{ratio} over {baseline}" for baseline, ratio in ratios.items())


def _label(method: str) -> str:
    return method_looks([method])[method].name()


def _place(one: Variant) -> tuple[bool, int, str]:
    """Presets with their own number of stages before others; then by length. Within a pipeline methods keep their order."""
    return one.pipeline.recut, one.groups, one.pipeline.name


def _times(ratio: float) -> str:
    return "–" if isnan(ratio) else f"{ratio:.2f}×"


def _range(answers: pd.DataFrame, column: str, form: str) -> str:
    """The lowest and the highest repeat."""
    ends = spread(answers, column)
    return "–" if ends is None else "–".join(form.format(end) for end in ends)


def _hit_rate(one: Variant, rate: float) -> str:
    """A method without a tree has none."""
    return "–" if isnan(rate) or one.tree is None else f"{rate:.1%}"


# "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models": lowest and highest speed-up over greedy
# decoding of XSum, MT-Bench, CIP and HumanEval-X; of all models in Table 1, of LLaMA-2-7B in the others (3, 4, 8 and 9).
BITA_SPEEDUP = "2.10–3.31×"
BITA_PROMPTINGS = {"none": "1.94–2.12×", "shallow": "2.01–2.31×", "deep": "2.19–2.73×"}
BITA_TREES = {
    ("straightforward", 1): "1.63–2.06×",
    ("full", 1): "1.81–2.39×",
    ("full", 2): "2.02–2.58×",
    ("full", 3): "1.93–2.29×",
    ("full", 4): "1.50–1.79×",
    PAPER_TREE: "2.19–2.73×",
}
_BITA_ABOUT = (
    "Tokens per pass: decoded tokens over passes of the pipeline. Over PP: ratio of TPOT (time per output token). Both over "
    "prompts that all lines and PP answered; means are geometric over prompt sets. Paper: range over its four data sets"
)


def bita_parts(answers: pd.DataFrame, timing: str) -> Iterator[str]:
    """Headings, small print and tables of what the answers contain: BiTA against plain pipelines, by prompting, by tree."""
    pairs = compared.against_baseline(answers)
    if pairs:
        answered = pd.concat([pair.answers for pair in pairs])
        lines = [line for pair in pairs for line in _lines(pair, prompt_sets(answered), str, lambda _: BITA_SPEEDUP)]
        yield from _part("BiTA against PP", pairs, lines, "cluster", timing)
    yield from _ablation(compared.by_prompting, answers, "BiTA by prompting", str, lambda name: BITA_PROMPTINGS[name], timing)

    def label(tree: Tree) -> str:
        return compared.tree_name(tree) if tree.shape == "straightforward" else f"{compared.tree_name(tree)}, k = {tree.children}"

    def paper(tree: Tree) -> str:
        return BITA_TREES.get((tree.shape or "", tree.children or 0), "")

    yield from _ablation(compared.by_tree, answers, "BiTA by tree", label, paper, timing)


def _ablation(
    choose: Callable[[pd.DataFrame], Ablation[Value]], answers: pd.DataFrame, heading: str,
    name: Callable[[Value], str], paper: Callable[[Value], str], timing: str,
) -> Iterator[str]:  # fmt: skip
    try:
        found = choose(answers)
    except NoFigure:
        return
    yield from _part(heading, [found], _lines(found, prompt_sets(found.answers), name, paper), heading.split()[-1], timing)


def _part(
    heading: str, ablations: Sequence[Ablation[Value]], lines: Iterable[list[str]], first: str, timing: str
) -> Iterator[str]:
    answers = pd.concat([one.answers for one in ablations])
    names = [PROMPT_SETS.get(name, name) for name in prompt_sets(answers)]
    yield f"## {heading}, {timing}"
    fixed = compared.fixed_text(point for one in ablations for point in one.points.values())
    yield f"{provenance(answers, 'line')}. {fixed}. {_BITA_ABOUT}."
    yield markdown_table([first, "quantity", *names, "mean", "paper"], lines, left=(0, 1))


def _lines(
    ablation: Ablation[Value], names: Sequence[str], name: Callable[[Value], str], paper: Callable[[Value], str]
) -> Iterator[list[str]]:
    """Two lines for each point: tokens per pass, and speed-up with the paper's beside it."""
    table = by_prompt_set(ablation.answers, [BASELINE])
    mean = means(table)
    for value, point in ablation.points.items():
        for title, column, form, beside in (
            ("tokens/pass", "tokens_per_pass", "{:.2f}", ""), ("over PP", f"over {BASELINE}", "{:.2f}×", paper(value)),
        ):  # fmt: skip
            by_set = at(table[column], point)
            cells = (form.format(by_set[each]) if each in by_set.index else "–" for each in names)
            yield [name(value), title, *cells, form.format(at(mean, point)[column]), beside]
