"""``pipedec verify``: compare a pipeline's tokens with those of ``transformers``; on a running cluster, with those of ``pp``.

Verifying a running cluster needs no torch: what does is imported where pipelines are started.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import click
from msgspec import Meta, structs
from rich.console import Console
from rich.table import Column, Table

from pipedec.cli.answers import started
from pipedec.cli.options import MaxTokens, PromptField, RawPrompt, RunningFlags, Threads, refuse_flags, running_options
from pipedec.cli.show import console
from pipedec.client.client import Client
from pipedec.client.run_handle import RunHandle
from pipedec.cluster.local import LocalCluster
from pipedec.config import AUTO, Settings, settings_options
from pipedec.config.settings import OPTIONS
from pipedec.core.completion import Completion
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.data import read_prompts
from pipedec.flags import Help, options_of, own_options
from pipedec.messages.request import PromptRequest
from pipedec.methods import find_method, make_options, possible_methods
from pipedec.plan.spec import PipelineSpec
from pipedec.threads import Dialect, load_dialect
from pipedec.verify.divergence import Divergence, first_difference, measured_divergence

Shape = tuple[int, int]  # stages, groups


@dataclass(frozen=True)
class VerifyPromptFlags:
    prompts: Annotated[
        tuple[str, ...], Help("Prompt text. This and --prompts may be repeated.", "TEXT", "--prompt", repeated=True)
    ] = ()
    files: Annotated[tuple[Path, ...], Help("Prompt file: JSONL, JSONL.gz or CSV.", "FILE", "--prompts", repeated=True)] = ()
    field: PromptField = None
    samples: Annotated[int, Meta(ge=1), Help("Prompts sampled from each file (seed 0).")] = 20
    max_tokens: MaxTokens = 128
    raw_prompt: RawPrompt = False
    threads: Threads = None
    concurrency: Annotated[int, Meta(ge=1), Help("Requests in the pipeline at the same time.")] = 1

    def requests(self) -> list[PromptRequest]:
        """Raises UserError if there is no prompt, or a file or dialect cannot be read."""
        texts = [*self.prompts]
        for path in self.files:
            texts += read_prompts(path, self.field).sample(self.samples).prompts
        if not texts:
            raise UserError("nothing to verify: give --prompt TEXT or --prompts FILE")
        dialect = None if self.threads is None else load_dialect(self.threads).to_json()
        sampling = SamplingParams(max_tokens=self.max_tokens)
        return [PromptRequest(text, self.raw_prompt, sampling=sampling, threads=dialect) for text in texts]


@click.command()
@settings_options
@options_of(VerifyPromptFlags, "asked")
@running_options
@own_options
def verify(
    settings: Settings,
    asked: VerifyPromptFlags,
    place: RunningFlags,
    shapes: Annotated[
        str | None,
        Help("Pipelines to check: STAGES or STAGESxOPTIONS, like 1,4,14x7 (default: --stages and --groups).", "N[xN],…"),
    ] = None,
    methods: Annotated[
        tuple[str, ...], Help("Methods to check, like pp,bita (default: all for which draft and BiTA weights are available).")
    ] = (),
    local: Annotated[bool, Help("Run all stages in this process (LocalPipeline) instead of one process per rank.")] = False,
) -> None:
    """Check that every method generates exactly the tokens of the target alone, as transformers computes them (greedy).

    With --redis, --run or --running the cluster that is running answers, and methods are compared with its own `pp`: this process
    then needs no checkpoint. Prints one line per method and pipeline. Exits with status 1 if any answer differs; in 16 bits two
    tokens whose logits are so close that rounding may turn them around (0.5 in bfloat16, 0.06 in float16) are reported as a near
    tie, which is no difference.
    """
    requests = asked.requests()
    for name in methods:
        find_method(name)
    if place.are_given:
        fixed = (*OPTIONS, "shapes", "local")
        refuse_flags(fixed, "a running cluster has its own models and stages: leave this out, or --redis, --run and --running")
        _compare_running(place.connect(), list(methods), requests, asked.concurrency)
        return
    pairs: list[Shape] = [(settings.cut.stages, settings.cut.num_groups)]
    if shapes is not None:
        try:
            numbers = [[int(number) for number in shape.split("x")] for shape in shapes.split(",")]
        except ValueError:
            expected = "STAGES or STAGESxOPTIONS, separated by commas, like 1,4,14,14x7"
            raise UserError(f"--shapes {shapes}: expected {expected}") from None
        pairs = [(each[0], each[-1]) for each in numbers]
    if not local:
        _check_wire(settings)
    compared = settings if asked.threads is None else settings.for_threads()
    _compare_started(compared, pairs, list(methods), requests, local, asked.concurrency)


def _check_wire(settings: Settings) -> None:
    """Raises UserError if activations are rounded between stages."""
    if (wire_dtype := settings.cluster.wire_dtype) != AUTO:
        raise UserError(f"--wire-dtype {wire_dtype} may change tokens, so there is nothing to verify: leave it out")


def _compare_running(cluster: RunHandle, methods: list[str], requests: list[PromptRequest], concurrency: int) -> None:
    _check_wire(cluster.description.settings)
    for name in methods:
        cluster.check_method(name)
    compared = [name for name in methods or cluster.methods() if name != "pp"]
    if not compared:
        raise UserError("--methods pp: name another method, which will be compared with pp")
    asked: list[tuple[PromptRequest, Completion]] = []
    with console.status("Generating the reference answers with pp"):
        for index, request in enumerate(requests):
            try:
                asked.append((request, cluster.client.ask(structs.replace(request, method="pp"))))
            except UserError as error:
                if len(requests) == 1:
                    raise
                console.print(f"Prompt {index} is left out: {error}")
    if not asked:
        raise UserError(f"run {cluster.run_id} has refused all {len(requests)} prompts: see above")

    def outcome(request: PromptRequest, expected: Completion, found: Completion) -> ComparedAnswer:
        divergence = measured_divergence(cluster.client.ask, request, expected.token_ids, found.token_ids)
        return ComparedAnswer(divergence, len(found.token_ids), found.metrics.timesteps)

    report = Report(f"{len(asked)} prompts against pp on run {cluster.run_id}", cluster.description.settings.numbers.dtype)
    for method in compared:
        answers = answers_of(cluster.client, method, [request for request, _ in asked], concurrency)
        outcomes = (outcome(*question, found) for question, found in zip(asked, answers, strict=True))
        report.add((cluster.topology.num_stages, cluster.topology.num_groups), method, outcomes)
    report.finish()


def _compare_started(
    settings: Settings, shapes: list[Shape], methods: list[str], requests: list[PromptRequest], local: bool, concurrency: int
) -> None:
    """Compare pipelines that are started here with the target in transformers."""
    from pipedec.engine.build import load_prompter, resolve  # loads torch, which verifying a running cluster does not need
    from pipedec.verify.reference import Reference

    spec = resolve(settings)
    methods = methods or possible_methods(spec.draft is not None, spec.bita is not None)
    prompter = load_prompter(spec)
    prompt_ids = []
    for request in requests:
        dialect = None if request.threads is None else Dialect.from_json(request.threads).name
        prompt_ids.append(prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens, dialect))
    reference = Reference(spec)
    with console.status("Generating the reference answers with transformers"):
        expected = [
            reference.generate(ids, request.sampling.max_tokens)
            if request.threads is None
            else reference.generate_threads(ids, request.threads, request.sampling)
            for ids, request in zip(prompt_ids, requests, strict=True)
        ]

    def outcome(index: int, found: list[int], timesteps: int) -> ComparedAnswer:
        if requests[index].threads is not None:
            divergence = first_difference(expected[index], found)
        else:
            divergence = reference.compare(prompt_ids[index], expected[index], found)
        return ComparedAnswer(divergence, len(found), timesteps)

    report = Report(f"{len(requests)} prompts against transformers", spec.dtype)
    for shape in shapes:
        for method in methods:
            shaped = resolve(settings.replaced(stages=shape[0], groups=shape[1]))
            if local:
                answers = _local_answers(shaped, method, requests, prompt_ids, concurrency)
            else:
                answers = _cluster_answers(shaped, method, requests, concurrency)
            report.add(shape, method, (outcome(index, *answer) for index, answer in enumerate(answers)))
    report.finish()


def _cluster_answers(
    spec: PipelineSpec, method: str, requests: list[PromptRequest], concurrency: int
) -> Iterator[tuple[list[int], int]]:
    """Yields the output token ids and the number of timesteps of each answer."""
    with started(LocalCluster(spec)) as client:
        for completion in answers_of(client, method, requests, concurrency):
            yield completion.token_ids, completion.metrics.timesteps


def _local_answers(
    spec: PipelineSpec, method: str, requests: list[PromptRequest], prompt_ids: list[tuple[int, ...]], concurrency: int
) -> Iterator[tuple[list[int], int]]:
    """As ``_cluster_answers``, of a pipeline in this process."""
    from pipedec.engine.local import LocalPipeline

    pipeline: LocalPipeline = LocalPipeline.load(spec)
    numbered = [
        TokenizedRequest(
            number % concurrency, ids, asked.sampling, method, make_options(method, asked.options), threads=asked.threads
        )
        for number, (ids, asked) in enumerate(zip(prompt_ids, requests, strict=True))
    ]
    for first in range(0, len(numbered), concurrency):
        together = numbered[first : first + concurrency]
        for _ in pipeline.run_all({1: together}):
            continue
        for request in together:
            answer = pipeline.answers[request.number]
            yield [token.token_id for token in answer.sequence.document()], answer.metrics.timesteps


class ComparedAnswer(NamedTuple):
    """One answer: how it differs from the expected one, and what it took."""

    divergence: Divergence | None
    num_tokens: int
    timesteps: int


class Report:
    """The results of a comparison: a line and a table row per method and pipeline; near ties and differences."""

    def __init__(self, title: str, dtype: str) -> None:
        self._dtype = dtype
        self._differences: list[str] = []
        names = ("stages", "groups", "method", "equal", "near ties", "tokens", "timesteps per token")
        columns = (Column(name, justify="left" if name == "method" else "right") for name in names)
        self._table = Table(*columns, title=f"{title}, {dtype}", title_justify="left")

    def add(self, shape: Shape, method: str, outcomes: Iterable[ComparedAnswer]) -> None:
        outcomes = list(outcomes)
        found = [(index, outcome.divergence) for index, outcome in enumerate(outcomes) if outcome.divergence is not None]
        ties = 0
        for index, divergence in found:
            line = f"{shape[0]} stages, {method}, prompt {index}: {divergence}"
            if divergence.is_near_tie(self._dtype):
                ties += 1
                console.print(f"{line}: a near tie in {self._dtype}")
            else:
                self._differences.append(line)
        equal, tokens = len(outcomes) - len(found), sum(outcome.num_tokens for outcome in outcomes)
        per_token = sum(outcome.timesteps for outcome in outcomes) / max(1, tokens - len(outcomes))
        share = f"{equal}/{len(outcomes)}"
        self._table.add_row(str(shape[0]), str(shape[1]), method, share, str(ties), str(tokens), f"{per_token:.2f}")
        console.print(
            f"{shape[0]} stages in {shape[1]} groups, {method}: {share} equal" + (f", near ties: {ties}" if ties else "")
        )

    def finish(self) -> None:
        """Print the table. Raises PipedecError if answers differ."""
        Console(width=None if Console().is_terminal else 110).print(self._table)
        if self._differences:
            raise PipedecError("; ".join(self._differences[:3]))


def answers_of(client: Client, method: str, requests: list[PromptRequest], concurrency: int) -> Iterator[Completion]:
    """The answers in order; ``concurrency`` requests are in the pipeline at the same time."""
    for first in range(0, len(requests), concurrency):
        asked = [structs.replace(request, method=method) for request in requests[first : first + concurrency]]
        for reply in client.ask_all(asked):
            yield reply.completed()
