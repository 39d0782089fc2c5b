"""All figures of ``pipedec bench plot`` by name, and drawing those that the rows contain."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from pipedec.bench.report.ablations import one_bita
from pipedec.bench.report.figures.bars import breakdown_figure, latency_figure
from pipedec.bench.report.figures.bita import masks_figure, prompt_tokens_figure
from pipedec.bench.report.figures.lines import misses_figure, speedup_figure, tree_figure
from pipedec.bench.report.figures.radar import accuracy_figure
from pipedec.bench.report.figures.stochastic import stochastic_figure
from pipedec.bench.report.figures.style import save
from pipedec.bench.report.frames import greedy
from pipedec.bench.report.missing import NoFigure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Draw = Callable[[pd.DataFrame, str | None], "Figure"]


def _of_greedy(draw: Draw) -> Draw:
    """``draw`` with the greedy answers alone."""
    return lambda answers, title: draw(greedy(answers), title)


def _of_methods(draw: Draw) -> Draw:
    """``draw``, which compares methods, with one BiTA if there are several."""
    return lambda answers, title: draw(one_bita(answers), title)


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
    """The files that were written, and why other figures were left out (``name (reason)``)."""

    files: tuple[Path, ...]
    left_out: tuple[str, ...]


def draw_figures(
    studies: Mapping[str, pd.DataFrame], out: Path, names: Iterable[str] = tuple(FIGURES), title: str | None = None
) -> Drawn:
    """Draw the figures called ``names`` into the directory ``out``, each as NAME.png and NAME.svg.

    With answers of several timings there is a figure of each (NAME-measured.png, …): one figure never mixes them.

    Raises:
        UserError: matplotlib is not installed, or a file cannot be written.
    """
    files: list[Path] = []
    left_out = []
    for name in names:
        for timing, answers in studies.items():
            stem = name if len(studies) == 1 else f"{name}-{timing}"
            try:
                files += save(FIGURES[name](answers, title), out / stem)
            except NoFigure as reason:
                left_out.append(f"{stem} ({reason})")
    return Drawn(tuple(files), tuple(left_out))
