"""The figures of a sweep: data, labels, small print and looks of methods, and the messages of the command."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner, Result
from support.drawn_figures import (
    PARTS_MS,
    SPEED,
    bars_of,
    check_one_bita,
    check_origin,
    everything,
    legend,
    lines_of,
    note,
    rows_of,
    ticks,
    whiskers_of,
)  # fmt: skip
from support.synthetic_sweep import answers, line, write

from pipedec.bench.report.figures import (
    FIGURES,
    PARTS,
    breakdown_figure,
    colors,
    latency_figure,
    provenance,
    speedup_figure,
)
from pipedec.bench.report.frames import NoFigure, variants
from pipedec.bench.report.style import METHODS, PROMPT_SETS, method_looks, method_rank
from pipedec.cli.main import program
from pipedec.core.errors import UserError


def test_the_small_print_names_emulation_clock_models_and_counts(tmp_path: Path) -> None:
    lines = [line(prompt_index=index) for index in range(3)] + [line("pp")]
    assert provenance(answers(tmp_path, lines), "bar") == (
        "Emulated (paper-14), 1 CPU machine, slow motion ×4; llama-3.1-70b in float32; "
        "1–3 prompts and 10–30 decoded tokens per bar"
    )
    assert "computed: times by arithmetic" in provenance(answers(tmp_path, [line(clock="computed")]))
    own = line(preset=None, machine={"cpu": "a CPU", "cores": 2, "gpu": "NVIDIA H200"}, slow_motion=1.0)
    here = own | {"cluster": own["cluster"] | {"devices": []}}
    assert provenance(answers(tmp_path, [here])).startswith("Measured on 1 NVIDIA H200 machine, nothing emulated")
    launched = own | {"cluster": own["cluster"] | {"devices": ["rtx3090"] * 2 + ["l40"] * 12}}
    assert provenance(answers(tmp_path, [launched])).startswith("Measured on a cluster of 2 rtx3090 and 12 l40, nothing emulated")


def test_methods_keep_order_and_have_different_colours(tmp_path: Path) -> None:
    assert sorted(["zeta", "pipedec", "alpha", "pp", "stpp"], key=method_rank) == ["pp", "stpp", "pipedec", "alpha", "zeta"]
    looks = method_looks(["zeta", "pipedec", "al{}pha"])
    assert looks["pipedec"] is METHODS["pipedec"] and METHODS["pipedec-bestfirst"].name(14) == "PipeDec-14 best-first"
    assert looks["al{}pha"].name(7) == "al{}pha-7"
    everyone = [look.color for look in (*METHODS.values(), looks["zeta"], looks["al{}pha"])]
    assert len(set(everyone)) == len(everyone)
    lengths = variants(answers(tmp_path, [line(groups=groups) for groups in (2, 4, 7)]))
    assert len(set(colors(lengths))) == 3 and colors(lengths[:1]) == [METHODS["pipedec"].color]


pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    return answers(tmp_path_factory.mktemp("sweep"), everything())


@pytest.mark.fast_cases
@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_names_the_origin_of_its_data_and_shows_greedy_answers_alone(sweep: pd.DataFrame, name: str) -> None:
    check_origin(FIGURES[name], sweep)


def test_latency_bars_are_by_prompt_set_in_the_order_of_methods(sweep: pd.DataFrame) -> None:
    figure = FIGURES["latency"](sweep, None)
    (axes,) = figure.axes
    assert axes.get_ylabel() == "TPOT (ms)" and ticks(axes) == list(PROMPT_SETS.values())
    labels = [
        "PP", "STPP", "STPP tuned", "BiTA", "PipeDec-7", "PipeDec-14", "PipeDec-21",
        "PipeDec-7 best-first", "PipeDec-14 best-first", "PipeDec-21 best-first",
    ]  # fmt: skip
    assert legend(axes) == list(bars_of(axes)) == labels
    assert [heights[0] for heights in bars_of(axes).values()] == pytest.approx(
        [300.5, 120.5, 110.5, 180, *[80.5] * 3, *[60.5] * 3]
    )
    assert {len(heights) for heights in bars_of(axes).values()} == {len(PROMPT_SETS)}
    assert "PP, STPP, STPP tuned, BiTA: 14 stages" in note(figure)


def test_latency_has_intervals_over_three_prompts_or_more(tmp_path: Path) -> None:
    lines = [line(prompt_index=index, ms=50 + index) for index in range(3)]
    two, three = (latency_figure(answers(tmp_path, lines[:count])) for count in (2, 3))
    assert whiskers_of(two.axes[0]) == [] and "Whiskers" not in note(two)
    ((low, high),) = whiskers_of(three.axes[0])
    assert 50 <= low < 51 < high <= 52 and "Whiskers: 95 % interval over prompts" in note(three)
    with pytest.raises(NoFigure, match="no prompt was answered by all"):
        latency_figure(answers(tmp_path, [line("pp", prompt_index=0), line("pipedec", prompt_index=1)]))


def test_speedup_is_over_pp_of_the_same_pipeline(tmp_path: Path) -> None:
    fits = line()["cluster"]
    lines = []
    for groups, pp in ((2, 200.0), (4, 240.0), (14, 300.0)):
        cluster = fits | {"stages": groups, "groups": groups, "devices": ["rtx3090"] * groups, "fits": groups > 4}
        for name, factor in (("qa", 1.0), ("rag", 4.0)):
            lines += [line("pp", name, groups=groups, ms=pp, cluster=cluster)]
            lines += [line("pipedec", name, groups=groups, ms=50.0 / factor, cluster=cluster)]
    figure = speedup_figure(answers(tmp_path, [*lines, line("stpp", "qa", groups=28)]))
    (axes,) = figure.axes
    drawn = lines_of(axes)
    assert list(drawn) == ["ideal = stages", "PipeDec"]
    assert drawn["PipeDec"] == ([2, 4, 14], pytest.approx([8, 9.6, 12]))
    assert drawn["ideal = stages"] == ([2, 4, 14], [2, 4, 14])
    assert "Hollow markers: the model does not fit" in note(figure)
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("pipeline stages", "speed-up over PP (×)")


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
@pytest.mark.parametrize("name", ["latency", "speedup", "breakdown"])
def test_figures_that_compare_methods_show_one_bita_with_one_tree(tmp_path: Path, name: str) -> None:
    check_one_bita(FIGURES[name], tmp_path)


def plot(*arguments: str | Path) -> Result:
    return CliRunner().invoke(program, ["bench", "plot", *map(str, arguments)])


def test_the_command_draws_each_figure_as_png_and_svg(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", [line(method, ms=ms) for method, ms in SPEED.items()])
    out = tmp_path / "new" / "figures"
    done = plot(tmp_path, "--out", out, "--title", "a title")
    assert done.exit_code == 0, (done.output, done.exception)
    assert plot(tmp_path, "--out", tmp_path / "again", "--only", "latency", "--title", "a title").exit_code == 0
    *files, last = done.stderr.splitlines()
    assert files == [str(out / f"latency{ending}") for ending in (".png", ".svg")]
    for file in map(Path, files):
        assert file.read_bytes().startswith({".png": b"\x89PNG", ".svg": b"<?xml"}[file.suffix])
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), "equal rows, equal files"
    assert last.startswith("left out: speedup (it needs pp") and "breakdown (no row has a breakdown)" in last


def test_measured_and_computed_have_figures_of_their_own(tmp_path: Path) -> None:
    measured = write(tmp_path / "a.jsonl", [line("pp")])
    computed = write(tmp_path / "b.jsonl", [line("pp", clock="computed")])
    done = plot(measured, computed, "--out", tmp_path / "out", "--only", "latency")
    assert done.exit_code == 0, (done.output, done.exception)
    assert sorted(file.name for file in (tmp_path / "out").glob("*.png")) == ["latency-computed.png", "latency-measured.png"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
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
