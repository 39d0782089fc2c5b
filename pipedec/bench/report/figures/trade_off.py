"""The trade-off of quality and speed of answers in threads over λ and efficiency terms (PASTA, Figures 4 and 5)."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from pipedec.bench.report.figures.style import COLUMN_WIDTH, FULL_WIDTH, TEXT, TICK_POINTS, dress, finish, new_figure, save

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7")  # by round
_QUANTITIES = (("speedup", "theoretical speed-up"), ("parallelism", "parallelism"))


def draw_trade_off(lines: list[dict[str, Any]], out: Path) -> list[Path]:
    """Write ``trade-off`` into the directory ``out`` as PNG and SVG.

    Args:
        lines: points with ``lambda`` and ``efficiency`` (None: before the first round), ``round``, ``win_rate``, ``speedup`` and
            ``parallelism``.

    Raises:
        UserError: matplotlib is not installed, or a file cannot be written.
    """
    several = len({line["efficiency"] for line in lines if line["efficiency"]}) > 1
    figure = new_figure(FULL_WIDTH, 0.8 * COLUMN_WIDTH)
    both = figure.subplots(1, 2, sharey=True)
    for axes, (name, label) in zip(both, _QUANTITIES, strict=True):
        dress(axes, label, "wins over one thread, %" if name == "speedup" else "", "both")
        axes.margins(x=0.25)  # for the names of the points
        for number, points in groupby(sorted(lines, key=lambda line: line["round"]), lambda line: line["round"]):
            found = list(points)
            colour = TEXT if number == 0 else _COLOURS[(number - 1) % len(_COLOURS)]
            axes.scatter(
                [point[name] for point in found], [100 * point["win_rate"] for point in found], s=28, color=colour,
                marker="*" if number == 0 else "o", label="before" if number == 0 else f"round {number}", zorder=3,
            )  # fmt: skip
            for point in found:
                if point["lambda"] is not None:
                    at = point[name], 100 * point["win_rate"]
                    axes.annotate(
                        _score(point, several), at, (4, 3), textcoords="offset points", fontsize=TICK_POINTS - 1, color=colour
                    )
    both[0].legend(fontsize=TICK_POINTS, frameon=False, labelcolor=TEXT)
    notes = (
        "Greedy answers to held-out prompts",
        "Wins: share of comparisons with the answer in one thread (which has 1 and 50%), by the judge",
    )
    return save(finish(figure, notes, None), out / "trade-off")


def _score(point: dict[str, Any], with_efficiency: bool) -> str:
    weight = "λ = ∞" if point["lambda"] == "inf" else f"λ = {point['lambda']:g}"
    return f"{point['efficiency']}, {weight}" if with_efficiency and point["lambda"] != "inf" else weight
