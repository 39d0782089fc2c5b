"""``python -m benchmarks.skeleton``: Skeleton-of-Thought beside answers in one thread and in decode threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import click

from benchmarks.skeleton.style import SKELETON, SkeletonOfThought
from pipedec.bench.threads.benchmark import SEQUENTIAL, Style, ThreadsConfig
from pipedec.cli.benchmarks.shared import BenchPromptFlags, OutDirectory, question_options
from pipedec.cli.benchmarks.threads import measure_threads
from pipedec.flags import Help, own_options, partial_of, run_command

ABOUT = (
    "sot is Skeleton-of-Thought: the skeleton's first token is the answer's, the points are the threads, and their prompts are "
    "part of the answer's time (later prompts: until every point has its first token; the points' tokens alone: what is left)."
)


@dataclass(frozen=True)
class SkeletonConfig(ThreadsConfig):
    """The configuration of ``pipedec bench threads``, with the style ``sot`` among the dialects."""

    dialects: Annotated[
        tuple[str, ...],
        Help(f"Dialects by name or file; {SEQUENTIAL}: one thread, the baseline; {SKELETON}: Skeleton-of-Thought, by prompts."),
    ] = (SEQUENTIAL, "apar", "pasta", SKELETON)

    def style(self, dialect: str) -> Style:
        """The style of one of ``dialects``. Raises UserError for an unknown one."""
        return SkeletonOfThought() if dialect == SKELETON else super().style(dialect)


@click.command()
@partial_of(SkeletonConfig, "measured")
@question_options
@own_options
def skeleton(measured: Callable[..., SkeletonConfig], asked: BenchPromptFlags, out: OutDirectory) -> None:
    """Answer every prompt in one thread, in several, and as Skeleton-of-Thought: one row per answer in OUT/rows.jsonl.

    Everything else is as `pipedec bench threads` does it.
    """
    measure_threads(measured, asked, out, ABOUT)


if __name__ == "__main__":
    run_command(skeleton)
