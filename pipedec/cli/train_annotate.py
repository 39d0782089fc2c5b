"""``pipedec train annotate``: training data for models that answer in threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipedec.cli.options import gathered
from pipedec.cli.train_options import (
    PATH,
    Command,
    EndpointFlags,
    at_least_one,
    endpoint_options,
    existing,
    moved_option,
    print_table,
    recipe_command,
)
from pipedec.core import UserError

if TYPE_CHECKING:
    from pipedec.train.annotate.annotators import Annotator
    from pipedec.train.annotate.records import Annotated, Question

_COLUMNS = ("", "answers", "structured", "forks", "most", "median fork", "mean answer")


@dataclass(frozen=True)
class QuestionFlags:
    """Which questions are annotated, in which order."""

    files: tuple[Path, ...]
    problems: Path | None
    unstructured_share: float
    limit: int | None
    seed: int

    def check(self) -> None:
        """Raises UserError if there are no questions or a value is out of range."""
        if not (self.files or self.problems):
            raise UserError("nothing to annotate: give --in FILE or --problems FILE")
        if not 0 <= self.unstructured_share < 1:
            raise UserError("--unstructured-share must be at least 0 and below 1")
        at_least_one("--limit", self.limit)
        existing(self.problems)

    def chosen(self, rules: Annotator) -> list[Question]:
        """The questions, in order. Raises UserError if a file is unsound."""
        from pipedec.train.annotate.questions import choose, read_questions

        questions = read_questions(self.files, self.problems)
        return choose(questions, rules, self.unstructured_share, self.seed)[: self.limit]


@dataclass(frozen=True)
class AnnotatorFlags:
    """Who annotates."""

    dialect: str
    annotator: str
    model: str | None
    fallback: bool
    tokenizer: Path | None
    min_block_tokens: int
    block_tokens: int

    def annotators(self, server: EndpointFlags) -> tuple[Annotator, Annotator]:
        """The rules of the dialect, and the annotator asked for. Raises UserError if they do not fit each other."""
        from pipedec.shipped import reference_pair
        from pipedec.threads import load_dialect
        from pipedec.train.annotate.annotators import AparRules, ModelAnnotator, PastaRules, length_in_tokens

        at_least_one("--min-block-tokens", self.min_block_tokens)
        if self.block_tokens < self.min_block_tokens:
            raise UserError("--block-tokens must be at least --min-block-tokens")
        endpoint = None
        if self.annotator != "rules":
            if self.dialect != "pasta" or not self.model:
                raise UserError("--annotator URL goes with --dialect pasta and --model NAME")
            endpoint = server.endpoint(self.annotator, self.model, "annotator")
        length = length_in_tokens(self.tokenizer or reference_pair() / "target")
        words = load_dialect("pasta").max_topic_words
        rules: Annotator = AparRules()
        if self.dialect == "pasta":
            rules = PastaRules(length, words, self.min_block_tokens, self.block_tokens)
        return rules, rules if endpoint is None else ModelAnnotator(endpoint, length)


def _question_options(command: Command) -> Command:
    options = [
        click.option(
            "--in", "files", type=PATH, multiple=True, help="JSONL, JSONL.gz or CSV of questions and answers; repeatable."
        ),
        click.option("--problems", type=PATH, help="Word problems in the GSM8K JSONL format (training split)."),
        click.option(
            "--unstructured-share", type=float, default=0.5, show_default=True, help="Share of answers without a structure."
        ),
        click.option("--limit", type=int, help="Maximum number of answers (default: all)."),
        click.option("--seed", type=int, default=0, show_default=True, help="Seed of order and choice of answers."),
    ]
    return gathered(command, options, QuestionFlags, "questions")


def _annotator_options(command: Command) -> Command:
    dialects = click.Choice(["apar", "pasta"])
    options = [
        click.option("--dialect", type=dialects, required=True, help="Dialect of threads to annotate for."),
        click.option(
            "--annotator", default="rules", show_default=True, help="rules, or the base URL of an OpenAI-compatible server."
        ),
        click.option("--model", help="With a URL: the model to ask."),
        click.option(
            "--fallback", is_flag=True, help="With a URL: use the rules where a reply is unusable (default: leave out)."
        ),
        click.option(
            "--min-block-tokens", type=int, default=30, show_default=True, help="pasta: parts that are shorter are not promised."
        ),
        click.option(
            "--block-tokens",
            type=int,
            default=60,
            show_default=True,
            help="pasta: parts that are longer are cut near this length.",
        ),
        click.option("--tokenizer", type=PATH, help="Checkpoint directory whose tokenizer counts tokens (default: the pair's)."),
    ]
    return gathered(command, options, AnnotatorFlags, "how")


@click.command()
@_annotator_options
@_question_options
@click.option("--out", type=PATH, required=True, help="JSONL; a second run continues it.")
@endpoint_options
@moved_option("--library", f"{recipe_command('questions --out library.jsonl')}, then --in library.jsonl", is_flag=True)
def annotate(how: AnnotatorFlags, questions: QuestionFlags, out: Path, server: EndpointFlags) -> None:
    """Annotate where answers can be decoded in parallel threads: training data for apar and pasta-sft."""
    from pipedec.train.annotate.annotation import annotate as annotate_all
    from pipedec.train.annotate.records import read_annotated

    questions.check()
    rules, annotator = how.annotators(server)
    outcome = annotate_all(questions.chosen(rules), how.dialect, annotator, rules if how.fallback else None, out)
    click.echo(f"{outcome.written} written to {out}, {outcome.present} were already there")
    for reason, count in outcome.rejected.most_common():
        click.echo(f"{count} replies not used: {reason}")
    _print_summary(list(read_annotated(out, how.dialect)))


def _print_summary(records: list[Annotated]) -> None:
    from pipedec.train.annotate.summary import by_kind, by_rule

    for title, rows in (("Answers by rule; lengths in characters", by_rule(records)), ("Answers by kind", by_kind(records))):
        print_table(title, _COLUMNS, [row.cells() for row in rows])
