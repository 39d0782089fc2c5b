"""``pipedec bench load``: many requests at once; and the options of all commands that offer load."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import click

from pipedec.bench.load.benchmark import LoadConfig, OnProcesses, OnRunning, Place, bench_load
from pipedec.bench.load.offered import Pattern, drawn_in_turn, led_by, parse_policies
from pipedec.bench.load.results import Goals, draw, load_figure, load_table
from pipedec.bench.options import Drawing, Preset, Priors, StageCount
from pipedec.bench.record import ROWS_FILE, append_rows
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated
from pipedec.cli.benchmarks import shared
from pipedec.cli.main import moved_flags
from pipedec.cli.options import RunningFlags, refuse_flags, running_options
from pipedec.config import ClusterConfig
from pipedec.config.settings import Dispatch
from pipedec.core.errors import UserError
from pipedec.flags import Help, options_of, own_options, partial_of


@dataclass(frozen=True)
class LoadPipelineFlags:
    """An emulated pipeline and its KV memory."""

    preset: Preset | None = None
    stages: StageCount = None
    kv_tokens: Annotated[int | None, Help("Tokens for which there is KV memory (default: the preset's).")] = None
    prefix_cache: Annotated[
        bool, Help("Let requests with equal beginnings share their keys and values.", flag="--prefix-cache/--no-prefix-cache")
    ] = True

    def shape(
        self, config: ClusterConfig, pair: ModelPair, slow_motion: float = 1.0, own_work: bool = True, priors: bool = False
    ) -> Shape:
        """The pipeline. Raises UserError for an unknown preset, or less memory than a block of the cache."""
        assert self.preset is not None
        shape = emulated(config, self.preset, self.stages, pair, slow_motion, own_work, priors)
        emulation = shape.spec.emulation
        assert emulation is not None
        if self.kv_tokens is not None:
            if self.kv_tokens < shape.spec.kv_block:
                raise UserError(f"--kv-tokens must be at least {shape.spec.kv_block}, one block, not {self.kv_tokens}")
            emulation = replace(emulation, kv_tokens=self.kv_tokens)
        return replace(shape, spec=replace(shape.spec.replaced(prefix_cache=self.prefix_cache), emulation=emulation))


@dataclass(frozen=True)
class LoadFlags:
    """Which load is offered, and which requests are counted."""

    methods: Annotated[
        tuple[str, ...],
        Help("Methods, or one with options like pipedec:width=8; may be repeated.", "NAME,…|NAME:KEY=VALUE,…", "--method",
             repeated=True),
    ] = ("pp,pipedec-bestfirst",)  # fmt: skip
    concurrency: Annotated[tuple[int, ...], Help("Numbers of requests that are unfinished at any time, like 1,4,16.")] = ()
    rate: Annotated[tuple[float, ...], Help("Or mean numbers of requests per second, like 0.5,1,2 (a Poisson process).")] = ()
    goodput: Annotated[tuple[str, ...], Help("Count the requests that meet these times.", "ttft:MS,tpot:MS", repeated=True)] = ()
    system_prompt: Annotated[Path | None, Help("Put this text before the first prompt of each.", "FILE")] = None

    def settings(self) -> dict[str, Any]:
        """Fields of a load's configuration. Raises UserError for an unknown method, option or goal, or a wrong number."""
        patterns = (*(Pattern(concurrency=each) for each in self.concurrency), *(Pattern(rate=each) for each in self.rate))
        goals: dict[str, float] = {}
        for part in (part for text in self.goodput for part in text.split(",")):
            name, _, value = part.partition(":")
            try:
                goals[{"ttft": "ttft_ms", "tpot": "tpot_ms"}[name]] = float(value)
            except (KeyError, ValueError):
                raise UserError(f"--goodput {part}: write ttft:MS or tpot:MS, like ttft:500,tpot:60") from None
        return {"policies": parse_policies(self.methods, "--method"), "patterns": patterns, "goals": Goals(**goals)}

    def system_text(self) -> str:
        """The text before the first prompt; empty if there is none. Raises UserError if the file cannot be read."""
        if self.system_prompt is None:
            return ""
        try:
            return self.system_prompt.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--system-prompt {self.system_prompt}: cannot be read as UTF-8 text ({error})") from None


_STARTED_HERE = (
    "preset", "stages", "dispatch", "slow_motion", "max_num_seqs", "target", "draft", "cluster", "kv_tokens", "prefix_cache",
    "priors",
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
    priors: Priors = True


@click.command()
@options_of(ProcessFlags, "where")
@options_of(LoadFlags, "offered")
@partial_of(LoadConfig, "configured")
@shared.question_options
@options_of(Drawing, "drawing", only=("seed", "raw_prompts"))
@running_options
@own_options
@moved_flags(_MOVED_FLAGS, "has moved to python -m benchmarks.load, in a checkout of pipedec")
def load(
    where: ProcessFlags,
    offered: LoadFlags,
    configured: Callable[..., LoadConfig],
    asked: shared.BenchPromptFlags,
    drawing: Drawing,
    place: RunningFlags,
    out: Annotated[Path, Help("Directory of the results: rows.jsonl and pictures.", "DIR")],
) -> None:
    """Offer many requests at once: a fixed number at a time, or at random times; one row per method and load.

    With --redis, --run or --running they go to the cluster that runs; with --preset to an emulated cluster in real processes.

    Reports the time to first token (TTFT), between events that bring tokens (ITL), per output token (TPOT) and end to end,
    throughput over all and while the load is full, and goodput. Appends to OUT/rows.jsonl and draws OUT/load.
    """
    config = configured(**offered.settings(), sampling=asked.sampling, seed=drawing.seed)
    shared.make_directory(out)
    request = config.request(drawing.raw_prompts)
    rows = []
    with ExitStack() as clusters, shared.ProgressBar() as bar:
        if place.are_given:
            refuse_flags(_STARTED_HERE, shared.AS_IT_IS)
            pipeline: Place = OnRunning(place.connect(), out / "prompts.json")
        elif where.preset is None:
            raise UserError("where? give --preset NAME, or --running, --redis or --run for a running cluster")
        else:
            shape = where.shape(asked.config, asked.pair, where.slow_motion, priors=where.priors).dispatched(where.dispatch)
            pipeline = OnProcesses(shape, clusters)
        if config.turns > 1 and not request.raw:
            raise UserError("--turns continues a conversation as text: give --raw-prompt")
        drawn = drawn_in_turn(pipeline.prompter, asked.prompt_sets(), request, config.most, config.seed, config.turns)
        for measured in bench_load(config, pipeline, led_by(offered.system_text(), drawn, pipeline.prompter), bar):
            append_rows(out / ROWS_FILE, [measured.row])
            rows.append(measured.row)
    shared.print_table(load_table(rows), 150)
    shared.print_files(out / ROWS_FILE, *draw({"load": load_figure(rows)}, out))
