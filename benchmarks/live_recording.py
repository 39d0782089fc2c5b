"""``python -m benchmarks.live_recording``: recordings of the live feed, for the live page.

One question is answered by several methods, each with a pipeline of its own, on computed time. Times leave out rank 0's own work,
so that the same prompt gives the same recording, however busy the machine is.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from benchmarks.output import Preset, StageCount
from pipedec.bench.record import check_writable
from pipedec.bench.sweep.pipelines import emulated
from pipedec.cli.benchmarks.shared import EmulatedClusterFlags
from pipedec.cli.show import console
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import Request
from pipedec.engine.build import load_prompter
from pipedec.engine.devices import chosen_device
from pipedec.engine.experience_files import initial_experience
from pipedec.engine.local import LocalPipeline
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.live.feed import LiveFeed
from pipedec.live.reading import Frame, LiveReading
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import RunStatus

PROMPT = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did Natalia "
    "sell altogether in April and May?"
)
METHODS = ("pp", "stpp", "pipedec", "pipedec-bestfirst")
_STATS_US = 1_000_000


@dataclass(frozen=True)
class RecordingConfig:
    """The prompt and the methods of a recording."""

    prompt: Annotated[str, Help("Prompt that is answered.", "TEXT")] = PROMPT
    methods: Annotated[tuple[str, ...], Help("Methods that are recorded.")] = METHODS
    max_tokens: Annotated[int, Help("Tokens of an answer.")] = 96


def record(
    config: RecordingConfig, spec: PipelineSpec, about: Mapping[str, Any], on_method: Callable[[str], None] = lambda name: None
) -> list[Frame]:
    """The frames of all methods, one after the other; each is a run named after its method.

    Args:
        about: the pipeline, for the first frame of each run: ``stages``, ``groups``, ``target``, ``draft``.

    Raises:
        UserError: a method cannot run here, or the prompt is too long.
    """
    frames: list[Frame] = []
    for method in config.methods:
        on_method(method)
        frames += _record_one(config, spec, {"run": method, "epoch": 0, **about, "method": method}, method)
    return frames


def write_recording(frames: Sequence[Frame], path: Path) -> None:
    """JSON Lines, compressed if the name ends in .gz. The same frames give the same bytes."""
    lines = "".join(json.dumps(frame, separators=(",", ":")) + "\n" for frame in frames).encode()
    path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)


def _record_one(config: RecordingConfig, spec: PipelineSpec, about: Mapping[str, Any], method: str) -> list[Frame]:
    experience = initial_experience(spec, chosen_device(spec.settings.cut.device))
    pipeline, prompter = LocalPipeline.load(spec, experience=experience), load_prompter(spec)
    frames, reading = list[Frame](), LiveReading(method)
    has_begun = False  # until then the pipeline has no emulated time

    def now_us() -> int:
        return round(1e6 * pipeline.seconds()) if has_begun else 0

    def figures(running: int) -> Frame:
        status = RunStatus("up", 1, 0, tuple(range(running)), (), stats=pipeline.stats())
        return reading.stats(status, now_us())

    def keep(new: list[Frame]) -> None:
        frames.extend(new)
        reading.on_frames(new)

    def said(request: Request) -> str:
        return prompter.text(pipeline.answers[request.number].token_ids).rstrip("\ufffd")

    LiveFeed(about, prompter.text, said, keep, now_us).follow("recording", pipeline.scheduler, 0)
    has_begun, last_us = True, 0
    token_ids = prompter.token_ids(config.prompt, False, config.max_tokens)
    for _ in pipeline.run(TokenizedRequest(0, token_ids, SamplingParams(max_tokens=config.max_tokens), method)):
        if now_us() >= last_us + _STATS_US:
            last_us = now_us()
            frames.append(figures(running=1))
    return [*frames, figures(running=0)]


@dataclass(frozen=True)
class EmulatedFlags(EmulatedClusterFlags):
    """A pipeline that is emulated."""

    preset: Preset = "paper-14"
    stages: StageCount = None


@click.command()
@options_of(EmulatedFlags, "flags")
@options_of(RecordingConfig, "recorded")
@own_options
def live_recording(
    flags: EmulatedFlags,
    recorded: RecordingConfig,
    path: Annotated[Path, Help("File that is written (.jsonl, .jsonl.gz).", "FILE", "--record")],
) -> None:
    """Record one answer by several methods. A recording has computed times of emulated devices, and is always the same."""
    check_writable(path, "--record")
    shape = emulated(flags.config, flags.preset, flags.stages, flags.pair, own_work=False, priors=True)
    cluster = shape.cluster
    about = {
        "stages": cluster["stages"], "groups": cluster["groups"], "target": cluster["model"], "draft": cluster["draft"],
        "method": None, "emulated": shape.preset,
    }  # fmt: skip
    with console.status("recording") as status:
        frames = record(recorded, shape.spec, about, lambda method: status.update(f"recording {method}"))
    write_recording(frames, path)
    console.print(f"{len(frames)} frames in {path}", soft_wrap=True)


if __name__ == "__main__":
    run_command(live_recording)
