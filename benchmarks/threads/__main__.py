"""``python -m benchmarks.threads``: the speed-up by decode threads, with speculation and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from benchmarks.output import write_summary
from benchmarks.threads.benchmark import ThreadsConfig, bench_threads
from benchmarks.threads.figures import FIGURES
from benchmarks.threads.summary import document, markdown, read_frame
from pipedec.bench.sweep.pipelines import ModelPair
from pipedec.cli.benchmarks import shared
from pipedec.cli.benchmarks.plot import draw_all
from pipedec.cli.options import RunningFlags, refuse_flags, running_options
from pipedec.core.errors import UserError
from pipedec.directories import reference_threads
from pipedec.flags import own_options, partial_of, run_command

_STARTED_HERE = ("cluster", "preset", "stages", "draft", "own_work")  # flags of emulated pipelines


@click.command()
@partial_of(ThreadsConfig, "measured")
@shared.question_options
@running_options
@own_options
def threads(
    measured: Callable[..., ThreadsConfig], asked: shared.BenchPromptFlags, place: RunningFlags, out: shared.OutDirectory
) -> None:
    """Answer every prompt in one thread and in several, by every method: one row per answer in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. With --redis, --run or --running the cluster that is running
    answers, and times are measured; --target is then a directory with its tokenizer and config.json (default: its own). Writes
    OUT/summary.md, OUT/summary.json and two figures. Answers that OUT/rows.jsonl already contains are not measured again.
    """
    measure_threads(measured, asked, out, place=place)


def measure_threads(
    measured: Callable[..., ThreadsConfig], asked: shared.BenchPromptFlags, out: Path, about: str = "",
    papers: Mapping[str, Sequence[list[str]]] | None = None, place: RunningFlags | None = None,
) -> None:  # fmt: skip
    """Measure, write and print; ``about`` and ``papers`` as in ``markdown``, ``place`` names a cluster to measure, if any."""
    real = _running(asked, place)
    asked = with_thread_models(asked)
    config = measured(**asked.settings() | real)
    prompt_sets = asked.prompt_sets()
    shared.make_directory(out)
    with shared.ProgressBar() as bar:
        frame = read_frame(bench_threads(config, prompt_sets, out, bar))
    write_summary(out, markdown(frame, about, papers), document(frame))
    draw_all({"": frame}, out, FIGURES, None, may_be_none=True)


def with_thread_models(asked: shared.BenchPromptFlags) -> shared.BenchPromptFlags:
    """With the shipped thread models if no target is given."""
    if asked.target is not None:
        return asked
    return replace(asked, target=reference_threads() / "target", draft=asked.draft or str(reference_threads() / "draft"))


def _running(asked: shared.BenchPromptFlags, place: RunningFlags | None) -> dict[str, Any]:
    """The fields of the configuration about a running cluster, if one is to be measured. Raises UserError if flags do not fit."""
    if place is None or not place.are_given:
        return {}
    refuse_flags(_STARTED_HERE, shared.AS_IT_IS)
    running = place.connect()
    target = asked.target or Path(running.description.target)
    if not target.is_dir():
        raise UserError(f"{target} is not on this machine: give --target, a directory with its tokenizer and config.json")
    return {"running": running, "pair": ModelPair(target)}


if __name__ == "__main__":
    run_command(threads)
