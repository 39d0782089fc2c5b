"""``pipedec bench policy``: speculation policies compared offline, on recorded answers."""

from __future__ import annotations

import json as json_format
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from pipedec.cli.benchmarks.shared import PATH, QuestionFlags, question_options
from pipedec.cli.benchmarks.sweep import ProgressBar
from pipedec.core import UserError

if TYPE_CHECKING:
    from pipedec.bench.policy_figures import Comparison, PolicyFigures

_CAUSES = {"first": "first token", "tokens": "token itself", "late": "late", "named": "miss, named", "unnamed": "miss, unnamed"}


@click.command()
@click.option("--preset", required=True, help="The emulated cluster, like paper-14.")
@click.option("--stages", type=int, help="So many stages on the preset's first device (default: the preset's own).")
@question_options
@click.option(
    "--policy", "specs", multiple=True, default=("pipedec", "pipedec-bestfirst"), show_default=True,
    help="METHOD[:KEY=VALUE,…] with width, children, depth, rows, forwards, proposers (draft+ngrams); several times.",
)  # fmt: skip
@click.option("--recording", type=PATH, required=True, help="Directory of recorded answers; what it lacks is recorded.")
@click.option("--json", "out", type=PATH, help="Write all figures to this file.")
@click.option("--check", type=PATH, help="Compare with the rows of a sweep in this directory.")
def policy(
    preset: str, stages: int | None, asked: QuestionFlags, specs: tuple[str, ...], recording: Path, out: Path | None,
    check: Path | None,
) -> None:  # fmt: skip
    """Compare speculation policies in minutes: their timesteps on recorded answers of the target, and what these would take.

    The target answers every prompt once, the draft is asked once per context, and both are kept in RECORDING. Methods are the
    real ones, timesteps are counted as a pipeline would, times are the preset's by arithmetic.
    """
    from pipedec.bench.policy import Policy, PolicyConfig, Study
    from pipedec.bench.policy_figures import PolicyFigures, compare, document
    from pipedec.bench.record import ROWS_FILE, check_writable, read_records
    from pipedec.bench.sweep.pipelines import Pair
    from pipedec.bench.sweep.rows import SCHEMA, read_rows

    policies = tuple(Policy.parse(spec) for spec in specs)
    config = PolicyConfig(
        **asked.settings(), preset=preset, policies=policies, stages=stages, pair=Pair(asked.target, asked.draft)
    )
    study = Study(config, asked.prompt_sets(), recording)
    check_writable(out, "--json")
    rows = []
    if check is not None:
        read_rows([check / ROWS_FILE])  # refuses what no sweep wrote
        rows = [row for _, row in read_records(check / ROWS_FILE, SCHEMA)]
    with ProgressBar() as bar:
        answers = list(study.run(bar))
    figures = PolicyFigures.of(answers)
    comparisons = compare(config, answers, rows)
    page = Console(width=None if Console().is_terminal else 120)
    for table in (_summary(figures, config.shape.label), _losses(figures), _by_set(figures)):
        page.print(table)
    if comparisons:
        page.print(_checked(comparisons))
    if out is not None:
        out.write_text(json_format.dumps(document(config, figures, comparisons), indent=1) + "\n", encoding="utf-8")
    if check is not None and not comparisons:
        same = "policies, prompts, pipeline, pair and sampling"
        raise UserError(f"--check {check}: no row is of these {same}; give the directory of a sweep with the same")


def _summary(figures: Sequence[PolicyFigures], pipeline: str) -> Table:
    table = _table(f"Policies on {pipeline}, emulated", "Means over prompt sets, geometric for times and ratios.")
    for name in ("timesteps/token", "ms/token", "hit rate", "timesteps/miss", "over the first"):
        table.add_column(name, justify="right")
    for one in figures:
        per_miss = one.overall.totals.lost_per_miss
        table.add_row(
            one.policy.name, f"{one.timesteps_per_token:.3f}", f"{one.ms_per_token:.1f}", f"{one.hit_rate:.1%}",
            "-" if per_miss is None else f"{per_miss:.2f}", f"{one.speedup(figures[0]):.3f}×",
        )  # fmt: skip
    return table


def _losses(figures: Sequence[PolicyFigures]) -> Table:
    """What the timesteps per token went to."""
    caption = (
        "All but together add up to timesteps/token. together: share of tokens whose row entered with the row before it; "
        "late: it entered later than the timestep after that, but before its acceptance; miss: after its acceptance, though "
        "somebody had named the token, or nobody had."
    )
    table = _table("Timesteps per token by cause", caption)
    for name in ("together", *_CAUSES.values()):
        table.add_column(name, justify="right")
    for one in figures:
        lost = one.lost_per_token
        table.add_row(one.policy.name, f"{lost['together']:.1%}", *(f"{lost[cause]:.3f}" for cause in _CAUSES))
    return table


def _by_set(figures: Sequence[PolicyFigures]) -> Table:
    table = _table("Emulated ms/token by prompt set")
    for name in figures[0].sets:
        table.add_column(name, justify="right")
    for one in figures:
        table.add_row(one.policy.name, *(f"{part.totals.ms_per_token:.1f}" for part in one.sets.values()))
    return table


def _checked(comparisons: Sequence[Comparison]) -> Table:
    table = _table("Beside a sweep, ms/token of the answers that both have")
    for name in ("clock", "slow motion", "answers", "predicted", "found", "predicted / found"):
        table.add_column(name, justify="right")
    for one in comparisons:
        figures = f"{one.predicted:.2f}", f"{one.found:.2f}", f"{one.ratio:.4f}"
        table.add_row(one.policy, one.clock, f"{one.slow_motion:g}", str(one.answers), *figures)
    return table


def _table(title: str, caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, min_width=len(title))
    table.title_justify = table.caption_justify = "left"
    table.add_column("policy", overflow="fold")
    return table
