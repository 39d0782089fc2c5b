"""The figure of load: throughput and latency over the number of requests (the paper's Figure 8). Reads rows; measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pipedec.bench.record import Row
from pipedec.bench.report.figures.style import (
    FULL_WIDTH,
    TEXT,
    TICK_POINTS,
    dress,
    finish,
    log_axis,
    new_figure,
    save,
)
from pipedec.bench.report.looks import method_looks

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LEGEND_COLUMNS = 4
_PANELS = (("throughput (tokens/s)", "tokens_per_s", None), ("TPOT (ms)", "tpot_ms", "mean"), ("TTFT (ms)", "ttft_ms", "mean"))


def load_figure(rows: Sequence[Row], title: str | None = None) -> Figure | None:
    """Throughput, time per output token and time to first token over the load, a line for each method; None of a single load."""
    rows = [row for row in rows if row["max_num_seqs"] == rows[0]["max_num_seqs"]]
    by_rate = all(row["pattern"]["rate"] is not None for row in rows)
    key = "rate" if by_rate else "concurrency"
    rows = [row for row in rows if row["pattern"][key] is not None]
    loads = sorted({row["pattern"][key] for row in rows})
    if len(loads) < 2:
        return None
    figure = new_figure(FULL_WIDTH, 2.5)
    panels = figure.subplots(1, len(_PANELS))
    for axes, (label, name, part) in zip(panels, _PANELS, strict=True):
        highest = _lines(axes, rows, key, name, part)
        dress(axes, "requests per second" if by_rate else "concurrent requests", label, grid="both")
        log_axis(axes, "x", loads)
        axes.set_ylim(0, 1.08 * highest)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(
        handles, names, loc="outside upper left", ncols=min(len(names), _LEGEND_COLUMNS), frameon=False, fontsize=TICK_POINTS,
        labelcolor=TEXT,
    )  # fmt: skip
    return finish(figure, [provenance(rows), f"Means over {_counts(rows)} requests"], title)


def _lines(axes: Axes, rows: Sequence[Row], key: str, name: str, part: str | None) -> float:
    """A line for each policy. Returns the highest value."""
    looks, highest = method_looks(row["method"] for row in rows), 0.0
    names = list(dict.fromkeys(row["policy"] for row in rows))
    for policy in sorted(names, key=lambda one: list(looks).index(one.partition(":")[0])):
        look = looks[policy.partition(":")[0]]
        label = policy if ":" in policy else look.name()
        own = [row for row in rows if row["policy"] == policy]
        values = {row["pattern"][key]: row[name] if part is None else (row[name] or {}).get(part) for row in own}
        points = sorted((load, value) for load, value in values.items() if value is not None)
        axes.plot(*zip(*points, strict=True), color=look.color, marker=look.marker, markersize=4, linewidth=1.4, label=label)
        highest = max(highest, *(value for _, value in points))
    return highest


def provenance(rows: Sequence[Row]) -> str:
    """Cluster, clock and version of the rows, for small print."""
    row = rows[0]
    cluster = row["cluster"]
    name = cluster.get("preset") or f"run {cluster.get('run')}"
    tasks = ", single tasks" if cluster.get("dispatch") == "tasks" else ""
    clock = f"{'emulated, ' if cluster.get('preset') else ''}times {row['clock']}"
    return f"{name} ({cluster['stages']} stages{tasks}), {clock}, pipedec {row['version']} {row['revision'][:8]}"


def _counts(rows: Sequence[Row]) -> str:
    counts = sorted({row["requests"] for row in rows})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def draw(figures: dict[str, Figure | None], out: Path) -> list[Path]:
    """Write those that there are into the directory ``out``. Raises UserError if they cannot be written."""
    return [path for name, figure in figures.items() if figure is not None for path in save(figure, out / name)]
