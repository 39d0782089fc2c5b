"""``pipedec bench threads``: the speed-up by decode threads, with speculation and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import click

from pipedec.bench.threads.benchmark import ThreadsConfig, bench_threads
from pipedec.bench.threads.figures import draw_threads
from pipedec.bench.threads.rows import read_frame
from pipedec.bench.threads.summary import document, markdown
from pipedec.cli.benchmarks.shared import OutDirectory, QuestionFlags, question_options
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.cli.show import console
from pipedec.core import UserError
from pipedec.flags import own_options, partial_of
from pipedec.shipped import reference_threads


@click.command()
@partial_of(ThreadsConfig, "measured")
@question_options
@own_options
def threads(measured: Callable[..., ThreadsConfig], asked: QuestionFlags, out: OutDirectory) -> None:
    """Answer every prompt in one thread and in several, by every method: one row per answer in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. Writes OUT/summary.md, OUT/summary.json and two figures.
    Answers that OUT/rows.jsonl already contains are not measured again.
    """
    if asked.target is None:
        draft = asked.draft or str(reference_threads() / "draft")
        asked = replace(asked, target=reference_threads() / "target", draft=draft)
    config = measured(**asked.settings())
    prompt_sets = asked.prompt_sets()
    if out.exists() and not out.is_dir():
        raise UserError(f"--out {out}: not a directory")
    with ProgressBar() as bar:
        frame = read_frame(bench_threads(config, prompt_sets, out, bar))
    text = markdown(frame)
    (out / "summary.md").write_text(text, encoding="utf-8")
    (out / "summary.json").write_text(document(frame), encoding="utf-8")
    print(text, end="")
    drawn = draw_threads(frame, out)
    for file in (out / "rows.jsonl", out / "summary.md", out / "summary.json", *drawn.files):
        console.print(str(file), markup=False, soft_wrap=True)
    for reason in drawn.left_out:
        console.print(f"left out: {reason}", markup=False, soft_wrap=True)
