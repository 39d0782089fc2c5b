"""``pipedec bench sweep``: the grid of methods, pipelines and prompts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import click
from rich.table import Table

from pipedec.bench.record import ROWS_FILE, Row
from pipedec.bench.report.style import terminal_table
from pipedec.bench.sweep.benchmark import sweep as run_sweep
from pipedec.bench.sweep.config import SweepConfig
from pipedec.cli.benchmarks import shared
from pipedec.cli.main import moved_flags
from pipedec.cli.options import RunningFlags, refuse_flags, running_options
from pipedec.cli.show import console
from pipedec.config import load_cluster
from pipedec.core.errors import UserError
from pipedec.flags import Help, options_of, own_options, partial_of

MAX_OVERRUN = 0.02
_OPTIONS_NOW = dict.fromkeys(("--widths", "--children", "--forwards", "--proposers", "--shapes", "--depths", "--rows"), True)
# Flags of pipelines that the sweep starts here: a cluster that runs, or is launched from a file, has its own.
_STARTED_HERE = (
    "cluster", "presets", "stages", "clock", "dispatch", "slow_motion", "bita", "target", "draft", "own_work", "priors",
)  # fmt: skip


@dataclass(frozen=True)
class LaunchFlags:
    """Partitions of a ``cluster.yaml`` to launch."""

    launch: Annotated[Path | None, Help("Launch partitions of this cluster.yaml on their hosts.", "FILE")] = None
    partitions: Annotated[tuple[str, ...], Help("With --launch: the partitions (default: the file's own).")] = ()


@click.command()
@partial_of(SweepConfig, "measured")
@shared.question_options
@running_options
@options_of(LaunchFlags, "launching")
@own_options
@moved_flags(_OPTIONS_NOW, "is an option of methods: give --methods NAME:KEY=VALUE, like pipedec:width=16")
def sweep(
    measured: partial[SweepConfig],
    asked: shared.BenchPromptFlags,
    place: RunningFlags,
    launching: LaunchFlags,
    out: shared.OutDirectory,
    bita: Annotated[Path | None, Help("A trained BiTA (default: the shipped one).", "DIR")] = None,
) -> None:
    """Measure methods on pipelines, one row per answer in OUT/rows.jsonl.

    With --preset the stages are real processes that take as long as the preset's devices would for its model; tokens, tree,
    Redis and transfers are real. With --redis, --run or --running the cluster that is running is measured as it is. With --launch
    every partition is launched on its hosts, measured and stopped. Neither emulates anything or needs a checkpoint here.

    Every answer is compared with that of pp: a near tie is recorded in the row, a difference ends the sweep. An interrupted sweep
    resumes where it stopped.
    """
    prompt_sets = asked.prompt_sets()
    config = measured(**asked.settings() | {"pair": replace(asked.pair, bita=bita)} | _real(place, launching))
    shared.make_directory(out)
    with shared.ProgressBar() as bar:
        rows: list[Row] = run_sweep(config, prompt_sets, out, bar)
    shared.print_table(_summary(rows), 110)
    console.print(f"{len(rows)} rows in {out / ROWS_FILE}; figures: pipedec bench plot {out} --out {out}")
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


def _real(place: RunningFlags, launching: LaunchFlags) -> dict[str, Any]:
    """The fields of the configuration about a real cluster, if one is to be measured.

    Raises UserError if flags do not go together, or the file to launch is unsound.
    """
    if launching.launch is not None:
        refuse_flags((*_STARTED_HERE, "redis", "run", "running"), "the clusters are those of --launch: leave this out")
        cluster = load_cluster(launching.launch)
        return {"cluster": cluster, "launched": launching.partitions or (cluster.find_partition()[0],)}
    if launching.partitions:
        raise UserError("--partitions goes with --launch FILE")
    if place.are_given:
        refuse_flags(_STARTED_HERE, shared.AS_IT_IS)
        return {"running": place.connect()}
    return {}


def _summary(rows: list[Row]) -> Table:
    """Figures by pipeline, method and tree: the number of answers, and ratios of their totals."""
    title = "Time per output token (TPOT)" + ", emulated" * rows[0]["emulated"] + ", computed" * (rows[0]["clock"] == "computed")
    names = ("pipeline", "method", "tree")
    table = terminal_table(title, (*names, "answers", "TPOT ms", "timesteps per token", "hit rate", "overran"), names)
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        pipeline = row["preset"] or row["pair"].get("run") or "here"
        groups.setdefault((f"{pipeline} ({row['cluster']['stages']})", row["method"], _tree(row)), []).append(row)
    for key, found in groups.items():
        decoded = sum(row["output_tokens"] - 1 for row in found) or 1
        timesteps, hits = sum(row["timesteps"] for row in found), sum(row["hits"] for row in found)
        verified = hits + sum(row["misses"] for row in found) or 1
        overran = sum(row["overran"] * row["timesteps"] for row in found) / max(1, timesteps)
        table.add_row(
            *key, str(len(found)), f"{sum(row['decode_ms'] for row in found) / decoded:.1f}",
            f"{timesteps / decoded:.2f}", f"{hits / verified:.0%}", f"{overran:.1%}",
        )  # fmt: skip
    return table


def _tree(row: Row) -> str:
    """The limits that were set, or that are the method's own."""
    limits = (row["tree"] or {}).items()
    return ", ".join(f"{name} {value}" for name, value in limits if isinstance(value, int | str)) or "-"
