"""``pipedec train pasta-bonbon``: a model that answers in threads learns from its own samples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click

from pipedec.bench.report.figures.trade_off import draw_trade_off
from pipedec.bench.report.markdown import markdown_table
from pipedec.cli.train_options import Answers, EndpointFlags, print_table
from pipedec.cli.train_run import DeviceFlags, PartialRun, device_options, threads_run_options
from pipedec.cli.train_threads import ANSWER_COLUMNS
from pipedec.core import UserError
from pipedec.flags import Help, options_of
from pipedec.train.cards.cells import answer_cells
from pipedec.train.preference.bonbon import BonbonRecipe
from pipedec.train.preference.rounds import Rounds, scores_of, summary


@dataclass(frozen=True)
class PreferenceFlags:
    """What is tuned on which prompts, and who judges."""

    files: Answers
    model: Annotated[Path, Help("Model directory that train pasta-sft wrote.", "DIR")]
    baseline: Annotated[Path, Help("Model that answers in one thread.", "DIR")]
    judge: Annotated[str, Help("likelihood, or the base URL of an OpenAI-compatible server.", "likelihood|URL")] = "likelihood"
    judge_model: Annotated[str | None, Help("With a URL: the model to ask.", "NAME")] = None
    weights: Annotated[tuple[float, ...], Help("λ of the score, efficiency + λ · quality: 1,2,4,8,inf.", flag="--lambda")] = (
        2.0,
    )
    efficiencies: Annotated[
        tuple[str, ...],
        Help("speedup, parallelism, or their harmonic or arithmetic mean; several: speedup,harmonic.", flag="--efficiency"),
    ] = ("speedup",)
    rounds: Annotated[int, Help("Rounds for each λ, each from the model of the one before.")] = 1


@click.command()
@options_of(PreferenceFlags, "preferred")
@threads_run_options
@options_of(BonbonRecipe, "recipe")
@options_of(EndpointFlags, "server")
@device_options
def pasta_bonbon(
    preferred: PreferenceFlags, run: PartialRun, recipe: BonbonRecipe, server: EndpointFlags, device: DeviceFlags
) -> None:
    """Continue a PASTA-SFT model on its own samples: learn to prefer those that are quick and good (BoNBoN).

    Several λ, efficiencies or rounds write a model to OUT/lambda-λ/round-r each, and OUT/summary.json, summary.md and a picture
    of their trade-off. A second run continues.
    """
    endpoint = None
    if preferred.judge != "likelihood":
        if not preferred.judge_model:
            raise UserError("--judge URL goes with --judge-model NAME")
        endpoint = server.endpoint(preferred.judge, preferred.judge_model, "judge")
    recipes = scores_of(recipe, preferred.weights, list(preferred.efficiencies))
    asked = Rounds(preferred.files, preferred.model, preferred.baseline, recipes, preferred.rounds, endpoint)
    where = run(**device.chosen())
    reports = asked.run(where)
    _print_preferred(reports, asked.is_one)
    if not asked.is_one:
        _draw_trade_off(reports, where.out)


def _print_preferred(reports: list[dict[str, Any]], is_one: bool) -> None:
    rows = [("before", *answer_cells(report["before"])) for report in reports[:1] if report["before"]]
    for report in reports:
        recipe = report["recipe"]
        name = "after" if is_one else f"{recipe['efficiency']}, λ = {recipe['quality_weight']}, round {report['round']}"
        if report["held_out"]:
            rows.append((name, *answer_cells(report["held_out"])))
    print_table("Greedy answers to held-out prompts", (*ANSWER_COLUMNS, "quality", "wins"), rows)


def _draw_trade_off(reports: list[dict[str, Any]], out: Path) -> None:
    """Write summary.md and the picture."""
    lines = summary(reports)
    columns = list(lines[0]) if lines else []
    cells = [["–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value) for value in line.values()]
             for line in lines]  # fmt: skip
    (out / "summary.md").write_text(markdown_table(columns, cells, left=(0,)) + "\n", encoding="utf-8")
    files = draw_trade_off(lines, out) if lines else []
    for path in (out / "summary.json", out / "summary.md", *files):
        click.echo(str(path))
