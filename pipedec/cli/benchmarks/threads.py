"""``pipedec bench threads``: the speed-up by decode threads, with speculation and without."""

from __future__ import annotations

from pathlib import Path

import click

from pipedec.cli.benchmarks.shared import PATH, QuestionFlags, numbers, question_options
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.cli.show import console
from pipedec.core import UserError


@click.command()
@click.option("--preset", required=True, help="Partition of the emulated cluster, like paper-14.")
@click.option("--stages", help="Stage counts, like 1,4,14, on the preset's first device (default: the preset's own).")
@click.option(
    "--dialects", default="none,apar,pasta,sot", show_default=True,
    help="Dialects by name or file; none: one thread, the baseline; sot: Skeleton-of-Thought, by prompts alone.",
)  # fmt: skip
@click.option("--methods", default="pp,pipedec-bestfirst", show_default=True, help="Methods; speed-ups are over pp.")
@question_options
@click.option("--out", type=PATH, required=True, help="Directory of the results; an interrupted run is resumed.")
def threads(preset: str, stages: str | None, dialects: str, methods: str, asked: QuestionFlags, out: Path) -> None:
    """Answer every prompt in one thread and in several, by every method: one row per answer in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. Writes OUT/summary.md, OUT/summary.json and two figures.
    Answers that OUT/rows.jsonl already contains are not measured again.
    """
    from pipedec.bench.sweep.pipelines import Pair
    from pipedec.bench.threads.benchmark import ThreadsConfig, bench_threads
    from pipedec.bench.threads.figures import draw_threads
    from pipedec.bench.threads.rows import read_frame
    from pipedec.bench.threads.summary import document, markdown
    from pipedec.shipped import reference_threads

    target, draft = asked.target, asked.draft
    if target is None:
        target, draft = reference_threads() / "target", draft or str(reference_threads() / "draft")
    config = ThreadsConfig(
        **asked.settings(),
        preset=preset,
        stages=numbers("--stages", stages) if stages else (),
        dialects=tuple(dialects.split(",")),
        methods=tuple(methods.split(",")),
        pair=Pair(target, draft),
    )
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
