"""``pipedec bench live``: recordings of the live feed, and what it costs to be watched."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import click

from pipedec.bench.live.recording import RecordingConfig, record, write_recording
from pipedec.bench.live.watching import WatchingConfig, measure_watching
from pipedec.bench.record import check_writable
from pipedec.bench.sweep.pipelines import Shape
from pipedec.cli.benchmarks.shared import EmulatedFlags, Out, append
from pipedec.cli.show import console
from pipedec.flags import Help, options_of, own_options, partial_of


@click.command()
@options_of(EmulatedFlags, "emulated")
@partial_of(RecordingConfig, "recorded")
@partial_of(WatchingConfig, "watched")
@own_options
def live(
    emulated: EmulatedFlags,
    recorded: Callable[..., RecordingConfig],
    watched: Callable[..., WatchingConfig],
    recording: Annotated[
        Path | None,
        Help("Write a recording of one answer by several methods to this file (.jsonl, .jsonl.gz).", "FILE", "--record"),
    ] = None,
    prompt: Annotated[str | None, Help("The question (default: one of the documentation's kind).", "TEXT")] = None,
    max_tokens: Annotated[int | None, Help("Tokens of an answer (default: 96 of a recording, else 128).")] = None,
    out: Out = None,
) -> None:
    """Measure what it costs a cluster to be watched, or record one answer by several methods.

    A recording has computed times of emulated devices, and is always the same.
    """
    check_writable(out)
    check_writable(recording, "--record")
    shape, asked = emulated.shape(own_work=False), {} if prompt is None else {"prompt": prompt}
    if recording is not None:
        _record(recording, shape, recorded(**asked, **({} if max_tokens is None else {"max_tokens": max_tokens})))
    else:
        _measure(out, shape, watched(**asked, **({} if max_tokens is None else {"tokens": max_tokens})))


def _record(path: Path, shape: Shape, config: RecordingConfig) -> None:
    with console.status("recording") as status:
        frames = record(config, shape, lambda method: status.update(f"recording {method}"))
    write_recording(frames, path)
    console.print(f"{len(frames)} frames in {path}", soft_wrap=True)


def _measure(out: Path | None, shape: Shape, config: WatchingConfig) -> None:
    with console.status("starting the cluster") as status:
        row = measure_watching(config, shape, lambda number: status.update(f"round {number + 1}"))
    low, high = row["interval"]
    console.print(f"watched over not watched, ms per token: {row['ratio']:.3f} [{low:.3f}, {high:.3f}]", markup=False)
    append(out, [row])
