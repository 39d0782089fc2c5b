"""``pipedec verify``: compare a pipeline's tokens with those of ``transformers``; on a running cluster, with those of ``pp``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import click
from msgspec import Meta, structs

from pipedec.cli.options import MaxTokens, PromptField, RawPrompt, Threads
from pipedec.cli.running import RunningFlags, refuse_flags, running_options
from pipedec.cli.show import console
from pipedec.cli.verify_report import ComparedAnswer, Report, Shape, answers_of
from pipedec.client.running import Running
from pipedec.config import Settings, settings_options
from pipedec.config.settings import OPTIONS
from pipedec.core import Completion, SamplingParams, UserError
from pipedec.data.prompts import read_prompts
from pipedec.flags import Help, options_of, own_options
from pipedec.messages import PromptRequest
from pipedec.methods import find_method
from pipedec.threads import load_dialect
from pipedec.verify.divergence import measured_divergence


@dataclass(frozen=True)
class VerifyPromptFlags:
    """The prompts, and how they are answered."""

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
    compared = settings if asked.threads is None else settings.for_threads()
    from pipedec.cli.verify_started import compare_started  # needs torch, which verifying a running cluster does not

    compare_started(compared, _shapes(settings, shapes), list(methods), requests, local, asked.concurrency)


def _compare_running(cluster: Running, methods: list[str], requests: list[PromptRequest], concurrency: int) -> None:
    """Compare the methods of a running cluster with its ``pp``."""
    for name in methods:
        cluster.check_method(name)
    compared = [name for name in methods or cluster.methods() if name != "pp"]
    if not compared:
        raise UserError("--methods pp: name another method, which will be compared with pp")
    with console.status("Generating the reference answers with pp"):
        asked = _accepted(cluster, requests)

    def outcome(request: PromptRequest, expected: Completion, found: Completion) -> ComparedAnswer:
        divergence = measured_divergence(cluster.client.ask, request, expected.token_ids, found.token_ids)
        return ComparedAnswer(divergence, len(found.token_ids), found.metrics.timesteps)

    report = Report(f"{len(asked)} prompts against pp on run {cluster.run_id}", cluster.description.settings.numbers.dtype)
    for method in compared:
        answers = answers_of(cluster.client, method, [request for request, _ in asked], concurrency)
        outcomes = (outcome(*question, found) for question, found in zip(asked, answers, strict=True))
        report.add((cluster.topology.num_stages, cluster.topology.num_groups), method, outcomes)
    report.finish()


def _accepted(cluster: Running, requests: list[PromptRequest]) -> list[tuple[PromptRequest, Completion]]:
    """The requests that the cluster accepts, with its answers by ``pp``; one line for each that it refuses.

    Raises:
        UserError: it refuses all of them.
    """
    accepted = []
    for index, request in enumerate(requests):
        try:
            accepted.append((request, cluster.client.ask(structs.replace(request, method="pp"))))
        except UserError as error:
            if len(requests) == 1:
                raise
            console.print(f"Prompt {index} is left out: {error}")
    if not accepted:
        raise UserError(f"run {cluster.run_id} has refused all {len(requests)} prompts: see above")
    return accepted


def _shapes(settings: Settings, shapes: str | None) -> list[Shape]:
    if shapes is None:
        return [(settings.cut.stages, settings.cut.num_groups)]
    try:
        pairs = [[int(number) for number in shape.split("x")] for shape in shapes.split(",")]
        return [(pair[0], pair[-1]) for pair in pairs]
    except ValueError:
        raise UserError(f"--shapes {shapes}: expected STAGES or STAGESxOPTIONS, separated by commas, like 1,4,14,14x7") from None
