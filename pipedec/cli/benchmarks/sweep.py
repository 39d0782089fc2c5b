"""``pipedec bench sweep``: the grid of methods, pipelines, trees and prompts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pipedec.cli.benchmarks.shared import PATH, QuestionFlags, numbers, question_options
from pipedec.cli.options import Command, gathered
from pipedec.cli.running import RunningFlags, refuse_flags, running_options
from pipedec.cli.show import console
from pipedec.config import load_cluster
from pipedec.core import UserError
from pipedec.methods import possible_methods

if TYPE_CHECKING:
    from pipedec.bench.sweep.config import SweepConfig
    from pipedec.bench.sweep.trees import TreeGrid

MAX_OVERRUN = 0.02
# Flags of pipelines that the sweep starts here: a cluster that runs, or is launched from a file, has its own.
_STARTED_HERE = ("cluster", "presets", "stages", "clock", "slow_motion", "small", "bita", "target", "draft", "own_work")


@dataclass(frozen=True)
class GridFlags:
    """Pipelines, methods and how they are timed (see ``SweepConfig``)."""

    presets: str | None
    stages: str | None
    methods: str | None
    repeats: int
    clock: str
    slow_motion: float
    small: Path | None
    bita: tuple[Path, ...]

    def config(self, asked: QuestionFlags, trees: TreeFlags, **real: Any) -> SweepConfig:
        """``real``: fields of a configuration that measures a real cluster."""
        from pipedec.bench.sweep.config import SweepConfig
        from pipedec.bench.sweep.pipelines import Pair

        methods = {"methods": tuple(self.methods.split(","))} if self.methods else {}
        return SweepConfig(
            **{**asked.settings(), **real, **methods},
            presets=tuple(self.presets.split(",")) if self.presets else (),
            stages=_numbers("--stages", self.stages),
            trees=trees.grid(),
            bita=self.bita,
            repeats=self.repeats,
            clock=self.clock,
            slow_motion=self.slow_motion,
            pair=Pair(asked.target, asked.draft, self.small),
        )


@dataclass(frozen=True)
class TreeFlags:
    """Limits of the trees (see ``TreeGrid``)."""

    widths: str | None
    children: str | None
    forwards: int | None
    proposers: str
    shapes: str
    depths: str | None
    rows: str | None

    def grid(self) -> TreeGrid:
        from pipedec.bench.sweep.trees import TreeGrid

        return TreeGrid(
            _numbers("--widths", self.widths), _numbers("--children", self.children), self.forwards,
            tuple(self.proposers.split(",")), tuple(self.shapes.split(",")), _numbers("--depths", self.depths),
            _numbers("--rows", self.rows),
        )  # fmt: skip


def grid_options(command: Command) -> Command:
    """Adds these flags; the command gets them as ``grid``."""
    options = [
        click.option("--preset", "presets", help="Emulated clusters, like paper-7,paper-14 (default: this machine itself)."),
        click.option(
            "--stages", help="Numbers of stages, like 1,2,4; with --preset, of devices like its first (default: its own number)."
        ),
        click.option(
            "--methods",
            help="Like pp,bita; also slm: a small model alone (default: pp,stpp,stpp-tuned,pipedec,pipedec-bestfirst; "
            "of a real cluster those of them that it can decode with).",
        ),
        click.option("--bita", multiple=True, type=PATH, help="bita: a trained BiTA (default: the shipped one; repeatable)."),
        click.option("--repeats", type=int, default=1, show_default=True, help="Answers per prompt, each with its own seed."),
        click.option(
            "--clock", default="measured", show_default=True,
            help="measured: real processes; computed: one process, times by arithmetic.",
        ),
        click.option(
            "--slow-motion", type=float, default=4.0, show_default=True, 
            help="Factor on all emulated times; results are divided by it.",
        ),
        click.option("--small", type=PATH, help="The model of the method slm (default: the draft)."),
    ]  # fmt: skip
    return gathered(command, options, GridFlags, "grid")


def tree_options(command: Command) -> Command:
    """Adds these flags; the command gets them as ``trees``."""
    options = [
        click.option("--widths", help="Rows per timestep, like 16,32 (default: adapted by pipedec-bestfirst, 32 for others)."),
        click.option("--children", help="Children per row (default: adapted by pipedec-bestfirst, 1–16 for bita, else 16)."),
        click.option("--forwards", type=int, help="pipedec-bestfirst: draft forwards per timestep (default: what fits)."),
        click.option("--proposers", default="draft,ngrams", show_default=True, help="pipedec-bestfirst: draft sources."),
        click.option("--shapes", default="likeliest", show_default=True, help="bita: likeliest,efficient,straightforward,full."),
        click.option("--depths", help="bita: numbers of masks used, like 1,2,3 (default: all trained masks)."),
        click.option("--rows", help="bita: rows of the likeliest tree, like 32,64 (default: 64)."),
    ]
    return gathered(command, options, TreeFlags, "trees")


@dataclass(frozen=True)
class LaunchFlags:
    """Partitions of a ``cluster.yaml`` to launch."""

    launch: Path | None
    partitions: str | None

    def config(self) -> dict[str, Any]:
        """The fields of a sweep's configuration. Raises UserError if the file or a partition is unsound."""
        assert self.launch is not None
        cluster = load_cluster(self.launch)
        names = self.partitions.split(",") if self.partitions else [cluster.find_partition()[0]]
        for name in names:
            cluster.find_partition(name)
        own = [cluster.for_partition(name) for name in names]
        has_draft, has_bita = all(one.draft != "none" for one in own), all(one.bita != "none" for one in own)
        return {"cluster": cluster, "launched": tuple(names), "methods": _usual(possible_methods(has_draft, has_bita))}


def launch_options(command: Command) -> Command:
    """Adds these flags; the command gets them as ``launching``."""
    options = [
        click.option("--launch", type=PATH, metavar="FILE", help="Launch partitions of this cluster.yaml on their hosts."),
        click.option("--partitions", metavar="NAME,…", help="With --launch: the partitions (default: the file's own)."),
    ]
    return gathered(command, options, LaunchFlags, "launching")


@click.command()
@grid_options
@tree_options
@question_options
@running_options
@launch_options
@click.option("--out", type=PATH, required=True, help="Directory of the results; a second run resumes an interrupted one.")
def sweep(
    grid: GridFlags, trees: TreeFlags, asked: QuestionFlags, place: RunningFlags, launching: LaunchFlags, out: Path
) -> None:
    """Measure methods on pipelines, one row per answer in OUT/rows.jsonl.

    With --preset the stages are real processes that take as long as the preset's devices would for its model; tokens, tree,
    Redis and transfers are real. With --redis, --run or --running the cluster that is running is measured as it is. With --launch
    every partition is launched on its hosts, measured and stopped. Neither emulates anything or needs a checkpoint here.

    Every answer is compared with that of pp: a near tie is recorded in the row, a difference ends the sweep. An interrupted sweep
    resumes where it stopped.
    """
    from pipedec.bench.record import Row
    from pipedec.bench.sweep.benchmark import sweep as run_sweep

    prompt_sets = asked.prompt_sets()
    config = grid.config(asked, trees, **_real(place, launching))
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a directory")
    with ProgressBar() as bar:
        rows: list[Row] = run_sweep(config, prompt_sets, out, bar)
    Console(width=None if Console().is_terminal else 110).print(_summary(rows))
    console.print(f"{len(rows)} rows in {out / 'rows.jsonl'}; figures and tables: pipedec bench plot {out} --out {out}")
    _warn(rows)


def _real(place: RunningFlags, launching: LaunchFlags) -> dict[str, Any]:
    """The fields of the configuration about a real cluster, if one is to be measured."""
    if launching.launch is not None:
        refuse_flags((*_STARTED_HERE, "redis", "run", "running"), "the clusters are those of --launch: leave this out")
        return launching.config()
    if launching.partitions is not None:
        raise UserError("--partitions goes with --launch FILE")
    if place.are_given:
        refuse_flags(_STARTED_HERE, "a running cluster is measured as it is: leave this out, or --redis, --run and --running")
        cluster = place.connect()
        return {"running": cluster, "methods": _usual(cluster.methods())}
    return {}


def _usual(possible: list[str]) -> tuple[str, ...]:
    """The methods of a sweep that are measured if none are given, without those that are not possible."""
    from pipedec.bench.sweep.config import SweepConfig

    return tuple(name for name in SweepConfig.methods if name in possible)


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
    """By pipeline, method and tree: totals of all answers."""
    emulated, computed = rows[0]["emulated"], rows[0]["clock"] == "computed"
    title = "Time per output token (TPOT)" + ", emulated" * emulated + ", computed" * computed
    table = Table(title=title, title_justify="left")
    for name in ("pipeline", "method", "tree"):
        table.add_column(name)
    for name in ("answers", "TPOT ms", "computed", "timesteps per token", "hit rate", "overran"):
        table.add_column(name, justify="right")
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["preset"] or row["pair"].get("run") or "here", row["cluster"]["stages"], row["method"], _tree(row)
        groups.setdefault(key, []).append(row)
    for (preset, stages, method, tree), found in groups.items():
        table.add_row(f"{preset} ({stages})", method, tree, *_totals(found))
    return table


def _totals(rows: list[dict[str, Any]]) -> list[str]:
    """The number of answers, then ratios of their totals."""
    decoded = sum(row["output_tokens"] - 1 for row in rows) or 1
    timesteps, hits = sum(row["timesteps"] for row in rows), sum(row["hits"] for row in rows)
    verified = hits + sum(row["misses"] for row in rows) or 1
    known = [row for row in rows if row["computed_ms_per_token"] is not None]
    computed = sum(row["computed_ms_per_token"] * (row["output_tokens"] - 1) for row in known) / decoded
    overran = sum(row["overran"] * row["timesteps"] for row in rows) / max(1, timesteps)
    return [
        str(len(rows)), f"{sum(row['decode_ms'] for row in rows) / decoded:.1f}", f"{computed:.1f}" if known else "-",
        f"{timesteps / decoded:.2f}", f"{hits / verified:.0%}", f"{overran:.1%}",
    ]  # fmt: skip


def _tree(row: dict[str, Any]) -> str:
    """The limits that the row's method uses."""
    tree = row["tree"]
    if tree is None:
        return "-"
    if row["method"] == "bita":
        rows = f", {tree['rows']} rows" if tree["rows"] else ""
        return f"{row['bita']['name']}: {tree['shape']}, {tree['depth']} masks × {tree['children']}{rows}"
    size = f"{tree['width'] or 'auto'}×{tree['children'] or 'auto'}" if tree["rows"] is None else f"{tree['rows']} rows"
    return f"{size}, depth {tree['depth']}" if row["method"].startswith("stpp") else size


def _warn(rows: list[dict[str, Any]]) -> None:
    ties = [row for row in rows if row.get("divergence")]
    if ties:
        margin = max(row["divergence"]["margin"] or 0.0 for row in ties)
        console.print(
            f"[yellow]{len(ties)} of {len(rows)} answers differ from that of pp after a near tie (at most {margin:.2g} between "
            "two logits): see divergence in their rows.[/yellow]"
        )
    late = sum(row["overran"] > MAX_OVERRUN for row in rows)
    if late:
        console.print(
            f"[yellow]In {late} of {len(rows)} answers more than {MAX_OVERRUN:.0%} of the timesteps took this machine "
            "longer than the emulated devices: these times are too high. Use a larger --slow-motion.[/yellow]"
        )
    if any(not row["cluster"]["fits"] for row in rows):
        console.print("[yellow]Some of these pipelines do not fit into their devices' memory: see pipedec plan.[/yellow]")
