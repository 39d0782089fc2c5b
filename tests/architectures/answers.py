"""Answers of an architecture by pipelines, beside those of ``generate``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import torch
from support.checkpoints import save_tiny
from support.specs import bare_spec
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from architectures.zoo import LAYERS, VOCABULARY
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.methods import find_method
from pipedec.sampling.noise import gumbel
from pipedec.verify.reference import load_transformers

STAGES, METHODS, TOKENS, TIE = (1, 3, 5), ("pp", DEFAULT_METHOD), 24, 1e-4
SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=TOKENS, ignore_eos=True),
    "drawn": SamplingParams(1.0, seed=3, max_tokens=TOKENS, ignore_eos=True),
}
PROMPTS = [
    tuple(torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist())
    for length in (5, 21, 40)  # shorter and longer than the windows
]


@dataclass
class Compared:
    """How many answers were compared, how many were left out because of a tie, and those that differ."""

    answers: int = 0
    ties: int = 0
    different: list[str] = field(default_factory=list)


def compare(
    target: Path,
    scratch: Path,
    numbers_of_stages: Iterable[int] = STAGES,
    methods: Iterable[str] = METHODS,
    samplings: Iterable[str] = SAMPLINGS,
) -> Compared:
    """On so many stages of transformers' modules, alone and in company."""
    questions = list(product(samplings, range(len(PROMPTS))))
    expected, found = _expected(target, questions), Compared()
    clear = [question for question in questions if expected[question] is not None]
    save_tiny("llama", scratch / "draft", layers=1, seed=5, vocab=VOCABULARY)
    for stages in numbers_of_stages:
        spec = bare_spec(target, LAYERS, (stages, stages), scratch / "draft", model_impl="transformers")
        pipeline = LocalPipeline.load(spec.replaced(max_num_seqs=8))
        for method in methods:
            alone = {question: answers(pipeline, method, [question])[0] for question in clear}
            together = dict(zip(clear, answers(pipeline, method, clear), strict=True))
            for place, given in (("alone", alone), ("in company", together)):
                for question in clear:
                    found.answers += 1
                    if given[question] != expected[question]:
                        found.different.append(f"{stages} stages, {method}, {place}, {question}")
            found.ties += 2 * (len(questions) - len(clear))
    return found


def check_greedy(source: Path, file: Path) -> None:
    """Greedy answers by two stages with the weights of ``file`` are those of ``generate`` with the checkpoint ``source``."""
    expected = _expected(source, list(product(["greedy"], range(len(PROMPTS)))))
    clear = {question: tokens for question, tokens in expected.items() if tokens is not None}
    assert clear
    layers = model_config(file, "transformers").num_hidden_layers
    pipeline = LocalPipeline.load(bare_spec(file, layers, (2, 2), model_impl="transformers"))
    assert answers(pipeline, "pp", list(clear)) == list(clear.values())


def answers(pipeline: LocalPipeline, method: str, questions: Sequence[tuple[str, int]]) -> list[list[int]]:
    """The answers of a pipeline to questions, each a sampling and the number of a prompt, all at once."""
    requests = [
        TokenizedRequest(number, PROMPTS[prompt], SAMPLINGS[sampling], method, find_method(method).options())
        for number, (sampling, prompt) in enumerate(questions)
    ]
    for _ in pipeline.run_all({1 + 2 * number: [request] for number, request in enumerate(requests)}):
        continue
    return [[token.token_id for token in pipeline.answers[request.number].sequence.document()] for request in requests]


def _expected(target: Path, questions: Sequence[tuple[str, int]]) -> dict[tuple[str, int], list[int] | None]:
    """The answers of ``generate``; None where two tokens are nearly as good as each other."""
    model = load_transformers(target, torch.float32)
    found = {question: generated(model, PROMPTS[question[1]], SAMPLINGS[question[0]]) for question in questions}
    return {question: None if lead < TIE else tokens for question, (tokens, lead) in found.items()}


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[list[int], float]:
    """The answer of ``generate``, and the smallest lead of a token over the next best."""
    noisy = Noisy(sampling)
    ids = torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
        logits_processor=LogitsProcessorList([noisy]), eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return [int(token) for token in output[0, len(prompt) :]], noisy.smallest_lead


class Noisy(LogitsProcessor):
    """Adds the noise with which a token is drawn, so that the best one is the drawn one; notes by how much it leads."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._sampling = sampling
        self.smallest_lead = float("inf")

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores = scores.double()
        if self._sampling.is_stochastic:
            assert self._sampling.seed is not None
            scores = scores + gumbel(self._sampling.seed, torch.tensor([input_ids.shape[1]]), scores.shape[1])
        best, second = scores[0].topk(2).values.tolist()
        self.smallest_lead = min(self.smallest_lead, best - second)
        return scores
