"""The pictures of BiTA: against the number of prompt tokens (BiTA Figure 8), and of masks (BiTA Figure 9).

Knows rows of one timing (``sweep_rows.studies``) and draws them; it reads and writes no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipedec.bench.bita_rows import Compared, by_masks, by_prompt_tokens, fixed_text, mean
from pipedec.bench.figure_series import prompt_set_rank, provenance
from pipedec.bench.figure_style import FULL_WIDTH, TEXT, TICK_POINTS, dress, finish, log_axis, new_figure
from pipedec.bench.sweep_rows import PROMPT_SETS, SweepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#8C6D31")
_MARKERS = ("o", "^", "s", "v", "D", "P", "X")


def prompt_tokens_figure(rows: Sequence[SweepRow], title: str | None = None) -> Figure:
    """Speed-up and tokens per pass against the length of a deep prompt, one line per prompt set and one of their mean."""
    compared = by_prompt_tokens(rows)
    figure, panels = _draw(compared, "prompt tokens")
    for axes in panels:
        log_axis(axes, "x", list(compared.points))
    return finish(figure, _notes(compared), title)


def masks_figure(rows: Sequence[SweepRow], title: str | None = None) -> Figure:
    """Speed-up and tokens per pass against the number of masks used, one line per prompt set and one of their mean."""
    compared = by_masks(rows)
    figure, panels = _draw(compared, "masks used")
    for axes in panels:
        axes.set_xticks(list(compared.points))
    return finish(figure, _notes(compared), title)


def _draw(compared: Compared[int], x_label: str) -> tuple[Figure, list[Axes]]:
    """Speed-ups on the left, tokens per pass on the right, the legend beside them."""
    figure = new_figure(FULL_WIDTH, 2.6)
    panels = list(figure.subplots(1, 2))
    names = sorted(compared.baseline.sets, key=prompt_set_rank)
    labels = ("speed-up over PP (×)", "tokens per pass")
    for axes, by_set, label in zip(panels, (compared.speedups, compared.tokens_per_pass), labels, strict=True):
        figures = {value: by_set(value) for value in compared.points}
        for place, name in enumerate(names):
            look = {"color": _COLORS[place % len(_COLORS)], "marker": _MARKERS[place % len(_MARKERS)]}
            heights = [by_name[name] for by_name in figures.values()]
            axes.plot(list(figures), heights, linewidth=1.1, markersize=4, label=PROMPT_SETS.get(name, name), **look)
        if len(names) > 1:
            means = [mean(by_name) for by_name in figures.values()]
            axes.plot(list(figures), means, color=TEXT, linewidth=2.2, label="mean", zorder=3)
        dress(axes, x_label, label)
    panels[1].legend(
        loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=TICK_POINTS, labelcolor=TEXT, handlelength=1.8
    )
    return figure, panels


def _notes(compared: Compared[int]) -> list[str]:
    stages = f"{compared.baseline.groups} stages" if compared.baseline.groups > 1 else ""
    means = "Means: geometric over prompt sets" if len(compared.baseline.sets) > 1 else ""
    return [provenance(compared.series, "point"), stages, fixed_text(compared.points.values()), means]
