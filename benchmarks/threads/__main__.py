"""``python -m benchmarks.threads``: the speed-up by decode threads, with speculation and without."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import click

from benchmarks.output import write_summary
from benchmarks.threads.benchmark import ThreadsConfig, bench_threads
from benchmarks.threads.figures import FIGURES
from benchmarks.threads.summary import document, markdown, read_frame
from pipedec.cli.benchmarks import shared
from pipedec.cli.benchmarks.plot import draw_all
from pipedec.directories import reference_threads
from pipedec.flags import own_options, partial_of, run_command


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


def measure_threads(
    measured: Callable[..., ThreadsConfig], asked: shared.BenchPromptFlags, out: Path, about: str = "",
    papers: Mapping[str, Sequence[list[str]]] | None = None,
) -> None:  # fmt: skip
    """Measure, write and print; ``about`` and ``papers`` as in ``markdown``."""
    if asked.target is None:
        draft = asked.draft or str(reference_threads() / "draft")
        asked = replace(asked, target=reference_threads() / "target", draft=draft)
    config = measured(**asked.settings())
    prompt_sets = asked.prompt_sets()
    shared.make_directory(out)
    with shared.ProgressBar() as bar:
        frame = read_frame(bench_threads(config, prompt_sets, out, bar))
    write_summary(out, markdown(frame, about, papers), document(frame))
    draw_all({"": frame}, out, FIGURES, None, may_be_none=True)


if __name__ == "__main__":
    run_command(threads)
