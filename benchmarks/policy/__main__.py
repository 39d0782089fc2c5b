"""``python -m benchmarks.policy``: speculation policies compared offline, on recorded answers."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Annotated

import click
from pandas import DataFrame
from rich.console import Console
from rich.table import Table

from benchmarks.methods import registered
from benchmarks.output import titled_table
from benchmarks.policy.calibration import Observed, by_kind, differences, observations, observing
from benchmarks.policy.opponents import OPPONENTS
from benchmarks.policy.rivals import RIVALS, RivalFigures, find_rivals, with_rivals
from benchmarks.policy.study import PolicyConfig, PolicyFigures, Study, compare, document
from pipedec.bench.policy import Policy
from pipedec.bench.record import ROWS_FILE, Row, check_writable, read_records
from pipedec.bench.sweep.rows import SCHEMA, read_rows
from pipedec.cli.benchmarks.shared import BenchPromptFlags, ProgressBar, question_options
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.flags import Help, own_options, partial_of, run_command

_CAUSES = {
    "first": "first token", "tokens": "token itself", "late": "late", "named": "miss, proposed", "unnamed": "miss, not proposed",
}  # fmt: skip


@click.command()
@partial_of(PolicyConfig, "compared")
@question_options
@own_options
def policy(
    compared: Callable[..., PolicyConfig],
    asked: BenchPromptFlags,
    recording: Annotated[Path, Help("Directory of recorded answers; missing ones are recorded.", "DIR")],
    specs: Annotated[
        tuple[str, ...],
        Help(
            "METHOD[:KEY=VALUE,…] with the method's options, like proposers=draft+ngrams; may be repeated. Besides the usual "
            f"methods: {', '.join(sorted(one.name for one in OPPONENTS))}.",
            "METHOD[:KEY=VALUE,…]", "--policy", repeated=True,
        ),
    ] = ("pipedec", "pipedec-bestfirst"),
    rivals: Annotated[
        tuple[str, ...],
        Help(f"Also compare {DEFAULT_METHOD} with the best trees of the field, with many budgets: all, {', '.join(RIVALS)}."),
    ] = (),
    out: Annotated[Path | None, Help("Write all figures to this file.", "FILE", "--json")] = None,
    check: Annotated[
        Path | None, Help("Compare with the rows of a sweep with --dispatch tasks, in this directory.", "DIR")
    ] = None,
    calibration: Annotated[bool, Help("Also compare the default method's predicted chances with accepted shares.")] = False,
) -> None:  # fmt: skip
    """Compare speculation policies in minutes: timesteps on recorded answers of the target, and their emulated time.

    The target answers each prompt once and the draft model runs once per context; both are kept in RECORDING. The methods are the
    real ones, timesteps are counted as in a pipeline, and times are computed for the preset.
    """
    with registered(*OPPONENTS):
        opponents, policies = find_rivals(rivals), tuple(Policy.parse(spec) for spec in specs)
        config = compared(**asked.settings(), policies=with_rivals(policies, opponents) if opponents else policies)
        if calibration and all(policy.method != DEFAULT_METHOD for policy in config.policies):
            raise UserError(f"--calibration is that of the default method: add --policy {DEFAULT_METHOD}")
        study = Study(config, asked.prompt_sets(), recording)
        check_writable(out, "--json")
        rows = [] if check is None else _rows_of_sweep(check / ROWS_FILE)
        observer: AbstractContextManager[list[Observed]] = observing() if calibration else nullcontext([])
        with ProgressBar() as bar, observer as observed:
            answers = list(study.run(bar))
        figures = PolicyFigures.of(answers)
        against = RivalFigures.of(figures, config.policies, opponents) if opponents else None
    comparisons = compare(config, answers, rows)
    written = document(config, figures, comparisons)
    tables = [_summary(figures, config.shape.label), _losses(figures), _by_set(figures)]
    if len(comparisons):
        tables.append(_checked(comparisons))
    if against is not None:
        tables.append(_against(against))
        written["rivals"] = against.document()
    if calibration:
        found = observations(answers, observed)
        by_set = differences(found)
        tables += [_calibration(by_set), *map(_shares, *zip(*by_kind(found).items(), strict=True))]
        written["calibration"] = by_set.to_dict("records")
    page = Console(width=None if Console().is_terminal else 120)
    for table in tables:
        page.print(table)
    if out is not None:
        out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    if check is not None and not len(comparisons):
        same = "policies, prompts, pipeline, models, priors, sampling and dispatch (tasks)"
        raise UserError(f"--check {check}: no row has the same {same}; give the directory of a sweep that has")


def _rows_of_sweep(path: Path) -> list[Row]:
    """Raises UserError if the file has other rows."""
    read_rows([path])
    return [row for _, row in read_records(path, SCHEMA)]


def _summary(figures: PolicyFigures, pipeline: str) -> Table:
    columns = ("policy", "timesteps/token", "ms/token", "hit rate", "over the first")
    caption = "Means over prompt sets, geometric for times and ratios."
    table = titled_table(f"Policies on {pipeline}, emulated", columns, caption)
    for policy, one in figures.means.iterrows():
        table.add_row(
            str(policy), f"{one['timesteps_per_token']:.3f}", f"{one['ms_per_token']:.1f}", f"{one['hit_rate']:.1%}",
            f"{one['speedup']:.3f}×",
        )  # fmt: skip
    return table


def _losses(figures: PolicyFigures) -> Table:
    """Timesteps per token by cause."""
    caption = (
        "All except together add up to timesteps/token. together: share of tokens whose row entered in the same timestep as the "
        "row before it; late: the row entered more than one timestep after that row, but before the token was accepted; miss: it "
        "entered after the token was accepted, which a draft source had proposed or not."
    )
    table = titled_table("Timesteps per token by cause", ("policy", "together", *_CAUSES.values()), caption)
    for policy, causes in figures.causes_per_token.iterrows():
        table.add_row(str(policy), f"{causes['together']:.1%}", *(f"{causes[cause]:.3f}" for cause in _CAUSES))
    return table


def _by_set(figures: PolicyFigures) -> Table:
    table = titled_table("Emulated ms/token by prompt set", ("policy", *figures.totals.index.unique("prompt_set")))
    for policy, sets in figures.totals["tpot_ms"].groupby(level="policy", observed=True):
        table.add_row(str(policy), *(f"{ms_per_token:.1f}" for ms_per_token in sets))
    return table


def _calibration(by_set: DataFrame) -> Table:
    caption = (
        "difference: mean over ten bins, of equal numbers of proposed tokens, of the absolute difference between the predicted "
        "chance and the accepted share, given the row above; by chance: if all predictions were right."
    )
    columns = ("policy", "prompt set", "proposed tokens", "difference", "by chance")
    table = titled_table("Calibration", columns, caption, left=("prompt set",))
    for one in by_set.to_dict("records"):
        numbers = str(one["observations"]), f"{one['difference']:.3f}", f"{one['by_chance']:.3f}"
        table.add_row(one["policy"], one["prompt_set"], *numbers)
    return table


def _shares(kind: str, shares: DataFrame) -> Table:
    table = titled_table(f"Accepted share by {kind}", (kind, "proposed tokens", "predicted", "accepted"))
    for key, one in shares.iterrows():
        table.add_row(str(key), f"{one['observations']:.0f}", f"{one['predicted']:.3f}", f"{one['accepted']:.3f}")
    return table


def _checked(comparisons: DataFrame) -> Table:
    columns = ("policy", "clock", "slow motion", "answers", "predicted", "sweep", "predicted / sweep")
    table = titled_table("Compared with a sweep: ms/token of the answers in both", columns)
    for one in comparisons.to_dict("records"):
        figures = f"{one['predicted']:.2f}", f"{one['found']:.2f}", f"{one['ratio']:.4f}"
        table.add_row(one["policy"], one["clock"], f"{one['slow_motion']:g}", str(one["answers"]), *figures)
    return table


def _against(figures: RivalFigures) -> Table:
    """Every rival with the best of its budgets, by prompt set."""
    caption = (
        f"ms/token; each rival has the budget that is best for the set. The last row: the best rival's time over that of "
        f"{DEFAULT_METHOD}; geometric mean {figures.mean:.3f}×. The best rivals: "
        + "; ".join(f"{name}: {policy}" for name, policy in figures.winners["policy"].items())
    )
    table = titled_table("The default over the best trees of the field", ("policy", *figures.default), caption)
    for rival, of_rival in figures.best["ms"].groupby(level="rival", sort=False):
        table.add_row(str(rival), *(f"{of_rival[rival, name]:.1f}" for name in figures.default))
    table.add_row(DEFAULT_METHOD, *(f"{ms:.1f}" for ms in figures.default.values()))
    table.add_row("best rival / default", *(f"{ratio:.3f}×" for ratio in figures.ratios.values()))
    return table


if __name__ == "__main__":
    run_command(policy)
