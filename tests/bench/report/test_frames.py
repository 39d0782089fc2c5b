"""The frame of answers: its rows, their order, which of them figures and tables show, and statistics."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from support.synthetic_sweep import Line, answers, bita, line, stochastic, write

from pipedec.bench.report.frames import (
    by_prompt_set,
    headline,
    interval,
    means,
    one_tree_each,
    over_shared_cases,
    prompt_sets,
    read_answers,
    speedups,
    stage_sweep,
    studies,
    totals,
    variants,
)
from pipedec.core.errors import UserError


def test_variants_and_prompt_sets_are_in_order(tmp_path: Path) -> None:
    lines = [
        line(method, name, groups=groups) for method in ("pipedec", "pp") for groups in (14, 7) for name in ("own", "rag", "qa")
    ]
    found = answers(tmp_path, [line("pipedec", width=8), *lines])
    assert [(one.method, one.groups, one.tree and one.tree.width) for one in variants(found)] == [
        ("pp", 7, None), ("pp", 14, None), ("pipedec", 7, 32), ("pipedec", 14, 8), ("pipedec", 14, 32)
    ]  # fmt: skip
    assert prompt_sets(found) == ["humaneval", "qa", "rag", "own"]
    renamed = bita(prompt_index=1) | {"bita": bita()["bita"] | {"name": "elsewhere"}}
    assert len(variants(answers(tmp_path, [bita(), renamed]))) == 1, "equal weights"


def test_a_case_is_the_question_its_sampling_and_the_draw(tmp_path: Path) -> None:
    found = answers(tmp_path, [line("pp"), line("pipedec"), stochastic("pp"), stochastic("pp", repeat=1), stochastic("pipedec")])
    assert found["question"].nunique() == 1 and found["case"].nunique() == 3
    assert answers(tmp_path, [line(), stochastic(temperature=0.0, seed=5)])["case"].nunique() == 1, "greedy answers have no seed"


def test_files_and_directories_are_joined_and_the_later_of_two_equal_rows_counts(tmp_path: Path) -> None:
    (tmp_path / "sweep").mkdir()
    write(tmp_path / "sweep" / "rows.jsonl", [line(prompt_index=0, ms=10.0), line(prompt_index=1, ms=10.0)])
    write(tmp_path / "again.jsonl", [line(prompt_index=1, ms=30.0)])
    found = read_answers([tmp_path / "sweep", tmp_path / "again.jsonl"])
    assert list(zip(found["prompt_index"], found["decode_ms"], strict=True)) == [(0, 100.0), (1, 300.0)]


def test_measured_and_computed_rows_are_kept_apart_and_stochastic_ones_need_greedy_ones(tmp_path: Path) -> None:
    lines = [line(), line(clock="computed"), stochastic(prompt_index=2), line(prompt_index=3, tokens=0, misses=0)]
    found = studies(answers(tmp_path, [*lines, stochastic(preset=None)]))
    assert {timing: list(kept["prompt_index"]) for timing, kept in found.items()} == {"measured": [0, 2], "computed": [0]}
    with pytest.raises(UserError, match="no row holds a greedy answer of two tokens or more: sweep with --temperature 0"):
        studies(answers(tmp_path, lines[2:]))


def test_rows_of_several_pairs_are_refused(tmp_path: Path) -> None:
    other = {"target": "elsewhere/target", "draft": None, "digest": "abc"}
    with pytest.raises(UserError, match=r"several pairs of models \(abc, pair/target\)"):
        studies(answers(tmp_path, [line(), line("pp", pair=other)]))


def test_shared_cases_are_those_of_all_variants_with_answers_to_the_set(tmp_path: Path) -> None:
    lines = [
        *(line("pp", "qa", index) for index in range(3)), *(line("stpp", "qa", index) for index in range(1, 4)),
        line("pp", "rag", 5), line("other", "rag", 6), line("pp", "mt_bench", 7),
    ]  # fmt: skip
    shared = over_shared_cases(answers(tmp_path, lines))
    assert list(shared[["method", "prompt_set", "prompt_index"]].itertuples(index=False, name=None)) == [
        ("pp", "qa", 1), ("pp", "qa", 2), ("pp", "mt_bench", 7), ("stpp", "qa", 1), ("stpp", "qa", 2)
    ]  # fmt: skip


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
    lines += [line("pipedec", groups=28), line("pp", groups=28)]
    shown = [(one.method, one.groups) for one in variants(headline(answers(tmp_path, lines)))]
    assert shown == [("pp", 14), ("stpp", 14), ("pipedec", 7), ("pipedec", 14), ("pipedec", 21)]
    recut = [line(method, groups=groups) for method in ("pipedec", "pp") for groups in (2, 4)]
    shown = [(one.method, one.groups) for one in variants(headline(answers(tmp_path, recut)))]
    assert shown == [("pp", 4), ("pipedec", 2), ("pipedec", 4)], "other numbers of stages, if there is nothing else"


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


def only(table: pd.DataFrame) -> pd.Series:
    assert len(table) == 1
    return table.iloc[0]


def test_long_answers_weigh_as_much_as_their_tokens(tmp_path: Path) -> None:
    found = answers(tmp_path, [line(prompt_index=0, tokens=10, ms=50), line(prompt_index=1, tokens=30, ms=10)])
    assert only(totals(found, "variant"))["tpot_ms"] == pytest.approx((500 + 300) / 40)


def test_means_over_prompt_sets_are_geometric_and_of_hit_rates_arithmetic(tmp_path: Path) -> None:
    lines = [line(prompt_set="qa", ms=40, misses=2), line(prompt_set="rag", ms=90, misses=4)]
    found = answers(tmp_path, [*lines, line(prompt_set="rag", prompt_index=1, ms=90, misses=4)])
    mean = only(means(by_prompt_set(found)))
    assert (mean["tpot_ms"], mean["prompts"]) == (pytest.approx(60), 3)
    assert mean["hit_rate"] == pytest.approx((0.8 + 0.6) / 2)
    assert mean["timesteps_per_token"] == pytest.approx(((8 + 2 * 14) / 10 * (6 + 4 * 14) / 10) ** 0.5)


def test_a_miss_of_the_papers_policy_loses_as_many_timesteps_as_there_are_groups(tmp_path: Path) -> None:
    found = answers(tmp_path, [line(misses=3, groups=7), line(prompt_index=1, misses=5, groups=7), line(groups=14, misses=0)])
    seven, fourteen = totals(found, "variant")["timesteps_per_miss"]
    assert seven == 7 and pd.isna(fourteen)


def test_speedups_are_over_the_prompts_that_both_answered(tmp_path: Path) -> None:
    lines = [
        line("pp", "qa", 0, ms=1000), line("pp", "qa", 1, ms=300, tokens=10), line("pp", "qa", 2, ms=100, tokens=30),
        line("pipedec", "qa", 1, ms=50, tokens=10), line("pipedec", "qa", 2, ms=50, tokens=30), line("pipedec", "qa", 3, ms=1),
        line("pp", "rag", 0, ms=100), line("pipedec", "rag", 0, ms=50),
        line("pp", "mt_bench", 0, ms=100), line("pipedec", "mt_bench", 0, ms=50, repeat=1),
    ]  # fmt: skip
    found = answers(tmp_path, lines)
    pipedec = variants(found)[1]
    # A mean of the prompts' ratios would be 4 for qa; the totals are 150 over 50 TPOT.
    expected = {(pipedec, "qa"): pytest.approx(3), (pipedec, "rag"): pytest.approx(2)}
    assert speedups(found, "pp").to_dict() == expected
    assert means(by_prompt_set(found, ["pp"]))["over pp"].dropna().to_dict() == {pipedec: pytest.approx(6**0.5)}


def test_speedups_need_the_same_pipeline_and_sampling(tmp_path: Path) -> None:
    longer = line()["sampling"] | {"max_tokens": 128}
    for changes in ({"groups": 7}, {"preset": "other-14"}, {"stages": 28}, {"sampling": longer}):
        assert speedups(answers(tmp_path, [line("pp", **changes), line("pipedec")]), "pp").empty
    assert len(speedups(answers(tmp_path, [stochastic("pp"), stochastic("pipedec")]), "pp")) == 1
    for changes in ({"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5}, {"seed": 7}, {"repeat": 1}):
        assert speedups(answers(tmp_path, [stochastic("pp", **changes), stochastic("pipedec")]), "pp").empty


def test_intervals_are_over_prompts(tmp_path: Path) -> None:
    def of(times: list[float], repeats: int = 1) -> tuple[float, float] | None:
        lines = [line(prompt_index=index, repeat=turn, ms=ms) for index, ms in enumerate(times) for turn in range(repeats)]
        return interval(answers(tmp_path, lines))

    assert of([50, 60], repeats=3) is None, "repeats are no prompts"
    assert of([50, 50, 50]) == (50, 50)
    few, many = of([40, 50, 60]), of([40, 50, 60] * 10)
    assert few is not None and many is not None
    assert 40 <= few[0] < 50 < few[1] <= 60
    assert many[1] - many[0] < 0.6 * (few[1] - few[0])
    assert of([40, 50, 60]) == few, "the same draws every time"
