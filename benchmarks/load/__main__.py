"""``python -m benchmarks.load``: many requests at once, on recorded answers in computed time, or on llama.cpp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
from rich.console import Console

from benchmarks.load.beside import POLICY, OnLlamaCpp
from benchmarks.load.disturbance import ReplayedLoadConfig, disturbance_text, disturbed
from benchmarks.load.fill import fill_figure
from benchmarks.load.random_prompts import random_prompts
from benchmarks.load.replayed import OnReplay
from pipedec.bench.load.benchmark import bench_load
from pipedec.bench.load.offered import Conversation, drawn_in_turn, led_by
from pipedec.bench.load.results import draw, load_figure, load_table, row_name
from pipedec.bench.options import Drawing
from pipedec.bench.record import ROWS_FILE, append_rows
from pipedec.cli.benchmarks.load import LoadFlags, LoadPipelineFlags
from pipedec.cli.benchmarks.shared import BenchPromptFlags, ProgressBar, check_directory, print_files, question_options
from pipedec.cli.options import refuse_flags
from pipedec.core import UserError
from pipedec.flags import Help, options_of, own_options, partial_of, run_command
from pipedec.messages import PromptRequest

_OF_THE_REPLAY = (
    "preset", "stages", "recording", "methods", "target", "draft", "cluster", "own_work", "intruder", "random_tokens", "turns",
    "kv_tokens", "prefix_cache",
)  # fmt: skip


@dataclass(frozen=True)
class ReplayFlags(LoadPipelineFlags):
    """An emulated pipeline through which recorded answers pass, or llama.cpp."""

    recording: Annotated[Path | None, Help("Directory of recorded answers; missing ones are recorded.", "DIR")] = None
    random_tokens: Annotated[int | None, Help("Prompts of N random tokens.", flag="--random")] = None
    llama_cpp: Annotated[Path | None, Help("Or llama.cpp, in this process (xllamacpp).", "FILE.gguf|smollm2")] = None


@click.command()
@options_of(ReplayFlags, "where")
@options_of(LoadFlags, "offered")
@partial_of(ReplayedLoadConfig, "configured")
@question_options
@options_of(Drawing, "drawing", only=("seed", "raw_prompts", "own_work"))
@own_options
def load(
    where: ReplayFlags,
    offered: LoadFlags,
    configured: Callable[..., ReplayedLoadConfig],
    asked: BenchPromptFlags,
    drawing: Drawing,
    out: Annotated[Path, Help("Directory of the results: rows.jsonl and pictures.", "DIR")],
) -> None:
    """Offer many requests at once, as `pipedec bench load` does; one row per method and load.

    With --preset recorded answers pass through an emulated cluster in computed time: minutes instead of hours. With --llama-cpp
    requests go to llama.cpp, with a slot for each of --max-num-seqs of them.

    Appends to OUT/rows.jsonl and draws OUT/load, and OUT/fill: who occupies which stage at which timestep, of the load that
    yields the most tokens per timestep.
    """
    settings = offered.settings() if where.llama_cpp is None else offered.settings() | {"policies": (POLICY,)}
    config = configured(**settings, sampling=asked.sampling, seed=drawing.seed)
    check_directory(out)
    out.mkdir(parents=True, exist_ok=True)
    request = config.request(drawing.raw_prompts)
    place = _place(where, asked, drawing.own_work, request)
    conversations, intruder = _conversations(where, offered, asked, config, place, request)
    loads = []
    with ProgressBar() as bar:
        for measured in bench_load(config, place, conversations, bar):
            if intruder is not None:
                measured.row["intruder"] = disturbed(measured, place, intruder)
            append_rows(out / ROWS_FILE, [measured.row])
            loads.append(measured)
    rows = [one.row for one in loads]
    page = Console(width=None if Console().is_terminal else 150)
    page.print(load_table(rows))
    for row in rows:
        if late := row.get("intruder"):
            page.print(f"{row_name(row)}: {disturbance_text(late)}")
    fullest = max(loads, key=lambda one: one.row["tokens_per_timestep"] or 0.0)
    files = draw({"load": load_figure(rows), "fill": fill_figure(fullest.outcome.fill, fullest.row)}, out)
    print_files(out / ROWS_FILE, *files)


def _place(where: ReplayFlags, asked: BenchPromptFlags, own_work: bool, request: PromptRequest) -> OnReplay | OnLlamaCpp:
    if where.llama_cpp is not None:
        refuse_flags(_OF_THE_REPLAY, "--llama-cpp is a place of its own: leave this out")
        return OnLlamaCpp(where.llama_cpp)
    if where.preset is None:
        raise UserError("where? give --preset NAME, or --llama-cpp FILE")
    return OnReplay(where.shape(asked.config, asked.pair, own_work=own_work), where.recording, request)


def _conversations(
    where: ReplayFlags,
    offered: LoadFlags,
    asked: BenchPromptFlags,
    config: ReplayedLoadConfig,
    place: OnReplay | OnLlamaCpp,
    request: PromptRequest,
) -> tuple[list[Conversation], Conversation | None]:
    """Those of the longest load, and the intruder."""
    intruder = None
    if isinstance(place, OnReplay):
        if config.intruder is not None:
            (intruder,) = random_prompts(config.intruder, place.vocabulary, request, 1, config.seed + 1)
        if where.random_tokens is not None:
            refuse_flags(("system_prompt",), "has text, and --random prompts have none")
            drawn = random_prompts(where.random_tokens, place.vocabulary, request, config.most, config.seed, config.turns)
            return drawn, intruder
        if not place.is_recording:
            raise UserError("give --recording DIR, where the target's answers are kept, or --random N")
    drawn = drawn_in_turn(place.prompter, asked.prompt_sets(), request, config.most, config.seed, config.turns)
    return led_by(offered.system_text(), drawn, place.prompter), intruder


if __name__ == "__main__":
    run_command(load)
