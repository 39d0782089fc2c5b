"""The statistics behind pictures and tables: weights, pairs, means, intervals, and which series are shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from synthetic_sweep import line, rows, stochastic

from pipedec.bench.figure_methods import METHODS, method_looks, method_rank
from pipedec.bench.figure_series import (
    Series,
    all_series,
    chosen_series,
    geometric_mean,
    headline_series,
    interval,
    over_shared_cases,
    provenance,
    speedups,
    spread,
    stage_sweep,
)


def cases(series: Series) -> list[tuple[str, int]]:
    return [(row.prompt_set, row.prompt_index) for row in series.rows]


def test_long_answers_weigh_as_much_as_their_tokens(tmp_path: Path) -> None:
    (series,) = all_series(rows(tmp_path, [line(prompt_index=0, tokens=10, ms=50), line(prompt_index=1, tokens=30, ms=10)]))
    assert series.totals.ms_per_token == pytest.approx((500 + 300) / 40)


def test_means_over_prompt_sets_are_geometric_and_of_hit_rates_plain(tmp_path: Path) -> None:
    lines = [line(prompt_set="qa", ms=40, misses=2), line(prompt_set="rag", ms=90, misses=4)]
    (series,) = all_series(rows(tmp_path, [*lines, line(prompt_set="rag", prompt_index=1, ms=90, misses=4)]))
    assert series.ms_per_token == pytest.approx(60)
    assert series.hit_rate == pytest.approx((0.8 + 0.6) / 2)
    assert series.timesteps_per_token == pytest.approx(geometric_mean([(8 + 2 * 14) / 10, (6 + 4 * 14) / 10]))


def test_a_miss_of_the_papers_policy_loses_as_many_timesteps_as_there_are_groups(tmp_path: Path) -> None:
    found = rows(tmp_path, [line(misses=3, groups=7), line(prompt_index=1, misses=5, groups=7), line(groups=14, misses=0)])
    seven, fourteen = all_series(found)
    assert seven.totals.lost_per_miss == 7
    assert fourteen.totals.lost_per_miss is None


def test_speedups_are_over_the_prompts_that_both_answered(tmp_path: Path) -> None:
    lines = [
        line("pp", "qa", 0, ms=1000), line("pp", "qa", 1, ms=300, tokens=10), line("pp", "qa", 2, ms=100, tokens=30),
        line("pipedec", "qa", 1, ms=50, tokens=10), line("pipedec", "qa", 2, ms=50, tokens=30), line("pipedec", "qa", 3, ms=1),
        line("pp", "rag", 0, ms=100), line("pipedec", "rag", 0, ms=50),
        line("pp", "mt_bench", 0, ms=100), line("pipedec", "mt_bench", 0, ms=50, repeat=1),
    ]  # fmt: skip
    pp, pipedec = all_series(rows(tmp_path, lines))
    # A mean of the prompts' ratios would say 4 for qa; the totals say 150 over 50 ms per token.
    assert speedups(pipedec, [pp, pipedec]) == {"qa": pytest.approx(3), "rag": pytest.approx(2)}
    assert geometric_mean(speedups(pipedec, [pp]).values()) == pytest.approx(6**0.5)


@pytest.mark.parametrize("changes", [{"groups": 7}, {"preset": "other-14"}, {"stages": 28}])
def test_speedups_need_the_same_pipeline(tmp_path: Path, changes: dict[str, Any]) -> None:
    series = all_series(rows(tmp_path, [line("pp", **changes), line("pipedec")]))
    assert speedups(series[1], series) == {}


def test_sampling_is_part_of_the_pair(tmp_path: Path) -> None:
    longer = line()["sampling"] | {"max_tokens": 128}
    pp, pipedec = all_series(rows(tmp_path, [line("pp", sampling=longer), line("pipedec")]))
    assert speedups(pipedec, [pp]) == {}


@pytest.mark.parametrize("changes", [{"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5}, {"seed": 7}, {"repeat": 1}])
def test_only_equal_draws_are_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    pp, pipedec = all_series(rows(tmp_path, [stochastic("pp"), stochastic("pipedec")]))
    assert speedups(pipedec, [pp])
    pp, pipedec = all_series(rows(tmp_path, [stochastic("pp", **changes), stochastic("pipedec")]))
    assert speedups(pipedec, [pp]) == {}


def test_the_spread_is_over_repeats_of_all_prompts(tmp_path: Path) -> None:
    def of(*times: tuple[float, float]) -> tuple[float, float] | None:
        lines = [
            stochastic("stpp", "qa", index, repeat=turn, ms=ms)
            for turn, pair in enumerate(times)
            for index, ms in enumerate(pair)
        ]
        return spread(all_series(rows(tmp_path, lines))[0], lambda totals: totals.ms_per_token)

    assert of((10, 90)) is None, "prompts are no repeats"
    assert of((10, 90), (60, 60), (30, 50)) == (40, 60)


def test_shared_cases_are_those_of_every_series_that_knows_the_set(tmp_path: Path) -> None:
    lines = [
        *(line("pp", "qa", index) for index in range(3)), *(line("stpp", "qa", index) for index in range(1, 4)),
        line("pp", "rag", 5), line("slm", "rag", 6),
    ]  # fmt: skip
    shared = over_shared_cases(all_series(rows(tmp_path, lines)))
    assert [one.method for one in shared] == ["pp", "stpp"]
    assert [cases(one) for one in shared] == [[("qa", 1), ("qa", 2)]] * 2


def test_intervals_are_over_prompts(tmp_path: Path) -> None:
    def of(times: list[float], repeats: int = 1) -> tuple[float, float] | None:
        lines = [line(prompt_index=index, repeat=turn, ms=ms) for index, ms in enumerate(times) for turn in range(repeats)]
        return interval(all_series(rows(tmp_path, lines))[0])

    assert of([50, 60], repeats=3) is None, "repeats are no prompts"
    assert of([50, 50, 50]) == (50, 50)
    few, many = of([40, 50, 60]), of([40, 50, 60] * 10)
    assert few is not None and many is not None
    assert 40 <= few[0] < 50 < few[1] <= 60
    assert many[1] - many[0] < 0.6 * (few[1] - few[0])
    assert of([40, 50, 60]) == few, "the same draws every time"


def test_one_tree_is_chosen_per_method_and_pipeline(tmp_path: Path) -> None:
    lines = [
        *(line("pipedec", prompt_index=index, width=64, ms=1) for index in range(5)), line("pipedec", width=32, ms=50),
        *(line("stpp", prompt_index=index, width=8) for index in range(2)), line("stpp", width=16, ms=1),
        line("other", width=8, ms=50), line("other", width=16, ms=40),
    ]  # fmt: skip
    chosen = {one.method: one.tree.width for one in chosen_series(rows(tmp_path, lines)) if one.tree}
    assert chosen == {"pipedec": 32, "stpp": 8, "other": 16}, "the paper's, else most answers, else the fastest"


def test_the_headline_shows_pipelined_methods_everywhere_and_others_on_the_papers_cluster(tmp_path: Path) -> None:
    lines = [
        line(method, groups=groups, preset=f"paper-{groups}") for method in ("pipedec", "stpp", "pp") for groups in (21, 14, 7)
    ]
    lines += [line("slm", groups=1, preset="slm"), line("pipedec", groups=28), line("pp", groups=28)]
    shown = [(one.method, one.groups) for one in headline_series(rows(tmp_path, lines))]
    assert shown == [("pp", 14), ("stpp", 14), ("slm", 1), ("pipedec", 7), ("pipedec", 14), ("pipedec", 21)]


def test_the_headline_makes_do_with_what_there_is(tmp_path: Path) -> None:
    lines = [line(method, groups=groups) for method in ("pipedec", "pp") for groups in (2, 4)]
    assert [(one.method, one.groups) for one in headline_series(rows(tmp_path, lines))] == [
        ("pp", 4),
        ("pipedec", 2),
        ("pipedec", 4),
    ]


def test_a_stage_sweep_keeps_to_one_preset_or_to_presets_as_they_are(tmp_path: Path) -> None:
    papers = [line(groups=groups, preset=f"paper-{groups}") for groups in (7, 14, 21)]
    names = lambda lines: [one.pipeline.name for one in stage_sweep(all_series(rows(tmp_path, lines)))]  # noqa: E731
    assert names(papers) == ["paper-7", "paper-14", "paper-21"]
    recut = [line(groups=groups, preset="paper-14") for groups in (2, 7, 21)]
    assert names(papers + recut) == ["paper-14, 2 stages", "paper-14, 7 stages", "paper-14", "paper-14, 21 stages"]
    twins = [line(groups=14, preset="fast-14", prompt_index=index) for index in range(3)]
    assert names(papers + twins) == ["paper-7", "fast-14", "paper-21"], "of equal lengths the one with most answers"
    assert stage_sweep([]) == []


def test_the_small_print_tells_emulation_clock_models_and_counts(tmp_path: Path) -> None:
    lines = [line(prompt_index=index) for index in range(3)] + [line("pp")]
    assert provenance(all_series(rows(tmp_path, lines)), "bar") == (
        "Emulated (paper-14), 1 CPU machine, slow motion ×4; llama-3.1-70b in float32; "
        "1–3 prompts and 10–30 decoded tokens per bar"
    )
    assert "computed: times by arithmetic" in provenance(all_series(rows(tmp_path, [line(clock="computed")])))
    own = line(preset=None, machine={"cpu": "a CPU", "cores": 2, "gpu": "NVIDIA H200"}, slow_motion=1.0)
    assert provenance(all_series(rows(tmp_path, [own]))).startswith("Measured on 1 NVIDIA H200 machine, nothing emulated")


def test_methods_keep_order_and_looks() -> None:
    assert sorted(["zeta", "pipedec", "alpha", "pp", "stpp"], key=method_rank) == ["pp", "stpp", "pipedec", "alpha", "zeta"]
    looks = method_looks(["zeta", "pipedec", "al{}pha"])
    assert looks["pipedec"] is METHODS["pipedec"] and METHODS["pipedec-bestfirst"].name(14) == "PipeDec-14 best-first"
    assert looks["al{}pha"].name(7) == "al{}pha-7"
    colors = [look.color for look in (*METHODS.values(), looks["zeta"], looks["al{}pha"])]
    assert len(set(colors)) == len(colors)
