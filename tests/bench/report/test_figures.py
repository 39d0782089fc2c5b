"""The figures of a sweep: the data and labels that are drawn, and the messages of the command."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from support.synthetic_sweep import Line, answers, bita, line, stochastic, write

from pipedec.bench.report.figures.bars import PARTS, breakdown_figure, latency_figure
from pipedec.bench.report.figures.bita import masks_figure, prompt_tokens_figure
from pipedec.bench.report.figures.catalogue import FIGURES
from pipedec.bench.report.figures.lines import misses_figure, speedup_figure, tree_figure
from pipedec.bench.report.figures.radar import accuracy_figure
from pipedec.bench.report.figures.stochastic import stochastic_figure
from pipedec.bench.report.missing import NoFigure
from pipedec.bench.report.prompt_sets import PROMPT_SETS
from pipedec.cli.main import program
from pipedec.core import UserError

pytest.importorskip("matplotlib")

SPEED = {"pp": 300.0, "stpp": 120.0, "stpp-tuned": 110.0, "pipedec": 80.0, "pipedec-bestfirst": 60.0}
PARTS_MS = {"wait": 1.0, "scheduler": 2.0, "sync": 3.0, "transfer": 4.0, "compute": 10.0}


def everything() -> Iterator[Line]:
    """A small sweep that has all figures.

    Three clusters, seven prompt sets, a grid of trees, several BiTA, greedy and stochastic answers.
    """
    for prompt_set in PROMPT_SETS:
        for index in range(3):
            for groups in (7, 14, 21):
                preset, stages = f"paper-{groups}", max(groups, 14)
                for method, ms in SPEED.items():
                    breakdown = PARTS_MS if index == 0 else None
                    yield line(
                        method, prompt_set, index, groups=groups, stages=stages, preset=preset, ms=ms + index, breakdown=breakdown
                    )
            for method, ms in SPEED.items():
                for repeat in range(2):
                    yield stochastic(method, prompt_set, index, repeat=repeat, ms=1.2 * ms + 10 * repeat, misses=3 + repeat)
            yield line("slm", prompt_set, index, groups=1, preset="slm", ms=40.0)
            for width in (8, 64, 128):
                for children in (2, 4, 16):
                    yield line("pipedec", prompt_set, index, width=width, children=children, ms=8000 / width)
            for length in (1, 2, 4, 8, 16, 32, 64):
                yield bita(prompt_set, index, name=f"deep-{length}", prompt_tokens=length, ms=200 - length + index, misses=5)
            for depth in (1, 2, 3):
                yield bita(prompt_set, index, depth=depth, ms=190 - 5 * depth, misses=8 - depth)


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return answers(tmp_path_factory.mktemp("sweep"), everything())


def legend(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def ticks(axes: Any) -> list[str]:
    return [text.get_text() for text in axes.get_xticklabels()]


def rows_of(axes: Any) -> list[str]:
    """The labels along the vertical axis."""
    return [text.get_text() for text in axes.get_yticklabels()]


def lines_of(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    """The points of each named line."""
    named = [one for one in axes.get_lines() if not one.get_label().startswith("_")]
    return {one.get_label(): (list(map(float, one.get_xdata())), list(map(float, one.get_ydata()))) for one in named}


def bars_of(axes: Any) -> dict[str, list[float]]:
    """The lengths of the bars of each name."""
    return {one.get_label(): list(map(float, one.datavalues)) for one in axes.containers if hasattr(one, "datavalues")}


def whiskers_of(axes: Any) -> list[tuple[float, float]]:
    """The ends of all whiskers."""
    found = [one.lines[2][0].get_segments()[0] for one in axes.containers if not hasattr(one, "datavalues")]
    return [(float(segment[0][1]), float(segment[1][1])) for segment in found]


def data_of(figure: Any) -> list[Any]:
    """All that a figure shows: points, bars, whiskers and ticks of each panel, and the small print."""
    return [*((lines_of(one), bars_of(one), whiskers_of(one), ticks(one), rows_of(one)) for one in figure.axes), note(figure)]


def note(figure: Any) -> str:
    return " ".join(figure.get_supxlabel().split())


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_names_the_origin_of_its_data(sweep: pd.DataFrame, name: str) -> None:
    figure = FIGURES[name](sweep, "a title")
    assert "Emulated (paper-" in note(figure) and figure.get_suptitle() == "a title"
    assert all(words in note(figure) for words in ("1 CPU machine", "slow motion ×4", "prompts", "decoded tokens per"))


def test_latency_bars_are_by_prompt_set_in_the_order_of_methods(sweep: pd.DataFrame) -> None:
    figure = FIGURES["latency"](sweep, None)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "TPOT (ms)" and ticks(axes) == list(PROMPT_SETS.values())
    labels = [
        "PP", "STPP", "STPP tuned", "SLM", "BiTA", "PipeDec-7", "PipeDec-14", "PipeDec-21",
        "PipeDec-7 best-first", "PipeDec-14 best-first", "PipeDec-21 best-first",
    ]  # fmt: skip
    assert legend(axes) == list(bars_of(axes)) == labels
    assert [heights[0] for heights in bars_of(axes).values()] == pytest.approx([301, 121, 111, 40, 175, 81, 81, 81, 61, 61, 61])
    assert {len(heights) for heights in bars_of(axes).values()} == {len(PROMPT_SETS)}
    assert "PP, STPP, STPP tuned, BiTA: 14 stages" in note(figure)


def test_latency_has_intervals_over_three_prompts_or_more(tmp_path: Path) -> None:
    def figure(prompts: int) -> Any:
        return latency_figure(answers(tmp_path, [line(prompt_index=index, ms=50 + index) for index in range(prompts)]))

    assert whiskers_of(figure(2).axes[0]) == [] and "Whiskers" not in note(figure(2))
    ((low, high),) = whiskers_of(figure(3).axes[0])
    assert 50 <= low < 51 < high <= 52 and "Whiskers: 95 % interval over prompts" in note(figure(3))


def test_latency_needs_a_prompt_that_all_answered(tmp_path: Path) -> None:
    with pytest.raises(NoFigure, match="no prompt was answered by all"):
        latency_figure(answers(tmp_path, [line("pp", prompt_index=0), line("pipedec", prompt_index=1)]))


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


def test_accuracy_needs_three_prompt_sets(tmp_path: Path) -> None:
    with pytest.raises(NoFigure, match="needs 3 prompt sets"):
        accuracy_figure(answers(tmp_path, [line(prompt_set=name) for name in ("qa", "rag")]))


def test_stochastic_stands_beside_greedy_by_prompt_set_and_method(tmp_path: Path) -> None:
    lines = [line(method, name, ms=ms) for method, ms in (("pp", 300), ("stpp", 100), ("pipedec", 50)) for name in ("rag", "qa")]
    for repeat, (ms, misses) in enumerate(((100, 4), (60, 2), (80, 3))):
        for method in ("pp", "stpp", "pipedec"):
            lines += [stochastic(method, name, repeat=repeat, ms=ms, misses=misses) for name in ("rag", "qa")]
    figure = stochastic_figure(answers(tmp_path, lines))
    latency, hits = figure.axes
    assert (latency.get_ylabel(), hits.get_ylabel()) == ("TPOT (ms)", "hit rate (%)")
    assert ticks(hits) == ["QA", "RAG"]
    assert bars_of(latency) == {
        "STPP, greedy": [100, 100], "STPP, stochastic": [80, 80], "PipeDec, greedy": [50, 50], "PipeDec, stochastic": [80, 80]
    }  # fmt: skip
    assert bars_of(hits)["PipeDec, greedy"] == pytest.approx([80, 80])
    assert bars_of(hits)["PipeDec, stochastic"] == pytest.approx([70, 70])
    assert whiskers_of(latency) == [(pytest.approx(60), pytest.approx(100))] * 4, "over repeats, of which greedy has but one"
    assert whiskers_of(hits) == [(pytest.approx(60), pytest.approx(80))] * 4
    text = note(figure)
    assert "Stochastic: temperature 0.6, top-k 80, top-p 0.9, 3 repeats. Whiskers: lowest and highest repeat" in text
    assert "STPP, PipeDec: 14 stages" in text and "Tree: width 32, 16 children" in text


def test_stochastic_bars_are_of_methods_that_decoded_both_ways(tmp_path: Path) -> None:
    kinds = (line, stochastic)
    lines = [make(method, name) for make in kinds for method in ("stpp", "pipedec") for name in ("qa", "rag")]
    lines += [bita(name, make=make) for make in kinds for name in ("qa", "rag")]
    latency, _ = stochastic_figure(answers(tmp_path, [*lines, line("stpp-tuned"), stochastic("mine", ms=9)])).axes
    names = [f"{method}, {way}" for method in ("STPP", "BiTA", "PipeDec") for way in ("greedy", "stochastic")]
    assert list(bars_of(latency)) == legend(latency) == names


def test_stochastic_is_over_what_all_answered_both_ways(tmp_path: Path) -> None:
    lines = [line(method, "qa", index, ms=10 * (index + 1)) for method in ("stpp", "pipedec") for index in range(3)]
    for method, known in (("stpp", (1, 2, 3)), ("pipedec", (0, 1, 3))):
        lines += [stochastic(method, "qa", index, ms=70 + index) for index in known]
    lines += [stochastic("pipedec", "qa", 1, repeat=1, ms=1), stochastic("pipedec", "qa", 1, seed=9, ms=1)]
    lines += [line("pipedec", "rag"), stochastic("stpp", "rag")]
    latency, hits = stochastic_figure(answers(tmp_path, lines)).axes
    assert bars_of(latency) == {
        "STPP, greedy": [20], "STPP, stochastic": [71], "PipeDec, greedy": [20], "PipeDec, stochastic": [71]
    }  # fmt: skip
    assert ticks(hits) == ["QA"]


def test_stochastic_keeps_to_one_pipeline_one_size_of_tree_and_one_sampling(tmp_path: Path) -> None:
    lines = []
    for make, ms in ((line, 50.0), (stochastic, 60.0)):
        lines += [make(method, ms=ms) for method in ("stpp", "pipedec")]
        lines += [make("pipedec", ms=1, width=64), make("pipedec", ms=2, groups=7, preset="paper-7")]
        lines += [make("pipedec", ms=3, groups=21, preset="paper-21"), make("pipedec", ms=4, groups=14, preset="home")]
    lines += [stochastic(method, temperature=1.0, ms=9, repeat=turn) for method in ("stpp", "pipedec") for turn in range(4)]
    lines += [stochastic(method, top_p=0.5, ms=9) for method in ("stpp", "pipedec")]
    figure = stochastic_figure(answers(tmp_path, lines))
    assert bars_of(figure.axes[0]) == {
        "STPP, greedy": [50], "STPP, stochastic": [60], "PipeDec, greedy": [50], "PipeDec, stochastic": [60]
    }  # fmt: skip
    others = [one for one in lines if one["sampling"]["temperature"] != 0.6]
    assert "temperature 1, top-k 80, top-p 0.9, 4 repeats" in note(stochastic_figure(answers(tmp_path, others)))


def test_stochastic_takes_the_papers_pipeline_and_tree_of_equals(tmp_path: Path) -> None:
    ways = [{"width": 8}, {"groups": 28}, {"groups": 21, "preset": "paper-21"}, {"groups": 7, "preset": "paper-7"}, {}]
    lines = [make(ms=10 * place, **way) for make in (line, stochastic) for place, way in enumerate(ways, start=1)]
    for last, height in ((5, 50), (4, 30), (2, 20)):
        kept = [one for one in lines if one["decode_ms"] <= 100 * last]
        assert bars_of(stochastic_figure(answers(tmp_path, kept)).axes[0])["PipeDec, greedy"] == [height]


def test_stochastic_compares_static_trees_each_at_its_own_depth(tmp_path: Path) -> None:
    shallow, deep = ({"width": 32, "children": 16, "depth": depth, "rows": None} for depth in (2, 4))
    latency, _ = stochastic_figure(
        answers(tmp_path, [line("stpp", tree=deep, ms=30), stochastic("stpp", tree=shallow, ms=40)])
    ).axes
    assert bars_of(latency) == {"STPP, greedy": [30], "STPP, stochastic": [40]}


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([line(), stochastic("pp")], "no row holds a stochastic answer of a method with a tree"),
        ([line("pp"), stochastic()], "no row holds a greedy answer of a method with a tree"),
        ([line(), stochastic("stpp")], "answered the same prompt both greedily and stochastically on the same pipeline"),
        ([line(), stochastic(groups=7)], "answered the same prompt both greedily and stochastically on the same pipeline"),
        ([line(), stochastic(prompt_index=1)], "answered the same prompt both greedily and stochastically on the same pipeline"),
    ],
)
def test_stochastic_needs_both_ways(tmp_path: Path, lines: list[Line], reason: str) -> None:
    with pytest.raises(NoFigure, match=reason):
        stochastic_figure(answers(tmp_path, lines))


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", [name for name in FIGURES if name != "stochastic"])
def test_other_figures_show_greedy_answers_alone(sweep: pd.DataFrame, name: str) -> None:
    greedy = sweep[sweep["temperature"] == 0]
    assert 0 < len(greedy) < len(sweep)
    assert data_of(FIGURES[name](sweep, None)) == data_of(FIGURES[name](greedy, None))


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


def test_tree_needs_two_widths(tmp_path: Path) -> None:
    for found in ([line()], [line(width=8), line(width=16, prompt_index=1)], [line("stpp", width=8), line("stpp", width=16)]):
        with pytest.raises(NoFigure, match="at least two widths"):
            tree_figure(answers(tmp_path, found))


def test_speedup_is_over_pp_of_the_same_pipeline(tmp_path: Path) -> None:
    fits = line()["cluster"]
    lines = []
    for groups, pp in ((2, 200.0), (4, 240.0), (14, 300.0)):
        cluster = fits | {"stages": groups, "groups": groups, "devices": ["rtx3090"] * groups, "fits": groups > 4}
        for name, factor in (("qa", 1.0), ("rag", 4.0)):
            lines += [line("pp", name, groups=groups, ms=pp, cluster=cluster)]
            lines += [line("pipedec", name, groups=groups, ms=50.0 / factor, cluster=cluster)]
    figure = speedup_figure(answers(tmp_path, [*lines, line("stpp", "qa", groups=28), line("slm", "qa", groups=1)]))
    (axes,) = figure.axes
    drawn = lines_of(axes)
    assert list(drawn) == ["ideal = stages", "PipeDec"]
    assert drawn["PipeDec"] == ([2, 4, 14], pytest.approx([8, 9.6, 12]))
    assert drawn["ideal = stages"] == ([2, 4, 14], [2, 4, 14])
    assert "Hollow markers: the model does not fit" in note(figure)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("pipeline stages", "speed-up over PP (×)")


def test_speedup_needs_pp_on_two_lengths(tmp_path: Path) -> None:
    lines = [line(method, groups=groups) for method in ("pp", "pipedec") for groups in (2, 4)]
    assert speedup_figure(answers(tmp_path, lines))
    with pytest.raises(NoFigure, match="it needs pp and another method on pipelines of two lengths"):
        speedup_figure(answers(tmp_path, lines[1:]))


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


def test_breakdown_stacks_the_parts_of_a_timestep(tmp_path: Path) -> None:
    lines = [
        line(prompt_index=0, timesteps=10, breakdown=PARTS_MS), line(prompt_index=1, timesteps=30, breakdown={"compute": 20.0}),
        line("pp", prompt_index=2, breakdown={"compute": 5.0, "queue": 1.0}), line(prompt_index=3),
    ]  # fmt: skip
    (axes,) = breakdown_figure(answers(tmp_path, lines)).axes
    assert legend(axes) == [*PARTS, "queue"]
    assert rows_of(axes) == ["PP, paper-14", "PipeDec, paper-14"]
    widths = bars_of(axes)
    assert widths["compute"] == pytest.approx([5, 17.5]), "weighted by timesteps"
    assert widths["wait"] == pytest.approx([0, 0.25])
    assert [text.get_text() for text in axes.texts] == ["6.0", "20.0"]
    assert "ms" in axes.get_xlabel()
    with pytest.raises(NoFigure, match="no row has a breakdown"):
        breakdown_figure(answers(tmp_path, [line()]))


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", ["latency", "accuracy", "stochastic", "speedup", "breakdown"])
def test_figures_that_compare_methods_show_one_bita_with_one_tree(tmp_path: Path, name: str) -> None:
    common = [
        make(method, prompt_set, groups=groups, breakdown=PARTS_MS)
        for make in (line, stochastic)
        for method in ("pp", "pipedec")
        for prompt_set in ("qa", "rag", "mt_bench")
        for groups in (7, 14)
    ]
    own = [
        bita(
            one["prompt_set"],
            make=stochastic if one["sampling"]["temperature"] else line,
            cluster=one["cluster"],
            breakdown=PARTS_MS,
        )
        for one in common
        if one["method"] == "pp"
    ]
    others = [one | {"bita": one["bita"] | {"digest": "b", "prompt_tokens": 8}, "decode_ms": 1.0} for one in own]
    others += [one | {"tree": one["tree"] | {"shape": "full"}, "decode_ms": 1.0} for one in own]
    one, many = (answers(tmp_path, lines) for lines in (common + own, others + common + own))
    assert "BiTA" in str(data_of(FIGURES[name](one, None)))
    assert data_of(FIGURES[name](one, None)) == data_of(FIGURES[name](many, None))


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


def test_mask_tokens_is_over_the_depth_of_the_tree(tmp_path: Path) -> None:
    lines = [line("pp", ms=300.0, misses=10)]
    lines += [bita(depth=depth, ms=300.0 / depth, misses=10 // depth) for depth in (1, 2, 5)]
    figure = masks_figure(answers(tmp_path, lines))
    speeds, passes = figure.axes
    assert ticks(passes) == ["1", "2", "5"] and speeds.get_xscale() == "linear"
    assert lines_of(speeds) == {"HumanEval": ([1, 2, 5], pytest.approx([1, 2, 5]))}, "of one prompt set there is no mean"
    assert lines_of(passes) == {"HumanEval": ([1, 2, 5], pytest.approx([1, 2, 5]))}
    assert "BiTA: deep prompt of 16 tokens, 4 masks trained, efficient tree, 5 candidates each" in note(figure)


def plot(*arguments: str | Path) -> Result:
    return CliRunner().invoke(program, ["bench", "plot", *map(str, arguments)])


def test_the_command_draws_each_figure_as_png_and_svg(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [line(method, ms=ms) for method, ms in SPEED.items()])
    out = tmp_path / "new" / "figures"
    done = plot(tmp_path, "--out", out, "--title", "a title")
    assert done.exit_code == 0, (done.output, done.exception)
    *files, last = done.stderr.splitlines()
    assert files == [str(out / f"latency{ending}") for ending in (".png", ".svg")]
    for file in map(Path, files):
        assert file.read_bytes().startswith({".png": b"\x89PNG", ".svg": b"<?xml"}[file.suffix])
    assert last.startswith("left out: accuracy (it needs 3 prompt sets") and "breakdown (no row has a breakdown)" in last
    assert "stochastic (no row holds a stochastic answer of a method with a tree)" in last


def test_measured_and_computed_have_figures_of_their_own(tmp_path: Path) -> None:
    measured = write(tmp_path / "a.jsonl", [line("pp")])
    computed = write(tmp_path / "b.jsonl", [line("pp", clock="computed")])
    done = plot(measured, computed, "--out", tmp_path / "out", "--only", "latency")
    assert done.exit_code == 0, (done.output, done.exception)
    assert sorted(file.name for file in (tmp_path / "out").glob("*.png")) == ["latency-computed.png", "latency-measured.png"]


def test_equal_rows_give_equal_files(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [line(prompt_index=index, ms=50 + index) for index in range(4)])
    for out in ("a", "b"):
        assert plot(tmp_path, "--out", tmp_path / out, "--only", "latency").exit_code == 0
    for name in ("latency.png", "latency.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_tables_are_printed_and_written(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [line("pp", ms=300.0), line("pipedec", ms=50.0)])
    done = plot(tmp_path, "--out", tmp_path, "--tables", "--only", "latency")
    assert done.exit_code == 0, (done.output, done.exception)
    assert (tmp_path / "tables.md").read_text() == done.stdout
    assert "6.00×" in done.stdout and "4.46–7.79×" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "speedup"], "nothing to draw: speedup (it needs pp"),
        (["--only", "breakdown"], "nothing to draw: breakdown (no row has a breakdown)"),
        (["--out", "{}/rows.jsonl/below"], "cannot create this directory"),
        (["{}/absent"], "cannot read"),
    ],
)
def test_errors_are_one_line(tmp_path: Path, arguments: list[str], words: str) -> None:
    write(tmp_path / "rows.jsonl", [line()])
    done = plot(tmp_path, "--out", tmp_path / "out", *(argument.format(tmp_path) for argument in arguments))
    assert isinstance(done.exception, UserError) and words in str(done.exception) and "\n" not in str(done.exception)


def test_without_matplotlib_the_error_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    write(tmp_path / "rows.jsonl", [line()])
    done = plot(tmp_path, "--out", tmp_path)
    assert isinstance(done.exception, UserError) and "needs matplotlib: pip install 'pipedec[bench]'" in str(done.exception)
