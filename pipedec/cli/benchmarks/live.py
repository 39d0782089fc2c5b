"""``pipedec bench live``: recordings of the live feed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click

from pipedec.bench.options import Preset, StageCount
from pipedec.bench.record import check_writable
from pipedec.bench.sweep.pipelines import emulated
from pipedec.cli.benchmarks.shared import EmulatedClusterFlags
from pipedec.cli.main import moved_flags
from pipedec.cli.show import console
from pipedec.flags import Help, options_of, own_options
from pipedec.live.recorder import RecordingConfig, record, write_recording

_WATCHING = {"--rounds": True, "--answers": True, "--method": True, "--out": True}


@dataclass(frozen=True)
class EmulatedFlags(EmulatedClusterFlags):
    """A pipeline that is emulated."""

    preset: Preset = "paper-14"
    stages: StageCount = None


@click.command()
@moved_flags(_WATCHING, "is now of PYTHONPATH=tests python -m soak.watching, in a checkout of pipedec")
@options_of(EmulatedFlags, "flags")
@options_of(RecordingConfig, "recorded")
@own_options
def live(
    flags: EmulatedFlags,
    recorded: RecordingConfig,
    path: Annotated[Path, Help("File that is written (.jsonl, .jsonl.gz).", "FILE", "--record")],
) -> None:
    """Record one answer by several methods. A recording has computed times of emulated devices, and is always the same."""
    check_writable(path, "--record")
    shape = emulated(flags.config, flags.preset, flags.stages, flags.pair, own_work=False)
    cluster = shape.cluster
    about = {
        "stages": cluster["stages"], "groups": cluster["groups"], "target": cluster["model"], "draft": cluster["draft"],
        "method": None, "emulated": shape.preset,
    }  # fmt: skip
    with console.status("recording") as status:
        frames = record(recorded, shape.spec, about, lambda method: status.update(f"recording {method}"))
    write_recording(frames, path)
    console.print(f"{len(frames)} frames in {path}", soft_wrap=True)
