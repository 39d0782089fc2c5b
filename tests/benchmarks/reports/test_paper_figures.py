"""The papers' figures of a sweep: the data and labels that are drawn, and the tables of the command."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner
from support.drawn_figures import (
    bars_of,
    check_one_bita,
    check_origin,
    everything,
    legend,
    lines_of,
    note,
    ticks,
)  # fmt: skip
from support.synthetic_sweep import answers, bita, line, stochastic, write

from benchmarks.reports.__main__ import FIGURES, reports
from benchmarks.reports.figures import (
    accuracy_figure,
    misses_figure,
    prompt_tokens_figure,
    stochastic_figure,
    tree_figure,
)
from pipedec.bench.report.figures import FIGURES as SWEEP_FIGURES
from pipedec.bench.report.frames import NoFigure
from pipedec.bench.report.style import PROMPT_SETS

pytest.importorskip("matplotlib")

OWN = [name for name in FIGURES if name not in SWEEP_FIGURES]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return answers(tmp_path_factory.mktemp("sweep"), everything())


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", OWN)
def test_every_figure_names_the_origin_of_its_data_and_shows_greedy_answers_alone(sweep: pd.DataFrame, name: str) -> None:
    check_origin(FIGURES[name], sweep, shows_greedy_alone=name != "stochastic")


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", ["accuracy", "stochastic"])
def test_figures_that_compare_methods_show_one_bita_with_one_tree(tmp_path: Path, name: str) -> None:
    check_one_bita(FIGURES[name], tmp_path)


def test_accuracy_goes_round_the_prompt_sets(tmp_path: Path) -> None:
    misses = dict(zip(PROMPT_SETS, (1, 2, 3, 1, 2, 3, 4), strict=True))
    lines = [line(method, name, misses=count) for method in ("stpp", "pipedec") for name, count in misses.items()]
    figure = accuracy_figure(answers(tmp_path, [*lines, *(line("pp", name, misses=10) for name in misses)]))
    (axes,) = figure.axes
    drawn = lines_of(axes)
    assert list(drawn) == ["STPP", "PipeDec"]
    assert drawn["PipeDec"][1] == pytest.approx([90, 80, 70, 90, 80, 70, 60, 90]), "and back to the first"
    assert ticks(axes) == list(PROMPT_SETS.values())
    assert "the centre is 50 %" in note(figure) and axes.get_ylim() == (50, 100)
    with pytest.raises(NoFigure, match="needs 3 prompt sets"):
        accuracy_figure(answers(tmp_path, lines[:2]))


def test_stochastic_shows_what_was_answered_both_ways(tmp_path: Path) -> None:
    lines = [make(method, "qa", index, ms=10 * (index + 1)) for make in (line, stochastic) for method in ("stpp", "pipedec")
             for index in range(2)]  # fmt: skip
    more = [line("stpp-tuned"), stochastic("mine", ms=9), line("stpp", "qa", 2, ms=99), stochastic("pipedec", "rag", ms=99)]
    latency, _ = stochastic_figure(answers(tmp_path, [*lines, *more])).axes
    names = [f"{method}, {way}" for method in ("STPP", "PipeDec") for way in ("greedy", "stochastic")]
    assert bars_of(latency) == {name: [15] for name in names} and legend(latency) == names
    both = "answered the same prompt both greedily and stochastically on the same pipeline"
    for few, reason in (
        ([line(), stochastic("pp")], "no row holds a stochastic answer of a method with a tree"),
        ([line("pp"), stochastic()], "no row holds a greedy answer of a method with a tree"),
        ([line(), stochastic(groups=7)], both),
        ([line(), stochastic(prompt_index=1)], both),
    ):
        with pytest.raises(NoFigure, match=reason):
            stochastic_figure(answers(tmp_path, few))


def test_prompt_tokens_has_a_line_per_prompt_set_and_their_mean(tmp_path: Path) -> None:
    lines = [line("pp", name, ms=300.0 * factor, misses=10) for name, factor in (("qa", 1), ("rag", 4))]
    for length, ms, misses in ((1, 200.0, 8), (4, 150.0, 5), (16, 100.0, 4)):
        lines += [bita(name, name=f"d{length}", prompt_tokens=length, ms=ms, misses=misses) for name in ("qa", "rag")]
    figure = prompt_tokens_figure(answers(tmp_path, lines))
    speeds, passes = figure.axes
    assert (speeds.get_ylabel(), passes.get_ylabel()) == ("speed-up over PP (×)", "tokens per pass")
    assert {axes.get_xlabel() for axes in figure.axes} == {"prompt tokens"}
    for axes in figure.axes:
        assert axes.get_xscale() == "log" and ticks(axes) == ["1", "4", "16"]
    assert lines_of(speeds) == {
        "QA": ([1, 4, 16], pytest.approx([1.5, 2, 3])), "RAG": ([1, 4, 16], pytest.approx([6, 8, 12])),
        "mean": ([1, 4, 16], pytest.approx([3, 4, 6])),
    }  # fmt: skip
    assert lines_of(passes)["mean"] == ([1, 4, 16], pytest.approx([10 / 8, 2, 2.5]))
    assert legend(passes) == ["QA", "RAG", "mean"]
    text = note(figure)
    assert "BiTA: 4 masks trained, 4 used, efficient tree, 5 candidates each" in text and "14 stages" in text


def test_the_command_writes_tables_and_names_figures_that_are_left_out(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [line("pp", ms=300.0), line("pipedec", ms=50.0)])
    done = CliRunner().invoke(reports, [str(tmp_path), "--out", str(tmp_path), "--tables"])
    assert done.exit_code == 0, (done.output, done.exception)
    assert (tmp_path / "tables.md").read_text() == done.stdout
    assert "6.00×" in done.stdout and "4.46–7.79×" in done.stdout
    last = done.stderr.splitlines()[-1]
    assert "accuracy (it needs 3 prompt sets" in last
    assert "stochastic (no row holds a stochastic answer of a method with a tree)" in last


def test_tree_has_a_line_per_number_of_children_over_the_width(tmp_path: Path) -> None:
    grid = [
        line(prompt_set=name, width=width, children=children, ms=ms * width, misses=children)
        for name, ms in (("qa", 1), ("rag", 4)) for width in (8, 16, 32) for children in (2, 4)
    ]  # fmt: skip
    unshared = [line(prompt_set="qa", prompt_index=9, width=32, children=4, ms=9999)]
    elsewhere = [line(width=width, groups=7, preset="paper-7") for width in (8, 16)]
    latency, hits = tree_figure(answers(tmp_path, grid + unshared + elsewhere)).axes
    assert (latency.get_ylabel(), hits.get_ylabel()) == ("TPOT (ms)", "hit rate (%)")
    assert latency.get_xscale() == "log" and ticks(latency) == ["8", "16", "32"]
    assert lines_of(latency)["4"] == ([8, 16, 32], pytest.approx([16, 32, 64])), "geometric means; shared prompts alone"
    assert {name: values for name, (_, values) in lines_of(hits).items()} == {
        "2": pytest.approx([80, 80, 80]), "4": pytest.approx([60, 60, 60])
    }  # fmt: skip
    assert legend(hits) == ["2", "4"]
    for found in ([line()], [line(width=8), line(width=16, prompt_index=1)], [line("stpp", width=8), line("stpp", width=16)]):
        with pytest.raises(NoFigure, match="at least two widths"):
            tree_figure(answers(tmp_path, found))


def test_misses_of_the_papers_policy_lie_on_the_number_of_stages(tmp_path: Path) -> None:
    lines = [line(groups=groups, preset=f"paper-{groups}", stages=max(groups, 14)) for groups in (7, 14, 21)]
    lines += [
        line("pipedec-bestfirst", groups=groups, stages=max(groups, 14), preset=f"paper-{groups}", timesteps=8 + groups)
        for groups in (7, 21)
    ]
    (axes,) = misses_figure(answers(tmp_path, [*lines, line("stpp"), line("pp")])).axes
    drawn = lines_of(axes)
    assert drawn["PipeDec"] == drawn["one drain per miss"] == ([7, 14, 21], [7, 14, 21])
    assert "PipeDec best-first" not in drawn  # its late hits cost time that no miss accounts for
    with pytest.raises(NoFigure, match="two lengths"):
        misses_figure(answers(tmp_path, lines[:1]))
