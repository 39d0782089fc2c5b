"""``python -m recipes.thread_models``: annotate answers, train models that answer in threads, and train them by preference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import click
from msgspec import Meta

from pipedec.config.environment import optional_secret
from pipedec.core.errors import UserError
from pipedec.data import PromptSource
from pipedec.directories import reference_pair
from pipedec.flags import Command, Help, options_of, own_options, partial_of, run_command
from pipedec.threads import load_dialect
from pipedec.train.options import DeviceFlags, device_options, recipe_options
from pipedec.train.run import print_table
from recipes.thread_models import annotation
from recipes.thread_models.annotation import Annotator
from recipes.thread_models.bonbon import BonbonRecipe
from recipes.thread_models.chat_endpoint import ChatEndpoint
from recipes.thread_models.learning import ThreadRecipe
from recipes.thread_models.records import DIALECTS, Problems, Question, existing, read_annotated, read_questions
from recipes.thread_models.report import ThreadsRun, draw_trade_off, markdown_summary, print_preferred, print_tuned
from recipes.thread_models.rounds import Rounds, scores_of, summary
from recipes.thread_models.tuning import tune

Answers = Annotated[tuple[Path, ...], Help("Annotated answers (JSONL); may be repeated.", "FILE", "--in", repeated=True)]
_run_options = partial_of(ThreadsRun, "run")
PAPER_APAR = {  # Table 5
    "steps": 2000, "batch": 128, "learning_rate": 2e-5, "warmup_steps": 60, "decay": "cosine", "weight_decay": 0.0,
    "control_weight": 1.0, "plain_share": 0.0, "max_length": 2048,
}  # fmt: skip
PAPER_SFT = {  # PASTA §5.1: 4 epochs of 87,000 answers, a learning rate that falls from the first step on
    "steps": 43_500, "batch": 8, "learning_rate": 1e-5, "warmup_steps": 1, "control_weight": 1.0, "plain_share": 0.0,
    "max_length": 2048,
}  # fmt: skip
PAPER_BONBON = {  # PASTA §4, §5.1
    "samples": 10, "temperature": 1.0, "alpha": 0.005, "batch": 8, "learning_rate": 5e-7, "unfinished_worst": False,
}  # fmt: skip


@click.group()
def thread_models() -> None:
    """Train models that answer in decode threads, and make their training data."""


@dataclass(frozen=True)
class EndpointFlags:
    """How an OpenAI-compatible server is reached."""

    api_key_env: Annotated[str | None, Help("With a URL: the environment variable that holds the key.", "NAME")] = None
    timeout: Annotated[float, Help("With a URL: how long to wait for a reply.", "SECONDS")] = 120.0
    tries: Annotated[int, Help("With a URL: attempts while the server is unavailable.")] = 5

    def endpoint(self, url: str, model: str, role: str) -> ChatEndpoint:
        """The server at ``url``. Raises UserError if the address or a value is wrong, or the key is not set."""
        api_key = optional_secret(self.api_key_env) if self.api_key_env else None
        if self.api_key_env and api_key is None:
            raise UserError(f"the environment variable {self.api_key_env} is not set, or empty: it should hold the key")
        return ChatEndpoint(url, model, api_key, self.timeout, self.tries, role=role)


@dataclass(frozen=True)
class AnnotationPromptFlags:
    """The questions to annotate, and their order."""

    files: Annotated[
        tuple[Path, ...],
        Help("JSONL, JSONL.gz or CSV of questions and answers; may be repeated.", "FILE", "--in", repeated=True),
    ] = ()
    problems: Problems = None
    unstructured_share: Annotated[float, Help("Share of answers without a structure; below 1.")] = 0.5
    limit: Annotated[Annotated[int, Meta(ge=1)] | None, Help("Maximum number of answers (default: all).")] = None
    seed: Annotated[int, Help("Seed of order and choice of answers.")] = 0

    def check(self) -> None:
        """Raises UserError if there are no questions or a value is out of range."""
        if not (self.files or self.problems):
            raise UserError("nothing to annotate: give --in FILE or --problems FILE")
        if not 0 <= self.unstructured_share < 1:
            raise UserError("--unstructured-share must be at least 0 and below 1")
        existing(self.problems)

    def chosen(self, rules: Annotator) -> list[Question]:
        """The questions, in order. Raises UserError if a file is unsound."""
        questions = read_questions(self.files, self.problems)
        return annotation.choose(questions, rules, self.unstructured_share, self.seed)[: self.limit]


@dataclass(frozen=True, kw_only=True)
class AnnotatorFlags:
    """The annotator and its limits."""

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
        length = annotation.length_in_tokens(self.tokenizer or reference_pair() / "target")
        words = load_dialect("pasta").max_topic_words
        rules: Annotator = annotation.AparRules()
        if self.dialect == "pasta":
            rules = annotation.PastaRules(length, words, self.min_block_tokens, self.block_tokens)
        return rules, rules if endpoint is None else annotation.ModelAnnotator(endpoint, length)


@thread_models.command()
@options_of(AnnotatorFlags, "how")
@options_of(AnnotationPromptFlags, "questions")
@options_of(EndpointFlags, "server")
@own_options
def annotate(
    how: AnnotatorFlags,
    questions: AnnotationPromptFlags,
    server: EndpointFlags,
    out: Annotated[Path, Help("JSONL; a second run continues it.", "FILE")],
) -> None:
    """Annotate where answers can be decoded in parallel threads: training data for apar and pasta-sft."""
    questions.check()
    rules, annotator = how.annotators(server)
    outcome = annotation.annotate(questions.chosen(rules), how.dialect, annotator, rules if how.fallback else None, out)
    click.echo(f"{outcome.written} written to {out}, {outcome.present} were already there")
    for reason, count in outcome.rejected.most_common():
        click.echo(f"{count} replies not used: {reason}")
    found = list(read_annotated(out, how.dialect))
    print_table(
        "Answers by rule; lengths in characters",
        annotation.SUMMARY_COLUMNS,
        list(annotation.summaries(found, annotation.rule_of)),
    )
    print_table("Answers by kind", annotation.SUMMARY_COLUMNS, list(annotation.summaries(found, annotation.kind_of)))


@dataclass(frozen=True)
class ModelFlags:
    """The model to tune, and the files to learn from."""

    files: Answers
    also: Annotated[
        tuple[str, ...], Help("Annotated answers in a second dialect; may be repeated.", "DIALECT=FILE", repeated=True)
    ] = ()
    target: Annotated[Path | None, Help("Checkpoint directory to start from (default: the pair's target).", "DIR")] = None
    teacher: Annotated[Path | None, Help("Tuned model to distil from, for drafts.", "DIR")] = None
    dialect: Annotated[Path | None, Help("Learn this dialect in place of the command's, from the same answers.", "FILE")] = None
    prompts: Annotated[
        tuple[str, ...],
        Help(
            "Prompts without answers: for circle rounds, and for the teacher to answer (default: circle rounds have those of "
            "--in); may be repeated.",
            "[NAME=]FILE[#KEY=VALUE]",
            repeated=True,
        ),
    ] = ()

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
        return tuple(dict.fromkeys(prompt for text in self.prompts for prompt in PromptSource.parse(text).read().prompts))


def _tuning(paper: Mapping[str, Any]) -> Callable[[Command], Command]:
    recipe = recipe_options(ThreadRecipe, paper)
    return lambda command: options_of(ModelFlags, "models")(_run_options(recipe(device_options(command))))


@thread_models.command()
@_tuning(PAPER_APAR)
def apar(**options: Any) -> None:
    """Fine-tune a model to answer in APAR's paragraph tree."""
    _tune("apar", **options)


@thread_models.command()
@_tuning(PAPER_SFT)
def pasta_sft(**options: Any) -> None:
    """Fine-tune a model to answer in PASTA-LANG (PASTA-SFT)."""
    _tune("pasta", **options)


def _tune(dialect: str, models: ModelFlags, run: Callable[..., ThreadsRun], recipe: ThreadRecipe, device: DeviceFlags) -> None:
    by_dialect, where = models.by_dialect(dialect), run(**device.chosen())
    target, prompts = models.target or reference_pair() / "target", models.unanswered()
    others = {} if models.dialect is None else {dialect: load_dialect(models.dialect)}
    print_tuned(tune(target, by_dialect, recipe, where, models.teacher, prompts, others))


@dataclass(frozen=True)
class PreferenceFlags:
    """The model to continue, its prompts, and the judge."""

    files: Answers
    model: Annotated[Path, Help("Model directory that pasta-sft wrote.", "DIR")]
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

    def judging(self, server: EndpointFlags) -> ChatEndpoint | None:
        """The server that judges; None for likelihood. Raises UserError if its model is not named."""
        if self.judge == "likelihood":
            return None
        if not self.judge_model:
            raise UserError("--judge URL goes with --judge-model NAME")
        return server.endpoint(self.judge, self.judge_model, "judge")


@thread_models.command()
@options_of(PreferenceFlags, "preferred")
@_run_options
@recipe_options(BonbonRecipe, PAPER_BONBON)
@options_of(EndpointFlags, "server")
@device_options
def pasta_bonbon(
    preferred: PreferenceFlags, run: Callable[..., ThreadsRun], recipe: BonbonRecipe, server: EndpointFlags, device: DeviceFlags
) -> None:
    """Continue a PASTA-SFT model on its own samples: learn to prefer those that are quick and good (BoNBoN).

    Several λ, efficiencies or rounds write a model to OUT/lambda-λ/round-r each, and OUT/summary.json, summary.md and a picture
    of their trade-off. A second run continues.
    """
    recipes = scores_of(recipe, preferred.weights, list(preferred.efficiencies))
    endpoint = preferred.judging(server)
    asked = Rounds(preferred.files, preferred.model, preferred.baseline, recipes, preferred.rounds, endpoint)
    where = run(**device.chosen())
    reports = asked.run(where)
    print_preferred(reports)
    if not asked.is_one:
        lines = summary(reports)
        (where.out / "summary.md").write_text(markdown_summary(lines), encoding="utf-8")
        pictures = draw_trade_off(lines, where.out) if lines else []
        for path in (where.out / "summary.json", where.out / "summary.md", *pictures):
            click.echo(str(path))


if __name__ == "__main__":
    run_command(thread_models)
