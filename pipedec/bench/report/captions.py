"""The words around a figure: labels of its bars and lines, and the small print under it.

Knows the frame of answers (``frames``); draws nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import pandas as pd

from pipedec.bench.report.frames import Variant
from pipedec.bench.report.looks import method_looks, pipelined, shade
from pipedec.bench.sweep.rows import SMALL_MODEL


def colors(variants: Sequence[Variant]) -> list[str]:
    """A colour for each: the method's, and from light to dark if one method ran on pipelines of several lengths."""
    looks = method_looks(one.method for one in variants)
    lengths = {method: sorted({one.groups for one in variants if one.method == method}) for method in looks}
    return [
        shade(looks[one.method].color, lengths[one.method].index(one.groups), len(lengths[one.method])) for one in variants
    ]  # fmt: skip


def labels(variants: Sequence[Variant]) -> list[str]:
    """A name for each: with the number of stages if pipelined methods ran on several, with the preset if names would be equal."""
    looks = method_looks(one.method for one in variants)
    several = len({one.groups for one in variants if pipelined(one.method)}) > 1
    names = [looks[one.method].name(one.groups if several and pipelined(one.method) else None) for one in variants]
    counts = Counter(names)
    return [f"{name} ({one.pipeline.name})" if counts[name] > 1 else name for name, one in zip(names, variants, strict=True)]


def stages_text(variants: Sequence[Variant]) -> str:
    """The number of stages of those whose label does not contain it."""
    names: dict[int, list[str]] = {}
    for one, label in zip(variants, labels(variants), strict=True):
        if str(one.groups) not in label and one.groups > 1:
            names.setdefault(one.groups, []).append(label)
    return "; ".join(f"{', '.join(several)}: {groups} stages" for groups, several in names.items())


def tree_text(variants: Iterable[Variant]) -> str:
    """The tree of pipelined methods; empty if they differ."""
    trees = {(one.tree.width, one.tree.children) for one in variants if pipelined(one.method) and one.tree}
    return "Tree: width {}, {} children".format(*trees.pop()) if len(trees) == 1 else ""


def provenance(answers: pd.DataFrame, what: str = "method") -> str:
    """Where the figures come from, in one line; ``what`` is what a variant is in that figure.

    Greedy and stochastic answers of a variant are counted each by themselves.
    """
    groups = answers.groupby(["variant", answers["temperature"] == 0], observed=True)
    prompts = groups.apply(lambda found: len(found[["prompt_set", "prompt_index"]].drop_duplicates()))
    counts = f"{_span(prompts)} prompts and {_span(groups['tokens'].sum())} decoded tokens per {what}"
    return "; ".join([_origin(answers), *_models(answers), counts])


def _origin(answers: pd.DataFrame) -> str:
    machines = " and ".join(sorted(answers["machine"].unique()))
    timing = answers["timing"].iloc[0]
    if timing == "machine":
        return f"Measured on {machines}, nothing emulated"
    ordered = sorted(answers["variant"].unique(), key=lambda it: (it.method == SMALL_MODEL, it.pipeline.recut, it.groups))
    emulated = f"Emulated ({', '.join(dict.fromkeys(str(one.pipeline.preset) for one in ordered))})"
    if timing == "computed":
        return f"{emulated}, computed: times by arithmetic"
    factors = answers["slow_motion"].unique()
    motion = "" if set(factors) == {1.0} else f", slow motion ×{_span(factors)}"
    return f"{emulated}, {machines}{motion}"


def _models(answers: pd.DataFrame) -> list[str]:
    """What is emulated; the small model by itself."""
    used = [one for one in answers["variant"].unique() if one.pipeline.model]
    large = {f"{one.pipeline.model} in {one.pipeline.dtype}" for one in used if one.method != SMALL_MODEL}
    small = {f"SLM: {one.pipeline.model}" for one in used if one.method == SMALL_MODEL}
    return [*sorted(large), *sorted(small)]


def _span(values: Iterable[float]) -> str:
    """One number, or the lowest and the highest."""
    ordered = sorted(set(values))
    return "–".join(f"{value:,.10g}" for value in dict.fromkeys((ordered[0], ordered[-1])))
