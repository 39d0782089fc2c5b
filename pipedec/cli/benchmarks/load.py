"""``pipedec bench load``: many requests at once."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.cli.benchmarks.shared import PATH, QuestionFlags, numbers, question_options
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.cli.options import Command, gathered
from pipedec.cli.running import RunningFlags, refuse_flags, running_options
from pipedec.cli.show import console
from pipedec.core import MAX_NUM_SEQS, UserError

if TYPE_CHECKING:
    from pipedec.bench.load.benchmark import LoadConfig
    from pipedec.bench.load.places import Place
    from pipedec.bench.load.questions import Conversation
    from pipedec.bench.load.served import Goals
    from pipedec.bench.policy.study import Policy
    from pipedec.bench.sweep.pipelines import Shape
    from pipedec.messages import PromptRequest

_STARTED_HERE = (
    "preset",
    "stages",
    "slow_motion",
    "replay",
    "recording",
    "max_num_seqs",
    "target",
    "draft",
    "cluster",
    "own_work",
    "kv_tokens",
    "prefix_cache",
)
_ELSEWHERE = (
    "preset", "stages", "slow_motion", "replay", "recording", "methods", "target", "draft", "cluster", "own_work", "intruder",
    "random_tokens", "turns", "kv_tokens", "prefix_cache",
)  # fmt: skip
_COLUMNS = (
    "tokens/s", "steady", "× first", "TTFT ms", "p99", "TPOT ms", "p99", "ITL ms", "p99", "end to end s", "timesteps", "rows",
    "own ms",
)  # fmt: skip


@dataclass(frozen=True)
class PlaceFlags:
    """Where load is offered, besides a cluster that runs."""

    preset: str | None
    stages: int | None
    replay: bool
    recording: Path | None
    slow_motion: float
    kv_tokens: int | None
    prefix_cache: bool
    llama_cpp: Path | None

    def policies_of(self, config: LoadConfig) -> LoadConfig:
        """``config`` with the methods that this place has."""
        from dataclasses import replace

        if self.llama_cpp is None:
            return config
        from pipedec.bench.load.beside import POLICY

        return replace(config, policies=(POLICY,))

    def applied_to(self, shape: Shape) -> Shape:
        """With the KV memory that these flags ask for."""
        from dataclasses import replace

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

    methods: tuple[str, ...]
    concurrency: str | None
    rate: str | None
    requests: int | None
    max_num_seqs: str
    goodput: tuple[str, ...]
    random_tokens: int | None
    intruder: int | None
    turns: int
    system_prompt: Path | None

    def config(self, asked: QuestionFlags) -> LoadConfig:
        """Raises UserError for flags that cannot work."""
        from pipedec.bench.load.arrivals import Pattern
        from pipedec.bench.load.benchmark import LoadConfig

        patterns = [Pattern(concurrency=each) for each in numbers("--concurrency", self.concurrency)] if self.concurrency else []
        patterns += [Pattern(rate=each) for each in _rates(self.rate)] if self.rate else []
        return LoadConfig(
            self._policies(), tuple(patterns), self.requests, numbers("--max-num-seqs", self.max_num_seqs), self._goals(),
            self.intruder, asked.seed, asked.settings()["sampling"], self.turns,
        )  # fmt: skip

    def _policies(self) -> tuple[Policy, ...]:
        from pipedec.bench.policy.study import Policy

        specs = [spec for text in self.methods for spec in ([text] if ":" in text else text.split(","))]
        if len(set(specs)) < len(specs):
            raise UserError(f"--method {','.join(specs)}: one of them is given twice")
        return tuple(Policy.parse(spec, "--method") for spec in specs)

    def _goals(self) -> Goals:
        from pipedec.bench.load.served import Goals

        found: dict[str, float] = {}
        for part in (part for text in self.goodput for part in text.split(",")):
            name, _, value = part.partition(":")
            try:
                found[{"ttft": "ttft_ms", "tpot": "tpot_ms"}[name]] = float(value)
            except (KeyError, ValueError):
                raise UserError(f"--goodput {part}: write ttft:MS or tpot:MS, like ttft:500,tpot:60") from None
        return Goals(**found)


def place_options(command: Command) -> Command:
    """Adds these flags; the command gets them as ``where``."""
    options = [
        click.option("--preset", help="Partition of the emulated cluster, like paper-14, in real processes or with --replay."),
        click.option("--stages", type=int, help="Number of stages, on the preset's first device (default: the preset's own)."),
        click.option("--replay", is_flag=True, help="Replay recorded answers through the preset, in computed time."),
        click.option("--recording", type=PATH, help="With --replay: directory of recorded answers; missing ones are recorded."),
        click.option(
            "--slow-motion", type=float, default=1.0, show_default=True,
            help="In real processes: factor on all emulated times; results are divided by it.",
        ),
        click.option("--kv-tokens", type=int, metavar="N", help="Tokens for which there is KV memory (default: the preset's)."),
        click.option(
            "--prefix-cache/--no-prefix-cache", default=True, show_default=True,
            help="Let requests with equal beginnings share their keys and values.",
        ),
        click.option("--llama-cpp", type=PATH, metavar="FILE.gguf|smollm2", help="Or llama.cpp, in this process (xllamacpp)."),
    ]  # fmt: skip
    return gathered(command, options, PlaceFlags, "where")


def load_options(command: Command) -> Command:
    """Adds these flags; the command gets them as ``offered``."""
    options = [
        click.option(
            "--method", "methods", multiple=True, default=("pp,pipedec-bestfirst",), show_default=True,
            metavar="NAME,…|NAME:KEY=VALUE,…", help="Methods, or one with options like pipedec:width=8; may be repeated.",
        ),
        click.option("--concurrency", metavar="N,…", help="Numbers of requests that are unfinished at any time, like 1,4,16."),
        click.option("--rate", metavar="R,…", help="Or mean numbers of requests per second, like 0.5,1,2 (a Poisson process)."),
        click.option("--requests", type=int, metavar="N", help="Requests of each load (default: 4 × concurrency, or 64)."),
        click.option(
            "--max-num-seqs", default=str(MAX_NUM_SEQS), show_default=True, metavar="N,…",
            help="Most requests in the pipeline at the same time; with 1, one is answered after the other.",
        ),
        click.option("--goodput", multiple=True, metavar="ttft:MS,tpot:MS", help="Count the requests that meet these times."),
        click.option("--random", "random_tokens", type=int, metavar="N", help="With --replay: prompts of N random tokens."),
        click.option(
            "--intruder", type=int, metavar="N",
            help="With --replay: one more prompt of N random tokens arrives when all others have begun.",
        ),
        click.option(
            "--turns", type=int, default=1, show_default=True, metavar="N",
            help="Turns of each conversation: the next prompt of the set follows the whole conversation once it is answered.",
        ),
        click.option("--system-prompt", type=PATH, metavar="FILE", help="Put this text before the first prompt of each."),
    ]  # fmt: skip
    return gathered(command, options, LoadFlags, "offered")


@click.command()
@place_options
@load_options
@question_options
@running_options
@click.option("--out", type=PATH, required=True, help="Directory of the results: rows.jsonl and pictures.")
def load(where: PlaceFlags, offered: LoadFlags, asked: QuestionFlags, place: RunningFlags, out: Path) -> None:
    """Offer many requests at once: a fixed number at a time, or at random times; one row per method and load.

    With --redis, --run or --running they go to the cluster that runs; with --preset to an emulated cluster in real processes;
    with --preset and --replay recorded answers pass through an emulated cluster in computed time: minutes instead of hours. With
    --llama-cpp they go to llama.cpp, with a slot for each of --max-num-seqs requests.

    Reports the time to first token (TTFT), between events that bring tokens (ITL), per output token (TPOT) and end to end,
    throughput over all and while the load is full, and goodput. Appends to OUT/rows.jsonl and draws OUT/load, and
    OUT/fill: who occupies which stage at which timestep, of the load that yields the most tokens per timestep.
    """
    from pipedec.bench.load.benchmark import bench_load
    from pipedec.bench.load.figures import draw, fill_figure, load_figure
    from pipedec.bench.record import ROWS_FILE, append_rows

    config = where.policies_of(offered.config(asked))
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a directory")
    out.mkdir(parents=True, exist_ok=True)
    request = _request(asked, config)
    with _place(where, asked, place, request, out) as pipeline, ProgressBar() as bar:
        conversations, intruder = _conversations(offered, asked, config, pipeline, request)
        measured = bench_load(config, pipeline, conversations, bar, intruder, lambda row: append_rows(out / ROWS_FILE, [row]))
    rows = [one.row for one in measured]
    Console(width=None if Console().is_terminal else 150).print(_summary(rows))
    fullest = max(measured, key=lambda one: one.row["tokens_per_timestep"] or 0.0)
    files = draw({"load": load_figure(rows), "fill": fill_figure(fullest.outcome.fill, fullest.row)}, out)
    for file in (out / ROWS_FILE, *files):
        console.print(str(file), markup=False, soft_wrap=True)


def _request(asked: QuestionFlags, config: LoadConfig) -> PromptRequest:
    from dataclasses import replace

    from pipedec.messages import PromptRequest

    sampling = replace(config.sampling, seed=asked.seed) if config.sampling.is_stochastic else config.sampling
    return PromptRequest("", asked.raw_prompt, "pp", sampling)


def _place(where: PlaceFlags, asked: QuestionFlags, place: RunningFlags, request: PromptRequest, out: Path) -> Place:
    from pipedec.bench.load.places import OnProcesses, OnReplay, OnRunning
    from pipedec.bench.sweep.pipelines import Pair, emulated

    if where.llama_cpp is not None:
        from pipedec.bench.load.beside import OnLlamaCpp

        refuse_flags(_ELSEWHERE, "--llama-cpp is a place of its own: leave this out")
        return OnLlamaCpp(where.llama_cpp)
    if place.are_given:
        refuse_flags(_STARTED_HERE, "a running cluster is measured as it is: leave this out, or --redis, --run and --running")
        return OnRunning(place.connect(), out / "prompts.json")
    if where.preset is None:
        raise UserError(
            "where? give --preset NAME (with --replay to compute), or --running, --redis or --run for a running cluster"
        )
    slow_motion, settings = 1.0 if where.replay else where.slow_motion, asked.settings()
    pair = Pair(asked.target, asked.draft)
    shape = emulated(settings["cluster"], where.preset, where.stages, pair, slow_motion, settings["own_work"])
    shape = where.applied_to(shape)
    if not where.replay:
        refuse_flags(("recording", "own_work", "random_tokens", "intruder"), "goes with --replay")
        return OnProcesses(shape)
    return OnReplay(shape, where.recording, request)


def _conversations(
    offered: LoadFlags, asked: QuestionFlags, config: LoadConfig, pipeline: Place, request: PromptRequest
) -> tuple[list[Conversation], Conversation | None]:
    """Those of the longest load, and the intruder."""
    from pipedec.bench.load.places import OnReplay
    from pipedec.bench.load.questions import drawn_in_turn, led_by, random_prompts

    intruder = None
    if offered.intruder is not None:
        assert isinstance(pipeline, OnReplay)
        (intruder,) = random_prompts(offered.intruder, pipeline.vocabulary, request, 1, config.seed + 1)
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
    from pipedec.bench.load.places import OnReplay

    if isinstance(pipeline, OnReplay) and not pipeline.is_recording:
        raise UserError("--replay needs --recording DIR, where the target's answers are kept")


def _rates(text: str) -> list[float]:
    try:
        return [float(rate) for rate in text.split(",")]
    except ValueError:
        raise UserError(f"--rate {text}: write numbers with commas between them, like 0.5,1,2") from None


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
    return f"Load on {name} ({cluster['stages']} stages), times {row['clock']}"


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
