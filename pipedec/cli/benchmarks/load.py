"""``pipedec bench load``: many requests at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec import structs
from rich.console import Console
from rich.table import Table

from pipedec.bench.load.arrivals import Pattern
from pipedec.bench.load.benchmark import LoadConfig, bench_load
from pipedec.bench.load.beside import POLICY, OnLlamaCpp
from pipedec.bench.load.figures import draw, fill_figure, load_figure
from pipedec.bench.load.places import OnProcesses, OnReplay, OnRunning, Place
from pipedec.bench.load.questions import Conversation, drawn_in_turn, led_by, random_prompts
from pipedec.bench.load.served import Goals
from pipedec.bench.options import Drawing, Preset, StageCount
from pipedec.bench.policy.study import Policy
from pipedec.bench.record import ROWS_FILE, append_rows
from pipedec.bench.sweep.pipelines import Shape, emulated
from pipedec.cli.benchmarks.shared import QuestionFlags, question_options
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.cli.running import RunningFlags, refuse_flags, running_options
from pipedec.cli.show import console
from pipedec.config.settings import Dispatch
from pipedec.core import UserError
from pipedec.flags import Help, options_of, own_options, partial_of
from pipedec.messages import PromptRequest

_STARTED_HERE = (
    "preset", "stages", "dispatch", "slow_motion", "replay", "recording", "max_num_seqs", "target", "draft", "cluster",
    "own_work", "kv_tokens", "prefix_cache",
)  # fmt: skip
_ELSEWHERE = (
    "preset", "stages", "dispatch", "slow_motion", "replay", "recording", "methods", "target", "draft", "cluster", "own_work",
    "intruder", "random_tokens", "turns", "kv_tokens", "prefix_cache",
)  # fmt: skip
_COLUMNS = (
    "tokens/s", "steady", "× first", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "end to end s", "timesteps", "rows",
    "own ms",
)  # fmt: skip


@dataclass(frozen=True)
class PlaceFlags:
    """Where load is offered, besides a cluster that runs."""

    preset: Preset | None = None
    stages: StageCount = None
    dispatch: Dispatch = "windows"
    replay: Annotated[bool, Help("Replay recorded answers through the preset, in computed time.")] = False
    recording: Annotated[Path | None, Help("With --replay: directory of recorded answers; missing ones are recorded.", "DIR")] = (
        None
    )
    slow_motion: Annotated[float, Help("In real processes: factor on all emulated times; results are divided by it.")] = 1.0
    kv_tokens: Annotated[int | None, Help("Tokens for which there is KV memory (default: the preset's).")] = None
    prefix_cache: Annotated[
        bool,
        Help("Let requests with equal beginnings share their keys and values.", flag="--prefix-cache/--no-prefix-cache"),
    ] = True
    llama_cpp: Annotated[Path | None, Help("Or llama.cpp, in this process (xllamacpp).", "FILE.gguf|smollm2")] = None

    def applied_to(self, shape: Shape) -> Shape:
        """With the KV memory that these flags ask for."""
        emulation = shape.spec.emulation
        assert emulation is not None
        if self.kv_tokens is not None:
            if self.kv_tokens < shape.spec.kv_block:
                raise UserError(f"--kv-tokens must be at least {shape.spec.kv_block}, one block, not {self.kv_tokens}")
            emulation = replace(emulation, kv_tokens=self.kv_tokens)
        return replace(shape, spec=replace(shape.spec.replaced(prefix_cache=self.prefix_cache), emulation=emulation))


@dataclass(frozen=True)
class LoadFlags:
    """Which load is offered, and what is counted."""

    methods: Annotated[
        tuple[str, ...],
        Help("Methods, or one with options like pipedec:width=8; may be repeated.", "NAME,…|NAME:KEY=VALUE,…", "--method",
             repeated=True),
    ] = ("pp,pipedec-bestfirst",)  # fmt: skip
    concurrency: Annotated[tuple[int, ...], Help("Numbers of requests that are unfinished at any time, like 1,4,16.")] = ()
    rate: Annotated[tuple[float, ...], Help("Or mean numbers of requests per second, like 0.5,1,2 (a Poisson process).")] = ()
    goodput: Annotated[tuple[str, ...], Help("Count the requests that meet these times.", "ttft:MS,tpot:MS", repeated=True)] = ()
    random_tokens: Annotated[int | None, Help("With --replay: prompts of N random tokens.", flag="--random")] = None
    system_prompt: Annotated[Path | None, Help("Put this text before the first prompt of each.", "FILE")] = None

    def patterns(self) -> tuple[Pattern, ...]:
        """Raises UserError for a number that is out of range."""
        return (*(Pattern(concurrency=each) for each in self.concurrency), *(Pattern(rate=each) for each in self.rate))

    def policies(self) -> tuple[Policy, ...]:
        """Raises UserError for an unknown method or option."""
        specs = [spec for text in self.methods for spec in ([text] if ":" in text else text.split(","))]
        if len(set(specs)) < len(specs):
            raise UserError(f"--method {','.join(specs)}: one of them is given twice")
        return tuple(Policy.parse(spec, "--method") for spec in specs)

    def goals(self) -> Goals:
        """Raises UserError for a text of another form."""
        found: dict[str, float] = {}
        for part in (part for text in self.goodput for part in text.split(",")):
            name, _, value = part.partition(":")
            try:
                found[{"ttft": "ttft_ms", "tpot": "tpot_ms"}[name]] = float(value)
            except (KeyError, ValueError):
                raise UserError(f"--goodput {part}: write ttft:MS or tpot:MS, like ttft:500,tpot:60") from None
        return Goals(**found)


@click.command()
@options_of(PlaceFlags, "where")
@options_of(LoadFlags, "offered")
@partial_of(LoadConfig, "configured")
@question_options
@options_of(Drawing, "drawing")
@running_options
@own_options
def load(
    where: PlaceFlags,
    offered: LoadFlags,
    configured: Callable[..., LoadConfig],
    asked: QuestionFlags,
    drawing: Drawing,
    place: RunningFlags,
    out: Annotated[Path, Help("Directory of the results: rows.jsonl and pictures.", "DIR")],
) -> None:
    """Offer many requests at once: a fixed number at a time, or at random times; one row per method and load.

    With --redis, --run or --running they go to the cluster that runs; with --preset to an emulated cluster in real processes;
    with --preset and --replay recorded answers pass through an emulated cluster in computed time: minutes instead of hours. With
    --llama-cpp they go to llama.cpp, with a slot for each of --max-num-seqs requests.

    Reports the time to first token (TTFT), between events that bring tokens (ITL), per output token (TPOT) and end to end,
    throughput over all and while the load is full, and goodput. Appends to OUT/rows.jsonl and draws OUT/load, and
    OUT/fill: who occupies which stage at which timestep, of the load that yields the most tokens per timestep.
    """
    config = configured(
        policies=offered.policies() if where.llama_cpp is None else (POLICY,), patterns=offered.patterns(),
        goals=offered.goals(), sampling=asked.sampling, seed=drawing.seed,
    )  # fmt: skip
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a directory")
    out.mkdir(parents=True, exist_ok=True)
    sampling = structs.replace(config.sampling, seed=config.seed) if config.sampling.is_stochastic else config.sampling
    request = PromptRequest("", drawing.raw_prompts, "pp", sampling)
    with _place(where, asked, drawing.own_work, place, request, out) as pipeline, ProgressBar() as bar:
        conversations, intruder = _conversations(offered, asked, config, pipeline, request)
        measured = bench_load(config, pipeline, conversations, bar, intruder, lambda row: append_rows(out / ROWS_FILE, [row]))
    rows = [one.row for one in measured]
    Console(width=None if Console().is_terminal else 150).print(_summary(rows))
    fullest = max(measured, key=lambda one: one.row["tokens_per_timestep"] or 0.0)
    files = draw({"load": load_figure(rows), "fill": fill_figure(fullest.outcome.fill, fullest.row)}, out)
    for file in (out / ROWS_FILE, *files):
        console.print(str(file), markup=False, soft_wrap=True)


def _place(
    where: PlaceFlags, asked: QuestionFlags, own_work: bool, place: RunningFlags, request: PromptRequest, out: Path
) -> Place:
    if where.llama_cpp is not None:
        refuse_flags(_ELSEWHERE, "--llama-cpp is a place of its own: leave this out")
        return OnLlamaCpp(where.llama_cpp)
    if place.are_given:
        refuse_flags(_STARTED_HERE, "a running cluster is measured as it is: leave this out, or --redis, --run and --running")
        return OnRunning(place.connect(), out / "prompts.json")
    if where.preset is None:
        raise UserError(
            "where? give --preset NAME (with --replay to compute), or --running, --redis or --run for a running cluster"
        )
    slow_motion = 1.0 if where.replay else where.slow_motion
    shape = emulated(asked.config, where.preset, where.stages, asked.pair, slow_motion, own_work)
    shape = where.applied_to(shape)
    if not where.replay:
        refuse_flags(("recording", "own_work", "random_tokens", "intruder"), "goes with --replay")
        return OnProcesses(shape.dispatched(where.dispatch))
    refuse_flags(("dispatch",), "is for real processes: leave out --replay")
    return OnReplay(shape, where.recording, request)


def _conversations(
    offered: LoadFlags, asked: QuestionFlags, config: LoadConfig, pipeline: Place, request: PromptRequest
) -> tuple[list[Conversation], Conversation | None]:
    """Those of the longest load, and the intruder."""
    intruder = None
    if config.intruder is not None:
        assert isinstance(pipeline, OnReplay)
        (intruder,) = random_prompts(config.intruder, pipeline.vocabulary, request, 1, config.seed + 1)
    if offered.random_tokens is not None:
        assert isinstance(pipeline, OnReplay)
        refuse_flags(("system_prompt",), "has text, and --random prompts have none")
        return random_prompts(
            offered.random_tokens, pipeline.vocabulary, request, config.most, config.seed, config.turns
        ), intruder
    _check_recording(pipeline)
    if config.turns > 1 and not (request.raw or isinstance(pipeline, OnReplay)):
        raise UserError("--turns continues a conversation as text: give --raw-prompt, or --replay")
    drawn = drawn_in_turn(pipeline.prompter, asked.prompt_sets(), request, config.most, config.seed, config.turns)
    return led_by(_text_of(offered.system_prompt), drawn, pipeline.prompter), intruder


def _text_of(path: Path | None) -> str:
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--system-prompt {path}: cannot be read as UTF-8 text ({error})") from None


def _check_recording(pipeline: Place) -> None:
    if isinstance(pipeline, OnReplay) and not pipeline.is_recording:
        raise UserError("--replay needs --recording DIR, where the target's answers are kept")


def _summary(rows: list[dict[str, Any]]) -> Table:
    """One line per method and load."""
    table = Table(title=_title(rows[0]), title_justify="left", caption_justify="left", caption=_notes(rows))
    for name in ("load", "method"):
        table.add_column(name, no_wrap=True)
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        first = next(one for one in rows if (one["pattern"], one["max_num_seqs"]) == (row["pattern"], row["max_num_seqs"]))
        limits = "" if len({one["max_num_seqs"] for one in rows}) == 1 else f", {row['max_num_seqs']} at once"
        table.add_row(
            _load_name(row) + limits, row["policy"], _number(row["tokens_per_s"]), _number(row["steady_tokens_per_s"]),
            f"{row['tokens_per_s'] / first['tokens_per_s']:.2f}" if row["tokens_per_s"] and first["tokens_per_s"] else "-",
            *(_number((row[name] or {}).get(part)) for name in ("ttft_ms", "tpot_ms", "itl_ms") for part in ("mean", "p99")),
            f"{row['e2e_ms']['mean'] / 1000:.2f}" if row["e2e_ms"] else "-",
            str(row["timesteps"] or "-"), _number(row["rows_per_timestep"]), _number(row["own_ms_per_timestep"]),
        )  # fmt: skip
    return table


def _title(row: dict[str, Any]) -> str:
    cluster = row["cluster"]
    name = f"{cluster['preset']}, emulated" if cluster.get("preset") else f"run {cluster.get('run')}"
    tasks = ", single tasks" if cluster.get("dispatch") == "tasks" else ""
    return f"Load on {name} ({cluster['stages']} stages{tasks}), times {row['clock']}"


def _notes(rows: list[dict[str, Any]]) -> str:
    """What the table has no column for: goodput, refusals, memory, turns, the intruder."""
    notes = []
    for row in rows:
        name = f"{_load_name(row)}, {row['policy']}"
        if row["goodput_per_s"] is not None:
            notes.append(f"{name}: goodput {row['goodput_per_s']:.3f} requests/s")
        if row["refused"]:
            notes.append(f"{name}: {row['refused']} requests refused")
        notes.append(f"{name}: {_memory_note(row)}")
        for turn in row["turns"]:
            notes.append(
                f"{name}: turn {turn['turn']}: {turn['prefilled_tokens']:,} of {turn['prompt_tokens']:,} prompt tokens computed, "
                f"TTFT {turn['ttft_ms']['mean']:.0f} ms"
                + (f", at most {steps} timesteps" if (steps := turn["ttft_timesteps"]) else "")
            )
        if late := row.get("intruder"):
            notes.append(
                f"{name}: while {late['prompt_tokens']} prompt tokens are prefilled ({late['ttft_ms']:.0f} ms), the others take "
                f"{late['tpot_ms']:.1f} ms per token, {late['ratio']:.2f} × the {late['tpot_without_ms']:.1f} ms without it"
            )
    return "\n".join(notes)


def _memory_note(row: dict[str, Any]) -> str:
    """Prompt tokens that were computed, pauses, and KV memory."""
    text = f"{row['prefilled_tokens']:,} prompt tokens computed, {row['cached_tokens']:,} cached, {row['pauses']} pauses"
    if kv := row["kv"]:
        text += f", {kv['peak_slots']:,} of {kv['capacity_slots']:,} KV slots used at most"
    return text


def _load_name(row: dict[str, Any]) -> str:
    pattern = row["pattern"]
    return f"{pattern['rate']:g}/s" if pattern["concurrency"] is None else f"{pattern['concurrency']} concurrent"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
