"""The table of pictures that ``pipedec bench plot`` draws, and drawing all that the rows hold.

Knows each picture by name and file; what it shows is the picture's own module's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pipedec.bench.bita_rows import shown
from pipedec.bench.figure_bars import breakdown_figure, latency_figure
from pipedec.bench.figure_bita import masks_figure, prompt_tokens_figure
from pipedec.bench.figure_lines import misses_figure, speedup_figure, tree_figure
from pipedec.bench.figure_radar import accuracy_figure
from pipedec.bench.figure_sampling import stochastic_figure
from pipedec.bench.figure_series import NoFigure
from pipedec.bench.figure_style import save
from pipedec.bench.sweep_rows import SweepRow, greedy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[Sequence[SweepRow], str | None], "Figure"]


def _of_greedy(draw: Draw) -> Draw:
    """The picture ``draw`` of greedy answers alone."""
    return lambda rows, title: draw(greedy(rows), title)


def _of_methods(draw: Draw) -> Draw:
    """The picture ``draw`` that compares methods: with one BiTA, if there are several."""
    return lambda rows, title: draw(shown(rows), title)


FIGURES: dict[str, Draw] = {
    "latency": _of_methods(_of_greedy(latency_figure)),
    "accuracy": _of_methods(_of_greedy(accuracy_figure)),
    "stochastic": _of_methods(stochastic_figure),
    "tree": _of_greedy(tree_figure),
    "speedup": _of_methods(_of_greedy(speedup_figure)),
    "misses": _of_greedy(misses_figure),
    "breakdown": _of_methods(_of_greedy(breakdown_figure)),
    "prompt-tokens": _of_greedy(prompt_tokens_figure),
    "mask-tokens": _of_greedy(masks_figure),
}


@dataclass(frozen=True)
class Drawn:
    """What became of the pictures: files, and why others were left out (``name (reason)``)."""

    files: tuple[Path, ...]
    left_out: tuple[str, ...]


def draw_figures(
    studies: Mapping[str, Sequence[SweepRow]], out: Path, names: Iterable[str] = tuple(FIGURES), title: str | None = None
) -> Drawn:
    """Draw the pictures called ``names`` into the directory ``out``: each as NAME.png and NAME.svg.

    With rows of several timings there is one of each, NAME-measured.png and so on: they are never mixed in one picture.

    Raises:
        UserError: matplotlib is not installed, or a file cannot be written.
    """
    files: list[Path] = []
    left_out = []
    for name in names:
        for timing, rows in studies.items():
            stem = name if len(studies) == 1 else f"{name}-{timing}"
            try:
                files += save(FIGURES[name](rows, title), out / stem)
            except NoFigure as reason:
                left_out.append(f"{stem} ({reason})")
    return Drawn(tuple(files), tuple(left_out))
