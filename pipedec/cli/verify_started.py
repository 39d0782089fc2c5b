"""``pipedec verify`` of pipelines that it starts: their answers beside those of ``transformers``."""

from __future__ import annotations

from collections.abc import Iterator

from pipedec.cli.show import console
from pipedec.cli.verify_report import ComparedAnswer, Report, Shape, answers_of
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.config import Settings
from pipedec.core import Request
from pipedec.engine.build import load_prompter, resolve
from pipedec.engine.local import LocalPipeline
from pipedec.messages import PromptRequest
from pipedec.methods import make_options, possible_methods
from pipedec.plan.spec import PipelineSpec
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect
from pipedec.verify.divergence import first_difference
from pipedec.verify.reference import Reference


def compare_started(
    settings: Settings,
    shapes: list[Shape],
    methods: list[str],
    requests: list[PromptRequest],
    local: bool,
    concurrency: int,
) -> None:
    """Compare pipelines that are started here with the target in transformers."""
    spec = resolve(settings)
    methods = methods or possible_methods(spec.draft is not None, spec.bita is not None)
    prompter = load_prompter(spec)
    prompt_ids = [_token_ids(prompter, request) for request in requests]
    reference = Reference(spec)
    with console.status("Generating the reference answers with transformers"):
        expected = [_expected(reference, ids, request) for ids, request in zip(prompt_ids, requests, strict=True)]

    def outcome(index: int, found: list[int], timesteps: int) -> ComparedAnswer:
        if requests[index].threads is not None:
            return ComparedAnswer(first_difference(expected[index], found), len(found), timesteps)
        return ComparedAnswer(reference.compare(prompt_ids[index], expected[index], found), len(found), timesteps)

    report = Report(f"{len(requests)} prompts against transformers", spec.dtype)
    for shape in shapes:
        for method in methods:
            shaped = settings.replaced(stages=shape[0], groups=shape[1])
            answers = _answers(shaped, method, requests, prompter, local, concurrency)
            report.add(shape, method, (outcome(index, *answer) for index, answer in enumerate(answers)))
    report.finish()


def _token_ids(prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
    name = None if request.threads is None else Dialect.from_json(request.threads).name
    return prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens, name)


def _expected(reference: Reference, prompt_ids: tuple[int, ...], request: PromptRequest) -> list[int]:
    if request.threads is None:
        return reference.generate(prompt_ids, request.sampling.max_tokens)
    return reference.generate_threads(prompt_ids, request.threads, request.sampling)


def _answers(
    settings: Settings, method: str, requests: list[PromptRequest], prompter: Prompter, local: bool, concurrency: int
) -> Iterator[tuple[list[int], int]]:
    """Yields the output token ids and the number of timesteps of each answer."""
    if local:
        yield from _local_answers(resolve(settings), method, requests, prompter, concurrency)
        return
    cluster = LocalCluster(resolve(settings))
    try:
        cluster.start()
        assert cluster.scheduler is not None
        for completion in answers_of(Client(cluster.scheduler, cluster.check), method, requests, concurrency):
            yield completion.token_ids, completion.metrics.timesteps
    finally:
        cluster.stop()


def _local_answers(
    spec: PipelineSpec, method: str, requests: list[PromptRequest], prompter: Prompter, concurrency: int
) -> Iterator[tuple[list[int], int]]:
    pipeline: LocalPipeline = LocalPipeline.load(spec)
    for first in range(0, len(requests), concurrency):
        together = [
            Request(
                number, _token_ids(prompter, asked), asked.sampling, method, make_options(method, asked.options),
                threads=asked.threads,
            )
            for number, asked in enumerate(requests[first : first + concurrency])
        ]  # fmt: skip
        for _ in pipeline.run_all({1: together}):
            continue
        for request in together:
            answer = pipeline.answers[request.number]
            yield [token.token_id for token in answer.sequence.document()], answer.metrics.timesteps
