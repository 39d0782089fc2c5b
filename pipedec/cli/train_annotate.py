"""``pipedec train annotate``: training data for models that answer in threads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import click
from msgspec import Meta

from pipedec.cli.train_options import EndpointFlags, Problems, existing, moved_option, print_table, recipe_command
from pipedec.core import UserError
from pipedec.flags import Help, options_of, own_options
from pipedec.shipped import reference_pair
from pipedec.threads import load_dialect
from pipedec.train.annotate import records
from pipedec.train.annotate.annotation import annotate as annotate_all
from pipedec.train.annotate.annotators import Annotator, AparRules, ModelAnnotator, PastaRules, length_in_tokens
from pipedec.train.annotate.questions import choose, read_questions
from pipedec.train.annotate.summary import by_kind, by_rule

_COLUMNS = ("", "answers", "structured", "forks", "most", "median fork", "mean answer")


@dataclass(frozen=True)
class QuestionFlags:
    """Which questions are annotated, in which order."""

    files: Annotated[
        tuple[Path, ...],
        Help("JSONL, JSONL.gz or CSV of questions and answers; may be repeated.", "FILE", "--in", repeated=True),
    ] = ()
    problems: Problems = None
    unstructured_share: Annotated[float, Help("Share of answers without a structure; below 1.")] = 0.5
    limit: Annotated[int | None, Meta(ge=1), Help("Maximum number of answers (default: all).")] = None
    seed: Annotated[int, Help("Seed of order and choice of answers.")] = 0

    def check(self) -> None:
        """Raises UserError if there are no questions or a value is out of range."""
        if not (self.files or self.problems):
            raise UserError("nothing to annotate: give --in FILE or --problems FILE")
        if not 0 <= self.unstructured_share < 1:
            raise UserError("--unstructured-share must be at least 0 and below 1")
        existing(self.problems)

    def chosen(self, rules: Annotator) -> list[records.Question]:
        """The questions, in order. Raises UserError if a file is unsound."""
        questions = read_questions(self.files, self.problems)
        return choose(questions, rules, self.unstructured_share, self.seed)[: self.limit]


@dataclass(frozen=True, kw_only=True)
class AnnotatorFlags:
    """Who annotates."""

    dialect: Annotated[Literal["apar", "pasta"], Help("Dialect of threads to annotate for.")]
    annotator: Annotated[str, Help("rules, or the base URL of an OpenAI-compatible server.", "rules|URL")] = "rules"
    model: Annotated[str | None, Help("With a URL: the model to ask.", "NAME")] = None
    fallback: Annotated[bool, Help("With a URL: use the rules where a reply is unusable (default: leave out).")] = False
    min_block_tokens: Annotated[int, Meta(ge=1), Help("pasta: parts that are shorter are not promised.")] = 30
    block_tokens: Annotated[int, Help("pasta: parts that are longer are cut near this length.")] = 60
    tokenizer: Annotated[
        Path | None, Help("Checkpoint directory whose tokenizer counts tokens (default: the pair's).", "DIR")
    ] = None

    def annotators(self, server: EndpointFlags) -> tuple[Annotator, Annotator]:
        """The rules of the dialect, and the annotator asked for. Raises UserError if they do not fit each other."""
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


@click.command()
@options_of(AnnotatorFlags, "how")
@options_of(QuestionFlags, "questions")
@options_of(EndpointFlags, "server")
@moved_option("--library", f"{recipe_command('questions --out library.jsonl')}, then --in library.jsonl", is_flag=True)
@own_options
def annotate(
    how: AnnotatorFlags,
    questions: QuestionFlags,
    server: EndpointFlags,
    out: Annotated[Path, Help("JSONL; a second run continues it.", "FILE")],
) -> None:
    """Annotate where answers can be decoded in parallel threads: training data for apar and pasta-sft."""
    questions.check()
    rules, annotator = how.annotators(server)
    outcome = annotate_all(questions.chosen(rules), how.dialect, annotator, rules if how.fallback else None, out)
    click.echo(f"{outcome.written} written to {out}, {outcome.present} were already there")
    for reason, count in outcome.rejected.most_common():
        click.echo(f"{count} replies not used: {reason}")
    _print_summary(list(records.read_annotated(out, how.dialect)))


def _print_summary(found: list[records.Annotated]) -> None:
    for title, rows in (("Answers by rule; lengths in characters", by_rule(found)), ("Answers by kind", by_kind(found))):
        print_table(title, _COLUMNS, [row.cells() for row in rows])


@click.command(hidden=True, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def reference() -> None:
    """Moved to recipes/."""
    raise UserError(f"pipedec train reference has moved: {recipe_command('pair')}")
