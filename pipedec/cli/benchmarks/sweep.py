"""``pipedec bench sweep``: the grid of methods, pipelines, trees and prompts."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pipedec.cli.benchmarks.shared import PATH, QuestionFlags, numbers, question_options
from pipedec.cli.show import console
from pipedec.core import UserError

if TYPE_CHECKING:
    from pipedec.bench.sweep import SweepConfig
    from pipedec.bench.sweep_trees import TreeGrid

MAX_OVERRUN = 0.02


@click.command()
@click.option(
    "--preset", "presets", help="Emulated clusters, like paper-7,paper-14,paper-21 (default: none, this machine as it is)."
)
@click.option("--stages", help="Stage counts, like 1,2,4: of a preset's first device, or real ones without a preset.")
@click.option(
    "--methods", default="pp,stpp,stpp-tuned,pipedec,pipedec-bestfirst", show_default=True,
    help="Also bita, and slm: a small model alone.",
)  # fmt: skip
@click.option("--widths", help="Rows per timestep, like 16,32 (default: pipedec-bestfirst finds its own, others 32).")
@click.option("--children", help="Children per row (default: pipedec-bestfirst finds its own, bita 1 to 16 by shape, others 16).")
@click.option("--forwards", type=int, help="pipedec-bestfirst: draft forwards per timestep (default: what fits).")
@click.option("--proposers", default="draft,ngrams", show_default=True, help="pipedec-bestfirst: who may name tokens.")
@click.option(
    "--bita", multiple=True, type=PATH, help="bita: a directory with a trained one (default: the shipped one); several times."
)
@click.option("--shapes", default="likeliest", show_default=True, help="bita: of likeliest,efficient,straightforward,full.")
@click.option("--depths", help="bita: masks used, like 1,2,3 (default: all that were trained).")
@click.option("--rows", help="bita: rows of the likeliest tree, like 32,64 (default: 64).")
@question_options
@click.option("--repeats", type=int, default=1, show_default=True, help="Answers per prompt, drawn by the seed plus 0, 1, …")
@click.option(
    "--clock", default="measured", show_default=True, help="measured: real processes; computed: one process, times by arithmetic."
)
@click.option(
    "--slow-motion", type=float, default=4.0, show_default=True, help="Stretches emulated times; figures are divided back."
)
@click.option("--small", type=PATH, help="The model that works as slm (default: the draft).")
@click.option("--out", type=PATH, required=True, help="Directory of the results; a second run goes on where the first stopped.")
def sweep(asked: QuestionFlags, out: Path, **flags: Any) -> None:
    """Measure methods on pipelines, one row per answer in OUT/rows.jsonl.

    With --preset the stages are real processes that take as long as the preset's devices would for its model; tokens, tree,
    Redis and transfers are real. An interrupted sweep goes on where it stopped.
    """
    from pipedec.bench.record import Row
    from pipedec.bench.sweep import sweep as run_sweep

    config, prompt_sets = _config(asked, **flags), asked.prompt_sets()
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: it is no directory")
    with ProgressBar() as bar:
        rows: list[Row] = run_sweep(config, prompt_sets, out, bar)
    Console(width=None if Console().is_terminal else 110).print(_summary(rows))
    console.print(f"{len(rows)} rows in {out / 'rows.jsonl'}; pictures and tables: pipedec bench plot {out} --out {out}")
    _warn(rows)


def _config(
    asked: QuestionFlags, presets: str | None, stages: str | None, methods: str, bita: tuple[Path, ...], repeats: int, clock: str,
    slow_motion: float, small: Path | None, **trees: Any,
) -> SweepConfig:  # fmt: skip
    from pipedec.bench.sweep import SweepConfig
    from pipedec.bench.sweep_shapes import Pair

    return SweepConfig(
        **asked.settings(),
        presets=tuple(presets.split(",")) if presets else (),
        stages=_numbers("--stages", stages),
        methods=tuple(methods.split(",")),
        trees=_trees(**trees),
        bita=bita,
        repeats=repeats,
        clock=clock,
        slow_motion=slow_motion,
        pair=Pair(asked.target, asked.draft, small),
    )


def _trees(
    widths: str | None,
    children: str | None,
    forwards: int | None,
    proposers: str,
    shapes: str,
    depths: str | None,
    rows: str | None,
) -> TreeGrid:
    from pipedec.bench.sweep_trees import TreeGrid

    return TreeGrid(
        _numbers("--widths", widths), _numbers("--children", children), forwards, tuple(proposers.split(",")),
        tuple(shapes.split(",")), _numbers("--depths", depths), _numbers("--rows", rows),
    )  # fmt: skip


def _numbers(flag: str, text: str | None) -> tuple[int, ...]:
    return numbers(flag, text) if text else ()


class ProgressBar:
    """The sweep's progress, with the time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._task = self._progress.add_task("sweep", total=None)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def start(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def busy(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def row(self) -> None:
        self._progress.advance(self._task)


def _summary(rows: list[dict[str, Any]]) -> Table:
    """Per pipeline and method: latency per token over all answers, and what it rests on."""
    title = (
        "Latency per token"
        + (", emulated" if rows[0]["emulated"] else "")
        + (", computed" if rows[0]["clock"] == "computed" else "")
    )
    table = Table(title=title, title_justify="left")
    for name in (
        "pipeline",
        "method",
        "tree",
        "answers",
        "ms per token",
        "computed",
        "timesteps per token",
        "hit rate",
        "overran",
    ):
        table.add_column(name, justify="left" if name in ("pipeline", "method", "tree") else "right")
    cells = defaultdict(list)
    for row in rows:
        cells[(row["preset"] or "here", row["cluster"]["stages"], row["method"], _tree(row))].append(row)
    for (preset, stages, method, tree), found in cells.items():
        decoded = sum(row["output_tokens"] - 1 for row in found) or 1
        judged = sum(row["hits"] + row["misses"] for row in found) or 1
        computed = [row["computed_ms_per_token"] for row in found if row["computed_ms_per_token"] is not None]
        expected = sum(
            row["computed_ms_per_token"] * (row["output_tokens"] - 1)
            for row in found
            if computed and row["computed_ms_per_token"]
        )
        timesteps = sum(row["timesteps"] for row in found)
        overran = sum(row["overran"] * row["timesteps"] for row in found) / max(1, timesteps)
        table.add_row(
            f"{preset} ({stages})", method, tree, str(len(found)), f"{sum(row['decode_ms'] for row in found) / decoded:.1f}",
            f"{expected / decoded:.1f}" if computed else "-", f"{timesteps / decoded:.2f}",
            f"{sum(row['hits'] for row in found) / judged:.0%}", f"{overran:.1%}",
        )  # fmt: skip
    return table


def _tree(row: dict[str, Any]) -> str:
    """The limits that matter to the row's method."""
    tree = row["tree"]
    if tree is None:
        return "-"
    if row["method"] == "bita":
        rows = f", {tree['rows']} rows" if tree["rows"] else ""
        return f"{row['bita']['name']}: {tree['shape']}, {tree['depth']} masks × {tree['children']}{rows}"
    size = f"{tree['width'] or 'auto'}×{tree['children'] or 'auto'}" if tree["rows"] is None else f"{tree['rows']} rows"
    return f"{size}, depth {tree['depth']}" if row["method"].startswith("stpp") else size


def _warn(rows: list[dict[str, Any]]) -> None:
    late = sum(row["overran"] > MAX_OVERRUN for row in rows)
    if late:
        console.print(
            f"[yellow]In {late} of {len(rows)} answers more than {MAX_OVERRUN:.0%} of the timesteps took this machine "
            "longer than the emulated devices: these figures are too high. Use a larger --slow-motion.[/yellow]"
        )
    if any(not row["cluster"]["fits"] for row in rows):
        console.print("[yellow]Some of these pipelines do not fit into their devices' memory: see pipedec plan.[/yellow]")
