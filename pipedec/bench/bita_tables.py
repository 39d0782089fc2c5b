"""The figures of BiTA as Markdown tables, beside the BiTA paper's (its Tables 1, 3, 4, 8 and 9).

Owns those numbers. Knows rows of one timing (``sweep_rows.studies``); which of them are compared ``bita_rows`` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from pipedec.bench.bita_rows import (
    PAPER_TREE,
    Compared,
    Value,
    against_baseline,
    by_prompting,
    by_tree,
    fixed_text,
    mean,
    tree_name,
)
from pipedec.bench.figure_series import NoFigure, prompt_set_rank, provenance
from pipedec.bench.markdown import markdown_table
from pipedec.bench.sweep_rows import PROMPT_SETS, SweepRow, Tree

# "BiTA: Bi-Directional Tuning for Lossless Acceleration in Large Language Models": lowest and highest speed-up over greedy
# decoding of XSum, MT-Bench, CIP and HumanEval-X; of all models in Table 1, of LLaMA-2-7B in the others.
PAPER_SPEEDUP = "2.10–3.31×"
PAPER_PROMPTINGS = {"none": "1.94–2.12×", "shallow": "2.01–2.31×", "deep": "2.19–2.73×"}
PAPER_TREES = {
    ("straightforward", 1): "1.63–2.06×",
    ("full", 1): "1.81–2.39×",
    ("full", 2): "2.02–2.58×",
    ("full", 3): "1.93–2.29×",
    ("full", 4): "1.50–1.79×",
    PAPER_TREE: "2.19–2.73×",
}
_ABOUT = (
    "Tokens per pass: decoded tokens over passes of the pipeline. Over PP: ratio of ms/token. Both over prompts that all lines "
    "and PP answered; means are geometric over prompt sets. Paper: lowest and highest of its four data sets"
)


def bita_parts(rows: Sequence[SweepRow], timing: str) -> Iterator[str]:
    """Headings, small print and tables of what the rows hold: BiTA against plain pipelines, by prompting, by tree."""
    pairs = against_baseline(rows)
    if pairs:
        lines = [line for pair in pairs for line in _lines(pair, _sets(pairs), str, lambda _: PAPER_SPEEDUP)]
        yield from _part("BiTA against PP", pairs, lines, "cluster", timing)
    yield from _ablation(by_prompting, rows, "BiTA by prompting", str, lambda name: PAPER_PROMPTINGS[name], timing)
    yield from _ablation(by_tree, rows, "BiTA by tree", _tree_label, _paper_of_tree, timing)


def _ablation(
    choose: Callable[[Sequence[SweepRow]], Compared[Value]], rows: Sequence[SweepRow], heading: str,
    name: Callable[[Value], str], paper: Callable[[Value], str], timing: str,
) -> Iterator[str]:  # fmt: skip
    try:
        compared = choose(rows)
    except NoFigure:
        return
    title = heading.split()[-1]
    yield from _part(heading, [compared], _lines(compared, _sets([compared]), name, paper), title, timing)


def _part(
    heading: str, compared: Sequence[Compared[Value]], lines: Iterable[list[str]], first: str, timing: str
) -> Iterator[str]:
    series = [one for each in compared for one in each.series]
    fixed = fixed_text([one for each in compared for one in each.points.values()])
    names = [PROMPT_SETS.get(name, name) for name in _sets(compared)]
    yield f"## {heading}, {timing}"
    yield f"{provenance(series, 'line')}. {fixed}. {_ABOUT}."
    yield markdown_table([first, "figure", *names, "mean", "paper"], lines, left=(0, 1))


def _lines(
    compared: Compared[Value], names: Sequence[str], name: Callable[[Value], str], paper: Callable[[Value], str]
) -> Iterator[list[str]]:
    """Two lines for each series: tokens per pass, and speed-up with the paper's beside it."""
    for value in compared.points:
        passes, ratios = compared.tokens_per_pass(value), compared.speedups(value)
        yield [name(value), "tokens/pass", *_cells(passes, names, "{:.2f}"), ""]
        yield [name(value), "over PP", *_cells(ratios, names, "{:.2f}×"), paper(value)]


def _cells(by_set: dict[str, float], names: Sequence[str], form: str) -> list[str]:
    return [*(form.format(by_set[name]) if name in by_set else "–" for name in names), form.format(mean(by_set))]


def _sets(compared: Iterable[Compared[Value]]) -> list[str]:
    return sorted({name for each in compared for name in each.baseline.sets}, key=prompt_set_rank)


def _paper_of_tree(tree: Tree) -> str:
    return PAPER_TREES.get((tree.shape or "", tree.children or 0), "")


def _tree_label(tree: Tree) -> str:
    return tree_name(tree) if tree.shape == "straightforward" else f"{tree_name(tree)}, k = {tree.children}"
