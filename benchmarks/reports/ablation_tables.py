"""The ablations of BiTA as Markdown tables, beside the BiTA paper's results (its Tables 1, 3, 4, 8 and 9).

Owns the paper's numbers. Which answers are compared, ``ablations`` knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import pandas as pd

from benchmarks.reports.ablations import (
    Ablation,
    Value,
    against_baseline,
    by_prompting,
    by_tree,
    fixed_text,
    tree_name,
)
from pipedec.bench.report.figures import provenance
from pipedec.bench.report.frames import PAPER_TREE, NoFigure, at, by_prompt_set, means, prompt_sets
from pipedec.bench.report.style import BASELINE, PROMPT_SETS, markdown_table
from pipedec.bench.sweep.rows import Tree

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
    "Tokens per pass: decoded tokens over passes of the pipeline. Over PP: ratio of TPOT (time per output token). Both over "
    "prompts that all lines and PP answered; means are geometric over prompt sets. Paper: range over its four data sets"
)


def bita_parts(answers: pd.DataFrame, timing: str) -> Iterator[str]:
    """Headings, small print and tables of what the answers contain: BiTA against plain pipelines, by prompting, by tree."""
    pairs = against_baseline(answers)
    if pairs:
        compared = pd.concat([pair.answers for pair in pairs])
        lines = [line for pair in pairs for line in _lines(pair, prompt_sets(compared), str, lambda _: PAPER_SPEEDUP)]
        yield from _part("BiTA against PP", pairs, lines, "cluster", timing)
    yield from _ablation(by_prompting, answers, "BiTA by prompting", str, lambda name: PAPER_PROMPTINGS[name], timing)
    yield from _ablation(by_tree, answers, "BiTA by tree", _tree_label, _paper_of_tree, timing)


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
    fixed = fixed_text(point for one in ablations for point in one.points.values())
    yield f"{provenance(answers, 'line')}. {fixed}. {_ABOUT}."
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


def _paper_of_tree(tree: Tree) -> str:
    return PAPER_TREES.get((tree.shape or "", tree.children or 0), "")


def _tree_label(tree: Tree) -> str:
    return tree_name(tree) if tree.shape == "straightforward" else f"{tree_name(tree)}, k = {tree.children}"
