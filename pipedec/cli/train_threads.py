"""``pipedec train apar``, ``pasta-sft`` and ``pasta-bonbon``: models that answer in threads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from pipedec.cli.options import gathered
from pipedec.cli.train_options import (
    PATH,
    Command,
    DeviceFlags,
    EndpointFlags,
    RunFlags,
    at_least_one,
    device_options,
    endpoint_options,
    given,
    options_of,
    print_table,
    run_options,
)
from pipedec.core import UserError

DIALECTS = ("apar", "pasta")
_ANSWER_COLUMNS = ("", "answers", "forked", "threads", "tokens", "chain", "parallelism", "speed-up", "finished", "circles")
_HELD_OUT = click.option(
    "--held-out-prompts", type=int, default=48, show_default=True, help="Maximum number of prompts of each kind to measure on."
)
_FILES = click.option("--in", "files", type=PATH, multiple=True, required=True, help="Annotated answers (JSONL); repeatable.")


@dataclass(frozen=True)
class ModelFlags:
    """What is tuned, on which files."""

    files: tuple[Path, ...]
    also: tuple[str, ...]
    target: Path | None
    teacher: Path | None
    prompts: tuple[str, ...]

    def by_dialect(self, dialect: str) -> dict[str, tuple[Path, ...]]:
        """Annotated answers, by dialect. Raises UserError if ``--also`` names no dialect or no file."""
        found = {dialect: self.files}
        for entry in self.also:
            name, is_given, path = entry.partition("=")
            if name not in DIALECTS or not is_given or not path:
                raise UserError(f"--also {entry}: give DIALECT=FILE, where DIALECT is one of {', '.join(DIALECTS)}")
            found[name] = (*found.get(name, ()), Path(path))
        return found

    def unanswered(self) -> tuple[str, ...]:
        """The prompts of all files of ``--prompts``, each once. Raises UserError if a file is unsound."""
        from pipedec.data.prompts import PromptSource

        return tuple(dict.fromkeys(prompt for text in self.prompts for prompt in PromptSource.parse(text).read().prompts))


def _model_options(command: Command) -> Command:
    options = [
        _FILES,
        click.option("--also", multiple=True, metavar="DIALECT=FILE", help="Annotated answers in a second dialect; repeatable."),
        click.option("--target", type=PATH, help="Checkpoint directory to start from (default: the pair's target)."),
        click.option("--teacher", type=PATH, help="Tuned model to distil from, for drafts."),
        click.option(
            "--prompts",
            multiple=True,
            metavar="[NAME=]FILE[#KEY=VALUE]",
            help="Prompts without answers: for circle rounds, and for the teacher to answer (default: circle rounds have those "
            "of --in); repeatable.",
        ),
    ]
    return gathered(command, options, ModelFlags, "models")


_TUNING = options_of(
    _model_options,
    run_options,
    click.option("--steps", type=int, help="Training steps (default: 400)."),
    click.option("--batch-tokens", type=int, help="Tokens of a step (default: 4096)."),
    click.option("--learning-rate", type=float, help="Peak learning rate (default: 0.002)."),
    click.option("--seed", type=int, help="Seed of sample order, of plain answers and of new embeddings (default: 0)."),
    click.option("--form", help="tree: all threads in one row, under a mask; unrolled: one row per thread (default: tree)."),
    click.option("--plain-share", type=float, help="Share of answers learned in one thread, without the marker (default: 0.15)."),
    click.option("--max-length", type=int, help="Leave out answers that are longer, with their prompts (default: 512 tokens)."),
    click.option("--circle-rounds", type=int, help="How often the model's own circling answers are unlearned (default: 0)."),
    click.option("--circle-weight", type=float, help="Weight of unlearning them beside the answers' loss (default: 0.25)."),
    click.option("--circle-prompts", type=int, help="Prompts that it answers in each of these rounds (default: 96)."),
    _HELD_OUT,
    device_options,
)


@click.command()
@_TUNING
def apar(**options: Any) -> None:
    """Fine-tune a model to answer in APAR's paragraph tree."""
    _tune("apar", **options)


@click.command()
@_TUNING
def pasta_sft(**options: Any) -> None:
    """Fine-tune a model to answer in PASTA-LANG (PASTA-SFT)."""
    _tune("pasta", **options)


def _tune(dialect: str, models: ModelFlags, run: RunFlags, device: DeviceFlags, held_out_prompts: int, **recipe: Any) -> None:
    from pipedec.shipped import reference_pair
    from pipedec.train.threads.learning import ThreadRecipe
    from pipedec.train.threads.tuning import tune

    at_least_one("--held-out-prompts", held_out_prompts)
    by_dialect, chosen = models.by_dialect(dialect), ThreadRecipe(**given(recipe))
    where = run.run(held_out_prompts=held_out_prompts, **device.chosen())
    target, prompts = models.target or reference_pair() / "target", models.unanswered()
    _print_tuned(tune(target, by_dialect, chosen, where, models.teacher, prompts))


def _print_tuned(report: dict[str, Any]) -> None:
    from pipedec.train.cards.cells import answer_cells, change_cells, loss_cells

    losses = [(name, *loss_cells(row)) for name, row in report["held_out_loss"].items() if row]
    print_table("Held-out answers", ("", "text loss", "tokens", "control loss", "tokens"), losses)
    if "held_out" in report:
        found = report["held_out"].items()
        rows = [(f"{dialect} {rule}", *answer_cells(row)) for dialect, by_rule in found for rule, row in by_rule.items()]
        print_table("Answers to held-out prompts", _ANSWER_COLUMNS, rows)
    else:
        before, found = report["before"], report["agreement"].items()
        lines = ((dialect, rule, row) for dialect, by_rule in found for rule, row in by_rule.items())
        rows = [(f"{dialect} {rule}", *change_cells(before[dialect][rule], row)) for dialect, rule, row in lines]
        print_table("The teacher's answers", ("written", "top 1", "top 4", "top 16", "tokens"), rows)


@dataclass(frozen=True)
class PreferenceFlags:
    """What is tuned on which prompts, and who judges."""

    files: tuple[Path, ...]
    model: Path
    baseline: Path
    judge: str
    judge_model: str | None


def _preference_options(command: Command) -> Command:
    options = [
        _FILES,
        click.option("--model", type=PATH, required=True, help="Model directory that train pasta-sft wrote."),
        click.option("--baseline", type=PATH, required=True, help="Model that answers in one thread."),
        click.option(
            "--judge", default="likelihood", show_default=True, help="likelihood, or the base URL of an OpenAI-compatible server."
        ),
        click.option("--judge-model", help="With a URL: the model to ask."),
    ]
    return gathered(command, options, PreferenceFlags, "preferred")


@click.command()
@_preference_options
@run_options
@click.option("--samples", type=int, help="Sampled answers per prompt (default: 10).")
@click.option("--max-prompts", type=int, help="Maximum number of prompts (default: all).")
@click.option("--max-tokens", type=int, help="Maximum number of tokens of an answer (default: 384).")
@click.option("--temperature", type=float, help="Sampling temperature (default: 1).")
@click.option(
    "--lambda", "weights", default="2", show_default=True, help="λ of the score, efficiency + λ · quality: 1,2,4,8,inf."
)
@click.option(
    "--efficiency", "efficiencies", default="speedup", show_default=True,
    help="speedup, parallelism, or their harmonic or arithmetic mean; several: speedup,harmonic.",
)  # fmt: skip
@click.option(
    "--unfinished-worst/--no-unfinished-worst", default=None, help="Samples that do not end may be the worst (default: they may)."
)
@click.option(
    "--rounds", type=int, default=1, show_default=True, help="Rounds for each λ, each from the model of the one before."
)
@click.option("--alpha", type=float, help="Weight of the SFT loss (default: 0.005).")
@click.option("--beta", type=float, help="1/β is the wanted gap between best and worst (default: BoNBoN's, from --samples).")
@click.option("--steps", type=int, help="Training steps (default: one pass over all pairs).")
@click.option("--batch", type=int, help="Pairs in a step (default: 8).")
@click.option("--learning-rate", type=float, help="Peak learning rate (default: 0.0002; the paper's: 0.0000005).")
@click.option("--seed", type=int, help="Seed of prompt choice, order and samples (default: 0).")
@endpoint_options
@_HELD_OUT
@device_options
def pasta_bonbon(
    preferred: PreferenceFlags,
    run: RunFlags,
    server: EndpointFlags,
    held_out_prompts: int,
    device: DeviceFlags,
    weights: str,
    efficiencies: str,
    rounds: int,
    **recipe: Any,
) -> None:
    """Continue a PASTA-SFT model on its own samples: learn to prefer those that are quick and good (BoNBoN).

    Several λ, efficiencies or rounds write a model to OUT/lambda-λ/round-r each, and OUT/summary.json, summary.md and a picture
    of their trade-off. A second run continues.
    """
    from pipedec.train.preference.bonbon import BonbonRecipe
    from pipedec.train.preference.rounds import Rounds, scores_of

    at_least_one("--held-out-prompts", held_out_prompts)
    endpoint = None
    if preferred.judge != "likelihood":
        if not preferred.judge_model:
            raise UserError("--judge URL goes with --judge-model NAME")
        endpoint = server.endpoint(preferred.judge, preferred.judge_model, "judge")
    recipes = scores_of(BonbonRecipe(**given(recipe)), _weights(weights), efficiencies.split(","))
    asked = Rounds(preferred.files, preferred.model, preferred.baseline, recipes, rounds, endpoint)
    where = run.run(held_out_prompts=held_out_prompts, **device.chosen())
    reports = asked.run(where)
    _print_preferred(reports, asked.is_one)
    if not asked.is_one:
        _draw_trade_off(reports, where.out)


def _weights(text: str) -> Iterator[float]:
    for part in text.split(","):
        try:
            yield float(part)
        except ValueError:
            raise UserError(f"--lambda {text}: give numbers or inf, separated by commas") from None


def _print_preferred(reports: list[dict[str, Any]], is_one: bool) -> None:
    from pipedec.train.cards.cells import answer_cells

    rows = [("before", *answer_cells(report["before"])) for report in reports[:1] if report["before"]]
    for report in reports:
        recipe = report["recipe"]
        name = "after" if is_one else f"{recipe['efficiency']}, λ = {recipe['quality_weight']}, round {report['round']}"
        if report["held_out"]:
            rows.append((name, *answer_cells(report["held_out"])))
    print_table("Greedy answers to held-out prompts", (*_ANSWER_COLUMNS, "quality", "wins"), rows)


def _draw_trade_off(reports: list[dict[str, Any]], out: Path) -> None:
    """Write summary.md and the picture."""
    from pipedec.bench.report.figures.trade_off import draw_trade_off
    from pipedec.bench.report.markdown import markdown_table
    from pipedec.train.preference.rounds import summary

    lines = summary(reports)
    columns = list(lines[0]) if lines else []
    cells = [["–" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value) for value in line.values()]
             for line in lines]  # fmt: skip
    (out / "summary.md").write_text(markdown_table(columns, cells, left=(0,)) + "\n", encoding="utf-8")
    files = draw_trade_off(lines, out) if lines else []
    for path in (out / "summary.json", out / "summary.md", *files):
        click.echo(str(path))
