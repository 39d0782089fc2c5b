"""Answers of an architecture by pipelines, beside those of ``generate``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch
from support.checkpoints import save_tiny
from support.specs import bare_spec
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel

from architectures.zoo import LAYERS, VOCABULARY
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.methods import find_method
from pipedec.sampling.noise import gumbel
from pipedec.verify.reference import load_transformers

STAGES, METHODS, TOKENS = (1, 3, 5), ("pp", DEFAULT_METHOD), 24
TIE = 1e-4  # the lead of a token below which rounding may choose another one
ROUTERS_TIE = 1e-5  # the same of an expert, as a part of the best score: scores in float32 were seen to differ by 7e-6
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
    """The answers of ``generate``; None where two tokens, or two experts of a row, are nearly as good as each other."""
    model = load_transformers(target, torch.float32)
    found = {question: generated(model, PROMPTS[question[1]], SAMPLINGS[question[0]]) for question in questions}
    return {question: tokens if is_clear else None for question, (tokens, is_clear) in found.items()}


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[list[int], bool]:
    """The answer of ``generate``, and whether it is clear: no token and no expert was chosen by a lead as small as rounding."""
    noisy, choices = Noisy(sampling), Choices()
    ids = torch.tensor([prompt])
    with choices:
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False,
            logits_processor=LogitsProcessorList([noisy]), eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
    tokens = [int(token) for token in output[0, len(prompt) :]]
    return tokens, noisy.smallest_lead >= TIE and choices.smallest_lead >= ROUTERS_TIE


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
        second, best = scores[0].sort().values[-2:].tolist()
        self.smallest_lead = min(self.smallest_lead, best - second)
        return scores


class Choices(TorchFunctionMode):
    """Notes by how much the last of the chosen experts, or groups of them, leads over the best one that is not chosen.

    Routers of all architectures choose by ``topk``. Leads are parts of the row's largest score.
    """

    def __init__(self) -> None:
        super().__init__()
        self.smallest_lead = float("inf")

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = function(*args, **(kwargs or {}))
        if function in (torch.topk, Tensor.topk):
            scores, count = args[0], found.values.shape[-1]
            if count < scores.shape[-1]:
                best = scores.topk(count + 1).values
                leads = (best[..., -2] - best[..., -1]) / scores.abs().where(scores.isfinite(), 0).amax(-1)
                self.smallest_lead = min([self.smallest_lead, *leads[~leads.isnan()].flatten().tolist()])
        return found
