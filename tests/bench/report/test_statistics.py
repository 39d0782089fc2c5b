"""The statistics of figures and tables: weights, means, speed-ups and intervals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from support.synthetic_sweep import answers, line, stochastic

from pipedec.bench.report.frames import variants
from pipedec.bench.report.statistics import by_prompt_set, interval, means, speedups, spread, totals


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


@pytest.mark.parametrize("changes", [{"groups": 7}, {"preset": "other-14"}, {"stages": 28}])
def test_speedups_need_the_same_pipeline(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert speedups(answers(tmp_path, [line("pp", **changes), line("pipedec")]), "pp").empty


def test_speedups_need_the_same_sampling(tmp_path: Path) -> None:
    longer = line()["sampling"] | {"max_tokens": 128}
    assert speedups(answers(tmp_path, [line("pp", sampling=longer), line("pipedec")]), "pp").empty


@pytest.mark.parametrize("changes", [{"temperature": 1.0}, {"top_k": 5}, {"top_p": 0.5}, {"seed": 7}, {"repeat": 1}])
def test_only_equal_draws_are_compared(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(speedups(answers(tmp_path, [stochastic("pp"), stochastic("pipedec")]), "pp")) == 1
    assert speedups(answers(tmp_path, [stochastic("pp", **changes), stochastic("pipedec")]), "pp").empty


def test_the_spread_is_over_repeats_of_all_prompts(tmp_path: Path) -> None:
    def of(*times: tuple[float, float]) -> tuple[float, float] | None:
        lines = [
            stochastic("stpp", "qa", index, repeat=turn, ms=ms)
            for turn, pair in enumerate(times)
            for index, ms in enumerate(pair)
        ]
        return spread(answers(tmp_path, lines), "tpot_ms")

    assert of((10, 90)) is None, "prompts are no repeats"
    assert of((10, 90), (60, 60), (30, 50)) == (40, 60)


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
