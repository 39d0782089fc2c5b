"""Which answers figures and tables show: one tree per method, the headline, a sweep of stages, shared cases."""

from __future__ import annotations

from pathlib import Path

from support.synthetic_sweep import Line, answers, line

from pipedec.bench.report.frames import variants
from pipedec.bench.report.selection import headline, one_tree_each, over_equal_cases, over_shared_cases, stage_sweep


def test_shared_cases_are_those_of_all_variants_with_answers_to_the_set(tmp_path: Path) -> None:
    lines = [
        *(line("pp", "qa", index) for index in range(3)), *(line("stpp", "qa", index) for index in range(1, 4)),
        line("pp", "rag", 5), line("slm", "rag", 6), line("pp", "mt_bench", 7),
    ]  # fmt: skip
    shared = over_shared_cases(answers(tmp_path, lines))
    assert list(shared[["method", "prompt_set", "prompt_index"]].itertuples(index=False, name=None)) == [
        ("pp", "qa", 1), ("pp", "qa", 2), ("pp", "mt_bench", 7), ("stpp", "qa", 1), ("stpp", "qa", 2)
    ]  # fmt: skip
    assert over_equal_cases(answers(tmp_path, lines)).empty, "slm answered nothing that the others did"


def test_one_tree_is_chosen_per_method_and_pipeline(tmp_path: Path) -> None:
    lines = [
        *(line("pipedec", prompt_index=index, width=64, ms=1) for index in range(5)), line("pipedec", width=32, ms=50),
        *(line("stpp", prompt_index=index, width=8) for index in range(2)), line("stpp", width=16, ms=1),
        line("other", width=8, ms=50), line("other", width=16, ms=40),
    ]  # fmt: skip
    chosen = {one.method: one.tree.width for one in variants(one_tree_each(answers(tmp_path, lines))) if one.tree}
    assert chosen == {"pipedec": 32, "stpp": 8, "other": 16}, "the paper's, else most answers, else the fastest"


def test_the_headline_shows_pipelined_methods_everywhere_and_others_on_the_papers_cluster(tmp_path: Path) -> None:
    lines = [
        line(method, groups=groups, preset=f"paper-{groups}") for method in ("pipedec", "stpp", "pp") for groups in (21, 14, 7)
    ]
    lines += [line("slm", groups=1, preset="slm"), line("pipedec", groups=28), line("pp", groups=28)]
    shown = [(one.method, one.groups) for one in variants(headline(answers(tmp_path, lines)))]
    assert shown == [("pp", 14), ("stpp", 14), ("slm", 1), ("pipedec", 7), ("pipedec", 14), ("pipedec", 21)]


def test_the_headline_uses_other_numbers_of_stages_if_there_is_nothing_else(tmp_path: Path) -> None:
    lines = [line(method, groups=groups) for method in ("pipedec", "pp") for groups in (2, 4)]
    shown = [(one.method, one.groups) for one in variants(headline(answers(tmp_path, lines)))]
    assert shown == [("pp", 4), ("pipedec", 2), ("pipedec", 4)]


def test_a_stage_sweep_keeps_to_one_preset_or_to_presets_as_they_are(tmp_path: Path) -> None:
    def names(lines: list[Line]) -> list[str]:
        return [one.pipeline.name for one in variants(stage_sweep(answers(tmp_path, lines)))]

    papers = [line(groups=groups, preset=f"paper-{groups}") for groups in (7, 14, 21)]
    assert names(papers) == ["paper-7", "paper-14", "paper-21"]
    recut = [line(groups=groups, preset="paper-14") for groups in (2, 7, 21)]
    assert names(papers + recut) == ["paper-14, 2 stages", "paper-14, 7 stages", "paper-14", "paper-14, 21 stages"]
    twins = [line(groups=14, preset="fast-14", prompt_index=index) for index in range(3)]
    assert names(papers + twins) == ["paper-7", "fast-14", "paper-21"], "of equal lengths the one with most answers"
    assert stage_sweep(answers(tmp_path, papers).iloc[:0]).empty
