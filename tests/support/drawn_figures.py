"""What figures show, read back from matplotlib's objects; and a synthetic sweep that has all figures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from pipedec.bench.report.style import PROMPT_SETS
from support.synthetic_sweep import Line, answers, bita, line, stochastic

SPEED = {"pp": 300.0, "stpp": 120.0, "stpp-tuned": 110.0, "pipedec": 80.0, "pipedec-bestfirst": 60.0}
PARTS_MS = {"wait": 1.0, "scheduler": 2.0, "sync": 3.0, "transfer": 4.0, "compute": 10.0}
Draw = Callable[[pd.DataFrame, str | None], Any]


def everything() -> Iterator[Line]:
    """A small sweep that has all figures.

    Three clusters, seven prompt sets, a grid of trees, several BiTA, greedy and stochastic answers.
    """
    for prompt_set in PROMPT_SETS:
        for index in range(2):
            for groups in (7, 14, 21):
                preset, stages = f"paper-{groups}", max(groups, 14)
                place: dict[str, Any] = {
                    "groups": groups,
                    "stages": stages,
                    "preset": preset,
                    "breakdown": PARTS_MS if index == 0 else None,
                }
                for method, ms in SPEED.items():
                    yield line(method, prompt_set, index, ms=ms + index, **place)
            for method, ms in SPEED.items():
                for repeat in range(2):
                    yield stochastic(method, prompt_set, index, repeat=repeat, ms=1.2 * ms + 10 * repeat, misses=3 + repeat)
            for width in (8, 64):
                for children in (2, 16):
                    yield line("pipedec", prompt_set, index, width=width, children=children, ms=8000 / width)
            for length in (1, 4, 16):
                yield bita(prompt_set, index, name=f"deep-{length}", prompt_tokens=length, ms=200 - length + index, misses=5)
            for depth in (1, 2):
                yield bita(prompt_set, index, depth=depth, ms=190 - 5 * depth, misses=8 - depth)


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


def check_origin(draw: Draw, sweep: pd.DataFrame, shows_greedy_alone: bool = True) -> None:
    """The figure names the origin of its data, which are of greedy answers alone."""
    figure = draw(sweep, "a title")
    assert "Emulated (paper-" in note(figure) and figure.get_suptitle() == "a title"
    assert all(words in note(figure) for words in ("1 CPU machine", "slow motion ×4", "prompts", "decoded tokens per"))
    if shows_greedy_alone:
        greedy = sweep[sweep["temperature"] == 0]
        assert 0 < len(greedy) < len(sweep)
        assert data_of(figure) == data_of(draw(greedy, "a title"))


def check_one_bita(draw: Draw, folder: Path) -> None:
    """The figure, which compares methods, shows one BiTA with one tree."""
    common = [
        make(method, prompt_set, groups=groups, breakdown=PARTS_MS)
        for make in (line, stochastic)
        for method in ("pp", "pipedec")
        for prompt_set in ("qa", "rag", "mt_bench")
        for groups in (7, 14)
    ]
    own = []
    for one in (one for one in common if one["method"] == "pp"):
        make = stochastic if one["sampling"]["temperature"] else line
        own.append(bita(one["prompt_set"], make=make, cluster=one["cluster"], breakdown=PARTS_MS))
    others = [one | {"bita": one["bita"] | {"digest": "b", "prompt_tokens": 8}, "decode_ms": 1.0} for one in own]
    others += [one | {"tree": one["tree"] | {"shape": "full"}, "decode_ms": 1.0} for one in own]
    alone, among_others = (answers(folder, lines) for lines in (common + own, others + common + own))
    assert "BiTA" in str(data_of(draw(alone, None)))
    assert data_of(draw(alone, None)) == data_of(draw(among_others, None))
