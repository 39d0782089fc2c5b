"""The figure of who occupies which stage when. Reads rows and outcomes; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipedec.bench.load.results import provenance
from pipedec.bench.record import Row
from pipedec.bench.report.style import FAINT, FULL_WIDTH, TEXT, TICK_POINTS, dress, finish, legend_above, new_figure

if TYPE_CHECKING:
    import numpy
    from matplotlib.figure import Figure

_REQUEST_COLORS = (
    "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#6A4C9C", "#8C6D31", "#1B2A41", "#F0B323",
)  # fmt: skip
_CELL = 12  # columns of the picture per timestep
_FILL_TIMESTEPS = 72


def fill_figure(fill: Sequence[Sequence[dict[int, int]]], row: Row, title: str | None = None) -> Figure | None:
    """Who occupies which stage at which timestep: a column for each timestep, a line for each group, divided among requests by
    their rows. None without a record of it."""
    if not fill:
        return None
    shown = fill[:_FILL_TIMESTEPS]
    requests = sorted({number for groups in shown for here in groups for number in here})
    figure = new_figure(FULL_WIDTH, 0.9 + 0.13 * len(shown[0]))
    axes = figure.add_subplot()
    frame = (0.5, len(shown) + 0.5, len(shown[0]) + 0.5, 0.5)
    axes.imshow(_picture(shown, requests), aspect="auto", interpolation="nearest", extent=frame)
    dress(axes, "timestep", "stage" if row["cluster"]["groups"] == row["cluster"]["stages"] else "group", grid="x")
    axes.set_axisbelow(False)
    axes.grid(False)
    axes.set_yticks(range(1, len(shown[0]) + 1), [str(group) if group % 2 else "" for group in range(1, len(shown[0]) + 1)])
    for number in requests[: len(_REQUEST_COLORS)]:
        axes.plot([], [], marker="s", linestyle="", color=_color(number), label=f"request {number + 1}")
    if len(requests) > len(_REQUEST_COLORS):
        axes.plot([], [], marker="s", linestyle="", color=FAINT, label=f"{len(requests) - len(_REQUEST_COLORS)} more")
    legend_above(figure, axes)
    axes.tick_params(labelsize=TICK_POINTS, colors=TEXT)
    notes = [f"{row['policy']}, {provenance([row])}", "A cell is divided among requests by their rows in it; white: idle"]
    return finish(figure, notes, title)


def _picture(fill: Sequence[Sequence[dict[int, int]]], requests: Sequence[int]) -> numpy.ndarray:
    """The cells as an image [groups, timesteps × _CELL, 3]."""
    import numpy
    from matplotlib.colors import to_rgb

    picture = numpy.ones((len(fill[0]), len(fill) * _CELL, 3))
    for timestep, groups in enumerate(fill):
        for group, here in enumerate(groups):
            column, total = float(timestep * _CELL), sum(here.values())
            for number in requests:
                if number in here:
                    after = column + (_CELL - 1) * here[number] / total  # the last column stays white, between two timesteps
                    picture[group, round(column) : round(after)] = to_rgb(_color(number))
                    column = after
    return picture


def _color(number: int) -> str:
    return _REQUEST_COLORS[number] if number < len(_REQUEST_COLORS) else FAINT
