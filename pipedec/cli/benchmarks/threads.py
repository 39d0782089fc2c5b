"""``pipedec bench threads``: the speed-up by decode threads, with speculation and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click

from pipedec.bench.threads.benchmark import ThreadsConfig, bench_threads
from pipedec.bench.threads.figures import draw_threads
from pipedec.bench.threads.summary import document, markdown, read_frame
from pipedec.cli.benchmarks import shared
from pipedec.cli.show import console
from pipedec.directories import reference_threads
from pipedec.flags import own_options, partial_of


@click.command()
@partial_of(ThreadsConfig, "measured")
@shared.question_options
@own_options
def threads(measured: Callable[..., ThreadsConfig], asked: shared.BenchPromptFlags, out: shared.OutDirectory) -> None:
    """Answer every prompt in one thread and in several, by every method: one row per answer in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. Writes OUT/summary.md, OUT/summary.json and two figures.
    Answers that OUT/rows.jsonl already contains are not measured again.
    """
    measure_threads(measured, asked, out)


def measure_threads(measured: Callable[..., ThreadsConfig], asked: shared.BenchPromptFlags, out: Path, about: str = "") -> None:
    """Measure, write and print. ``about`` is appended to the text above the tables."""
    if asked.target is None:
        draft = asked.draft or str(reference_threads() / "draft")
        asked = replace(asked, target=reference_threads() / "target", draft=draft)
    config = measured(**asked.settings())
    prompt_sets = asked.prompt_sets()
    shared.check_directory(out)
    with shared.ProgressBar() as bar:
        frame = read_frame(bench_threads(config, prompt_sets, out, bar))
    shared.write_summary(out, markdown(frame, about), document(frame))
    drawn = draw_threads(frame, out)
    shared.print_files(*drawn.files)
    for reason in drawn.left_out:
        console.print(f"left out: {reason}", markup=False, soft_wrap=True)
