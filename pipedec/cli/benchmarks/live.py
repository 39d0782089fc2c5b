"""``pipedec bench live``: recordings of the live feed, and what it costs to be watched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipedec.cli.benchmarks.faults import comma_names
from pipedec.cli.benchmarks.shared import OUT_HELP, PATH, append
from pipedec.cli.show import console
from pipedec.core import DEFAULT_METHOD


@click.command()
@click.option("--preset", default="paper-14", show_default=True, help="The partition that is emulated.")
@click.option("--stages", type=click.IntRange(1), help="Stages instead of the partition's.")
@click.option("--cluster", type=PATH, help="A cluster.yaml whose partitions are the presets (default: the paper's).")
@click.option("--target", type=PATH, help="Target checkpoint directory (default: the shipped pair).")
@click.option("--draft", help="Draft checkpoint directory, or none.")
@click.option("--prompt", help="The question (default: one of the documentation's kind).")
@click.option("--record", type=PATH, help="Write a recording of one answer by several methods to this file (.jsonl, .jsonl.gz).")
@click.option("--methods", callback=comma_names, metavar="NAME,…", help="Those that are recorded (default: four).")
@click.option("--max-tokens", type=int, help="Tokens of an answer (default: 96 of a recording, else 128).")
@click.option("--method", default=DEFAULT_METHOD, show_default=True, help="The one that is measured.")
@click.option("--rounds", type=int, default=8, show_default=True, help="Of watched, unwatched, unwatched, watched answers.")
@click.option("--answers", type=int, default=4, show_default=True, help="Of each of these four.")
@click.option("--out", type=PATH, help=OUT_HELP)
def live(
    preset: str, stages: int | None, cluster: Path | None, target: Path | None, draft: str | None, prompt: str | None,
    record: Path | None, methods: tuple[str, ...] | None, max_tokens: int | None, out: Path | None, **measured: Any,
) -> None:  # fmt: skip
    """Measure what it costs a cluster to be watched, or record one answer by several methods.

    A recording has computed times of emulated devices, and is always the same.
    """
    from pipedec.bench.record import check_writable
    from pipedec.bench.sweep.pipelines import Pair, emulated
    from pipedec.config import load_cluster, paper_cluster

    check_writable(out)
    check_writable(record, "--record")
    config = load_cluster(cluster) if cluster else paper_cluster()
    shape = emulated(config, preset, stages, Pair(target, draft), own_work=False)
    given = {name: value for name, value in {"prompt": prompt, "methods": methods, "max_tokens": max_tokens}.items() if value}
    if record is not None:
        _record(record, shape, given)
    else:
        _measure(out, shape, {**given, **measured})


def _record(path: Path, shape: Any, given: dict[str, Any]) -> None:
    from pipedec.bench.live.recording import RecordingConfig, record, write_recording

    with console.status("recording") as status:
        frames = record(RecordingConfig(**given), shape, lambda method: status.update(f"recording {method}"))
    write_recording(frames, path)
    console.print(f"{len(frames)} frames in {path}", soft_wrap=True)


def _measure(out: Path | None, shape: Any, given: dict[str, Any]) -> None:
    from pipedec.bench.live.watching import WatchingConfig, measure_watching

    given.pop("methods", None)
    if "max_tokens" in given:
        given["tokens"] = given.pop("max_tokens")
    with console.status("starting the cluster") as status:
        row = measure_watching(WatchingConfig(**given), shape, lambda number: status.update(f"round {number + 1}"))
    low, high = row["interval"]
    console.print(f"watched over not watched, ms per token: {row['ratio']:.3f} [{low:.3f}, {high:.3f}]", markup=False)
    append(out, [row])
