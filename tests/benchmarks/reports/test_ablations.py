"""The ablations of BiTA: what must be equal, which of several, over which prompts; and the one BiTA among other methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from support.synthetic_sweep import Line, answers, bita, line

from benchmarks.reports.compared import (
    Ablation,
    against_baseline,
    by_masks,
    by_prompt_tokens,
    by_prompting,
    fixed_text,
)
from pipedec.bench.report.frames import NoFigure, by_prompt_set, means, one_bita

SETS = ("qa", "rag")


def deep(length: int, **changes: Any) -> list[Line]:
    """Answers by a deep prompt of this length, of both sets."""
    return [bita(name, **{"name": f"deep-{length}", "prompt_tokens": length} | changes) for name in SETS]


def pp(**changes: Any) -> list[Line]:
    return [line("pp", name, ms=300.0, misses=10, **changes) for name in SETS]


def prompt_tokens(ablation: Ablation[Any]) -> list[int]:
    return [one.bita.prompt_tokens for one in ablation.points.values() if one.bita]


def test_tokens_per_pass_are_decoded_tokens_over_passes_and_means_geometric(tmp_path: Path) -> None:
    lines = [*deep(1), line("pp", "qa", misses=10, ms=300), line("pp", "qa", 1, misses=10, ms=300), line("pp", "rag", ms=100)]
    lines += [
        bita("qa", tokens=30, misses=10, ms=100.0),
        bita("qa", 1, tokens=10, misses=10, ms=100.0),
        bita("rag", misses=5, ms=50),
    ]
    (ablation,) = against_baseline(answers(tmp_path, lines))
    table = by_prompt_set(ablation.answers, ["pp"])
    found = table.xs(ablation.points["paper-14"])
    assert dict(found["tokens_per_pass"]) == {"qa": 2, "rag": 2}
    assert dict(found["over pp"]) == {"qa": pytest.approx(3), "rag": pytest.approx(2)}
    assert means(table).xs(ablation.points["paper-14"])["over pp"] == pytest.approx(6**0.5)


def test_prompt_tokens_differ_and_nothing_else(tmp_path: Path) -> None:
    lines = [*pp(), *deep(1), *deep(4), *deep(16), *deep(16, depth=2), *deep(4, shape="full"), *deep(8, masks=3, name="three")]
    lines += [*deep(16, prompting="shallow", name="shallow"), *deep(0, prompting="none", name="none"), *deep(32, groups=7)]
    ablation = by_prompt_tokens(answers(tmp_path, lines))
    assert list(ablation.points) == [1, 4, 16]
    assert {one.tree.depth for one in ablation.points.values() if one.tree} == {4}
    assert fixed_text(ablation.points.values()) == "BiTA: 4 masks trained, 4 used, efficient tree, 5 candidates each"


def test_masks_differ_and_nothing_else(tmp_path: Path) -> None:
    lines = [one for depth in (10, 2, 1) for one in deep(16, depth=depth)]
    lines += [*deep(8, depth=3), *deep(16, depth=4, shape="full"), *deep(16, depth=6, groups=7), *deep(16, depth=7, rows=64)]
    assert list(by_masks(answers(tmp_path, [*pp(), *lines])).points) == [1, 2, 10]
    two = [*deep(16), *deep(16, depth=2)]
    for few in ([*deep(16), *pp()], two, [*two, *pp(groups=7)]):
        with pytest.raises(NoFigure, match="everything else being equal, and pp on the same pipeline"):
            by_masks(answers(tmp_path, few))


def test_ways_of_prompting_have_prompts_of_one_length(tmp_path: Path) -> None:
    none = deep(0, prompting="none", name="none")
    lines = [*pp(), *deep(16), *deep(8), *none, *deep(8, prompting="shallow", name="shallow-8")]
    ablation = by_prompting(answers(tmp_path, lines))
    assert list(ablation.points) == ["none", "shallow", "deep"]
    assert prompt_tokens(ablation) == [0, 8, 8]
    two = by_prompting(answers(tmp_path, [*pp(), *deep(64), *deep(16), *deep(8), *none]))
    assert prompt_tokens(two) == [0, 16], "of equals the paper's"


def test_an_ablation_is_over_what_all_of_it_answered(tmp_path: Path) -> None:
    known = {1: (0, 1, 2), 4: (1, 2), 16: (1, 3)}
    lines = [line("pp", "qa", index, ms=300, misses=10) for index in range(4)] + [line("pp", "rag")]
    lines += [
        bita("qa", index, name=str(length), prompt_tokens=length, ms=index + 1) for length in known for index in known[length]
    ]
    ablation = by_prompt_tokens(answers(tmp_path, [*lines, bita("rag", name="1", prompt_tokens=1)]))
    cases = ablation.answers[["method", "prompt_set", "prompt_index"]].itertuples(index=False, name=None)
    assert list(cases) == [("pp", "qa", 1)] + [("bita", "qa", 1)] * 3
    assert list(by_prompt_set(ablation.answers, ["pp"])["over pp"].dropna()) == pytest.approx([150] * 3)
    with pytest.raises(NoFigure, match="no prompt was answered by pp and by all of the 2 BiTA"):
        by_prompt_tokens(answers(tmp_path, [line("pp", index) for index in SETS] + deep(1)[:1] + deep(2)[1:]))


def test_among_other_methods_one_bita_with_one_tree_is_shown(tmp_path: Path) -> None:
    def chosen(*lines: Line) -> set[tuple[object, ...]]:
        found = one_bita(answers(tmp_path, [*pp(), *lines]))
        assert list(found["method"]).count("pp") == 2
        return {(one.bita.name, one.tree.shape, one.tree.depth) for one in found["variant"] if one.bita and one.tree}

    fast = deep(8, ms=1.0)
    papers = [*fast, *deep(16), *deep(16, shape="full", ms=1.0)]
    assert chosen(*papers) == {("deep-16", "efficient", 4)}, "the paper's"
    assert chosen(*papers, *deep(16, shape="likeliest", rows=64)) == {("deep-16", "likeliest", 4)}, "the default tree"
    assert chosen(*fast, *deep(4), bita("qa", 1, name="deep-4", prompt_tokens=4)) == {("deep-4", "efficient", 4)}, "most answers"
    assert chosen(*deep(16, depth=3, ms=40.0), *deep(16, depth=2, ms=30.0)) == {("deep-16", "efficient", 2)}, "the fastest"
    assert chosen() == set()
