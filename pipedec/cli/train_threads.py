"""``pipedec train apar``, ``pasta-sft`` and ``pasta-bonbon``: targets that answer in threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.core import UserError

DIALECTS = ("apar", "pasta")
_ANSWER_COLUMNS = ("", "answers", "forked", "threads", "tokens", "chain", "parallelism", "speed-up", "finished")


Command = Callable[..., None]

_PATH = click.Path(path_type=Path)
_COMPUTING = [
    click.option("--held-out-prompts", type=int, default=48, show_default=True, help="Answered of each kind, to measure."),
    click.option(
        "--dtype", type=click.Choice(["float32", "bfloat16"]), default="float32", show_default=True, help="Of forwards."
    ),
    click.option("--threads", type=int, default=2, show_default=True, help="CPU threads."),
    click.option(
        "--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True, help="Where to train."
    ),
]
_TUNING = [
    click.option("--in", "files", type=_PATH, multiple=True, required=True, help="Annotated answers (JSONL); repeatable."),
    click.option("--also", multiple=True, metavar="DIALECT=FILE", help="Annotated answers in a further dialect; repeatable."),
    click.option("--out", type=_PATH, required=True, help="Where the model, training.json and README.md are written."),
    click.option("--work", type=_PATH, required=True, help="Checkpoint and log; a second run continues from them."),
    click.option("--target", type=_PATH, help="Checkpoint directory to start from (default: the pair's target)."),
    click.option("--teacher", type=_PATH, help="Tuned model whose next tokens are learned: for drafts."),
    click.option("--steps", type=int, help="Training steps (default: 400)."),
    click.option("--batch-tokens", type=int, help="Tokens of a step (default: 4096)."),
    click.option("--learning-rate", type=float, help="The highest (default: 0.002)."),
    click.option("--seed", type=int, help="Order of samples, which are answered in one thread, new embeddings (default: 0)."),
    click.option("--form", help="tree: threads beside each other, by a mask; unrolled: a row for each (default: tree)."),
    click.option("--plain-share", type=float, help="Share of answers in one thread, without marker (default: 0.15)."),
    click.option("--max-length", type=int, help="Longer answers with their prompts are left out (default: 512 tokens)."),
    *_COMPUTING,
]


def _options(options: Sequence[Callable[[Command], Command]]) -> Callable[[Command], Command]:
    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@click.command()
@_options(_TUNING)
def apar(**wishes: Any) -> None:
    """Fine-tune a model to answer in APAR's paragraph tree."""
    _tune("apar", **wishes)


@click.command()
@_options(_TUNING)
def pasta_sft(**wishes: Any) -> None:
    """Fine-tune a model to answer in PASTA-LANG (PASTA-SFT)."""
    _tune("pasta", **wishes)


@click.command()
@click.option("--in", "files", type=_PATH, multiple=True, required=True, help="Annotated answers; repeatable.")
@click.option("--model", "model", type=_PATH, required=True, help="What train pasta-sft wrote.")
@click.option("--baseline", type=_PATH, required=True, help="A model that answers in one thread.")
@click.option("--out", type=_PATH, required=True, help="Where model, training.json and README.md go.")
@click.option("--work", type=_PATH, required=True, help="Samples, scores, checkpoint; a second run continues.")
@click.option("--samples", type=int, help="Answers to each prompt (default: 10).")
@click.option("--max-prompts", type=int, help="At most so many prompts (default: all).")
@click.option("--max-tokens", type=int, help="Of an answer (default: 384).")
@click.option("--temperature", type=float, help="Of the samples (default: 1).")
@click.option("--lambda", "quality_weight", type=float, help="Of the score, speed-up + λ · quality (default: 2).")
@click.option("--alpha", type=float, help="Share of the SFT loss (default: 0.005).")
@click.option("--beta", type=float, help="1/β is the gap between best and worst (default: BoNBoN's, from --samples).")
@click.option("--judge", default="likelihood", show_default=True, help="likelihood, or an OpenAI-compatible server's base URL.")
@click.option("--judge-model", help="With a URL: the model to ask.")
@click.option("--api-key-env", metavar="NAME", help="With a URL: the environment variable that holds the key.")
@click.option("--timeout", type=float, default=120.0, show_default=True, help="With a URL: seconds to wait for a reply.")
@click.option("--tries", type=int, default=5, show_default=True, help="With a URL: attempts while it is busy or away.")
@click.option("--steps", type=int, help="Training steps (default: once through all pairs).")
@click.option("--batch", type=int, help="Pairs in a step (default: 8).")
@click.option("--learning-rate", type=float, help="The highest (default: 0.0002; the paper's: 0.0000005).")
@click.option("--seed", type=int, help="Which prompts, their order, the samples (default: 0).")
@_options(_COMPUTING)
def pasta_bonbon(
    files: tuple[Path, ...],
    model: Path,
    baseline: Path,
    out: Path,
    work: Path,
    judge: str,
    judge_model: str | None,
    api_key_env: str | None,
    timeout: float,
    tries: int,
    held_out_prompts: int,
    dtype: str,
    threads: int,
    device: str,
    **wishes: Any,
) -> None:
    """Continue a PASTA-SFT model on its own samples: prefer those that are quick and good (BoNBoN)."""
    from pipedec.config import secret_from_environment
    from pipedec.engine.spec import chosen_device
    from pipedec.train.bonbon import BonbonRecipe, prefer
    from pipedec.train.bonbon_card import bonbon_cells
    from pipedec.train.endpoint import ChatEndpoint
    from pipedec.train.thread_tuning import Run

    _at_least_1({"--threads": threads, "--held-out-prompts": held_out_prompts})
    endpoint = None
    if judge != "likelihood":
        if not judge_model:
            raise UserError("--judge URL goes with --judge-model NAME")
        api_key = secret_from_environment(api_key_env) if api_key_env else None
        endpoint = ChatEndpoint(judge, judge_model, api_key, timeout, tries, role="judge")
    recipe = BonbonRecipe(**{name: value for name, value in wishes.items() if value is not None})
    run = Run(out, work, dtype, threads, chosen_device(device), held_out_prompts)
    report = prefer(files, model, baseline, recipe, run, endpoint)
    rows = [(name, *bonbon_cells(report[key])) for name, key in (("before", "before"), ("after", "held_out")) if report[key]]
    _print_table("Greedy answers to held-out prompts", (*_ANSWER_COLUMNS, "quality"), rows)


def _tune(
    dialect: str,
    files: tuple[Path, ...],
    also: tuple[str, ...],
    target: Path | None,
    teacher: Path | None,
    out: Path,
    work: Path,
    held_out_prompts: int,
    dtype: str,
    threads: int,
    device: str,
    **wishes: Any,
) -> None:
    from pipedec.engine.spec import REFERENCE_PAIR, chosen_device
    from pipedec.train.thread_trainer import ThreadRecipe
    from pipedec.train.thread_tuning import Run, tune

    _at_least_1({"--threads": threads, "--held-out-prompts": held_out_prompts})
    by_dialect = {dialect: files}
    for entry in also:
        name, is_given, path = entry.partition("=")
        if name not in DIALECTS or not is_given or not path:
            raise UserError(f"--also {entry}: give DIALECT=FILE, where DIALECT is one of {', '.join(DIALECTS)}")
        by_dialect[name] = (*by_dialect.get(name, ()), Path(path))
    recipe = ThreadRecipe(**{name: value for name, value in wishes.items() if value is not None})
    run = Run(out, work, dtype, threads, chosen_device(device), held_out_prompts)
    _print_tuned(tune(target or REFERENCE_PAIR / "target", by_dialect, recipe, run, teacher))


def _at_least_1(counts: dict[str, int]) -> None:
    for name, count in counts.items():
        if count < 1:
            raise UserError(f"{name} must be at least 1")


def _print_tuned(report: dict[str, Any]) -> None:
    from pipedec.train.thread_card import agreement_cells, answer_cells, loss_cells

    losses = [(name, *loss_cells(row)) for name, row in report["held_out_loss"].items() if row]
    _print_table("Held-out answers", ("", "text loss", "tokens", "control loss", "tokens"), losses)
    if "held_out" in report:
        found = report["held_out"].items()
        rows = [(f"{dialect} {rule}", *answer_cells(row)) for dialect, by_rule in found for rule, row in by_rule.items()]
        _print_table("Answers to held-out prompts", _ANSWER_COLUMNS, rows)
    else:
        before, found = report["before"], report["agreement"].items()
        lines = ((dialect, rule, row) for dialect, by_rule in found for rule, row in by_rule.items())
        rows = [(f"{dialect} {rule}", *agreement_cells(before[dialect][rule], row)) for dialect, rule, row in lines]
        _print_table("The teacher's answers", ("written", "top 1", "top 4", "top 16", "tokens"), rows)


def _print_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
