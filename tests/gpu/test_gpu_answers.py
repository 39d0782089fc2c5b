"""Whole answers on a device: those of transformers there, by every method, alone and in company, quantised and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.config import Settings
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import DTYPES, load_prompter, resolve
from pipedec.engine.local import LocalPipeline
from pipedec.methods import METHOD_NAMES
from pipedec.model import StageModel
from pipedec.plan.spec import PipelineSpec
from pipedec.sampling.noise import gumbel
from pipedec.verify.divergence import TIE_BOUNDS
from pipedec.verify.reference import Reference, load_transformers

PROMPT = "Natalia sold 12 clips in April."
TOKENS = 24


@pytest.fixture
def spec(pair: Pair, device: str) -> PipelineSpec:
    return pair.spec(3).replaced(device=device)


def answers(spec: PipelineSpec, sampling: SamplingParams, count: int = 1) -> dict[str, list[int]]:
    """The first of ``count`` answers that are in the pipeline together, by method."""
    pipeline, ids = LocalPipeline.load(spec), load_prompter(spec).token_ids(PROMPT, False, TOKENS)
    found = {}
    for method in METHOD_NAMES:
        requests = [
            TokenizedRequest(number, ids[: len(ids) - number + 1], sampling, method=method) for number in range(1, count + 1)
        ]
        tokens = [token for number, verdict in pipeline.run_all({1: requests}) if number == 1 for token in verdict.tokens]
        found[method] = tokens
    return found


@pytest.mark.fast_cases("cpu-float32-3")
@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_answers_are_those_of_transformers(spec: PipelineSpec, dtype: str, count: int) -> None:
    spec = spec.replaced(dtype=dtype)
    reference, ids = Reference(spec), load_prompter(spec).token_ids(PROMPT, False, TOKENS)
    expected = reference.generate(ids, TOKENS, ignore_eos=True)
    for method, found in answers(spec, SamplingParams(max_tokens=TOKENS, ignore_eos=True), count).items():
        divergence = reference.compare(ids, expected, found)
        assert divergence is None or divergence.is_near_tie(dtype), f"{method}: {divergence}"


@pytest.mark.slow
def test_drawn_answers_are_the_same_by_all_methods(spec: PipelineSpec) -> None:
    sampling = SamplingParams(0.8, top_k=40, top_p=0.9, seed=5, max_tokens=TOKENS, ignore_eos=True)
    found = answers(spec.replaced(dtype="float32"), sampling)
    assert all(tokens == found["pp"] for tokens in found.values()), found


@pytest.mark.fast_cases("cpu-int4")
@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_quantised_answers_are_those_of_weights_that_were_rounded(device: str, quantize: str) -> None:
    spec = resolve(Settings.of(quantize=quantize, stages=3, dtype="float32", device=device))
    reference, ids = Reference(spec), load_prompter(spec).token_ids(PROMPT, False, TOKENS)
    expected = reference.generate(ids, TOKENS, ignore_eos=True)
    for method, found in answers(spec, SamplingParams(max_tokens=TOKENS, ignore_eos=True)).items():
        assert found == expected, f"{method}: {reference.compare(ids, expected, found)}"


@pytest.mark.gpu
def test_graphs_change_nothing(spec: PipelineSpec, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But near ties in 16 bits: captured forwards have more rows and slots, and so other kernels, than those that are not."""
    sampling, ids = SamplingParams(max_tokens=TOKENS, ignore_eos=True), load_prompter(spec).token_ids(PROMPT, False, TOKENS)
    for dtype in ("float32", "bfloat16"):
        captured = answers(spec.replaced(dtype=dtype), sampling)["pp"]
        with monkeypatch.context() as patch:
            patch.setenv("PIPEDEC_GRAPHS", "off")
            eager = answers(spec.replaced(dtype=dtype), sampling)["pp"]
        divergence = Reference(spec.replaced(dtype=dtype)).compare(ids, eager, captured)
        assert divergence is None or divergence.is_near_tie(dtype), f"{dtype}: {divergence}"


def test_no_timestep_of_a_middle_stage_waits_for_the_device(
    spec: PipelineSpec, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows are entered, computed and handed on; CUDA reports the first synchronisation as an error."""
    pipeline, ids = LocalPipeline.load(spec), load_prompter(spec).token_ids(PROMPT, False, TOKENS)
    request = TokenizedRequest(1, ids, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    forward = StageModel.forward
    calls = []

    def watched(model: StageModel, *args: Any) -> torch.Tensor:
        if model.is_first or model.is_last:
            return forward(model, *args)
        calls.append(torch.cuda.get_sync_debug_mode() if device == "cuda" else 2)
        if device == "cuda" and len(calls) > 8:  # captures may wait
            torch.cuda.set_sync_debug_mode("error")
        try:
            return forward(model, *args)
        finally:
            if device == "cuda":
                torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(StageModel, "forward", watched)
    assert sum(len(verdict.tokens) for verdict in pipeline.run(request)) == TOKENS
    assert len(calls) > 8


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_answers_drawn_in_16_bits_follow_the_noise(spec: PipelineSpec, dtype: str) -> None:
    """Each token is the one whose logit and noise are largest together, but for rounding: in 16 bits methods may differ there."""
    sampling = SamplingParams(0.8, seed=5, max_tokens=TOKENS, ignore_eos=True)
    ids = load_prompter(spec).token_ids(PROMPT, False, TOKENS)
    model = load_transformers(spec.target, DTYPES[dtype], spec.settings.cut.device, attn_implementation="sdpa")
    bound = TIE_BOUNDS[dtype] / sampling.temperature
    for method, found in answers(spec.replaced(dtype=dtype), sampling).items():
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *found]], device=model.device)).logits[0, len(ids) - 1 : -1].double().cpu()
        noise = gumbel(5, torch.arange(len(ids), len(ids) + TOKENS), logits.shape[1])
        scores = logits / sampling.temperature + noise
        short = scores.amax(1) - scores.gather(1, torch.tensor(found)[:, None])[:, 0]
        assert len(found) == TOKENS and float(short.max()) <= bound, f"{method}: token {int(short.argmax())}"
