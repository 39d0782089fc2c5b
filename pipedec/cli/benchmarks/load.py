"""``pipedec bench load``: many requests at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
from rich.console import Console

from pipedec.bench.load.benchmark import LoadConfig, bench_load
from pipedec.bench.load.figures import draw, load_figure
from pipedec.bench.load.flags import LoadFlags, LoadPipelineFlags
from pipedec.bench.load.places import OnProcesses, OnRunning, Place
from pipedec.bench.load.questions import drawn_in_turn, led_by
from pipedec.bench.load.summary import load_table
from pipedec.bench.options import Drawing
from pipedec.bench.record import ROWS_FILE, append_rows
from pipedec.cli.benchmarks.shared import BenchPromptFlags, ProgressBar, check_directory, print_files, question_options
from pipedec.cli.moved import moved_flags
from pipedec.cli.running import RunningFlags, refuse_flags, running_options
from pipedec.config.settings import Dispatch
from pipedec.core import UserError
from pipedec.flags import Help, options_of, own_options, partial_of

_STARTED_HERE = (
    "preset", "stages", "dispatch", "slow_motion", "max_num_seqs", "target", "draft", "cluster", "kv_tokens", "prefix_cache",
)  # fmt: skip
_MOVED_FLAGS = {
    "--replay": False, "--recording": True, "--random": True, "--intruder": True, "--llama-cpp": True, "--own-work": False,
    "--no-own-work": False, "--samples": True,
}  # fmt: skip


@dataclass(frozen=True)
class ProcessFlags(LoadPipelineFlags):
    """An emulated pipeline in real processes."""

    dispatch: Dispatch = "windows"
    slow_motion: Annotated[float, Help("Factor on all emulated times; results are divided by it.")] = 1.0


@click.command()
@options_of(ProcessFlags, "where")
@options_of(LoadFlags, "offered")
@partial_of(LoadConfig, "configured")
@question_options
@options_of(Drawing, "drawing", only=("seed", "raw_prompts"))
@running_options
@own_options
@moved_flags(_MOVED_FLAGS, "is now of python -m benchmarks.load, in a checkout of pipedec")
def load(
    where: ProcessFlags,
    offered: LoadFlags,
    configured: Callable[..., LoadConfig],
    asked: BenchPromptFlags,
    drawing: Drawing,
    place: RunningFlags,
    out: Annotated[Path, Help("Directory of the results: rows.jsonl and pictures.", "DIR")],
) -> None:
    """Offer many requests at once: a fixed number at a time, or at random times; one row per method and load.

    With --redis, --run or --running they go to the cluster that runs; with --preset to an emulated cluster in real processes.

    Reports the time to first token (TTFT), between events that bring tokens (ITL), per output token (TPOT) and end to end,
    throughput over all and while the load is full, and goodput. Appends to OUT/rows.jsonl and draws OUT/load.
    """
    config = configured(
        policies=offered.policies(), patterns=offered.patterns(), goals=offered.goals(), sampling=asked.sampling,
        seed=drawing.seed,
    )  # fmt: skip
    check_directory(out)
    out.mkdir(parents=True, exist_ok=True)
    request = config.request(drawing.raw_prompts)
    rows = []
    with _place(where, asked, place, out) as pipeline, ProgressBar() as bar:
        if config.turns > 1 and not request.raw:
            raise UserError("--turns continues a conversation as text: give --raw-prompt")
        drawn = drawn_in_turn(pipeline.prompter, asked.prompt_sets(), request, config.most, config.seed, config.turns)
        for measured in bench_load(config, pipeline, led_by(offered.system_text(), drawn, pipeline.prompter), bar):
            append_rows(out / ROWS_FILE, [measured.row])
            rows.append(measured.row)
    Console(width=None if Console().is_terminal else 150).print(load_table(rows))
    print_files(out / ROWS_FILE, *draw({"load": load_figure(rows)}, out))


def _place(where: ProcessFlags, asked: BenchPromptFlags, place: RunningFlags, out: Path) -> Place:
    if place.are_given:
        refuse_flags(_STARTED_HERE, "a running cluster is measured as it is: leave this out, or --redis, --run and --running")
        return OnRunning(place.connect(), out / "prompts.json")
    if where.preset is None:
        raise UserError("where? give --preset NAME, or --running, --redis or --run for a running cluster")
    return OnProcesses(where.shape(asked.config, asked.pair, where.slow_motion).dispatched(where.dispatch))
