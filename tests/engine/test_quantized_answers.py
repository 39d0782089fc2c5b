"""Answers of quantised models: by every method and cut those of transformers with the same rounded weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkpoints import save_tiny
from support.specs import bare_spec

from pipedec.core import Request, SamplingParams
from pipedec.engine.local import LocalPipeline
from pipedec.methods import find_method
from pipedec.plan.spec import PipelineSpec
from pipedec.verify.reference import Reference

LAYERS, TOKENS = 4, 12
PROMPT = (3, 9, 27, 17, 51, 25)
METHODS = ["pp", "stpp", "pipedec", "pipedec-bestfirst"]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny("qwen3", folder / "target", layers=LAYERS, hidden=64, head_dim=16)
    save_tiny("llama", folder / "draft", layers=1, hidden=64, seed=5)
    return folder


def spec(models: Path, quantize: str, shape: tuple[int, int] = (1, 1), draft_quantize: str | None = None) -> PipelineSpec:
    formats = {"quantize": quantize, "draft_dtype": "bfloat16", "draft_quantize": draft_quantize}
    return bare_spec(models / "target", LAYERS, shape, models / "draft", **formats)


@pytest.mark.slow
@pytest.mark.parametrize("quantize", ["int8"])
def test_every_method_and_cut_says_what_transformers_says_with_rounded_weights(models: Path, quantize: str) -> None:
    greedy = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    drawn = SamplingParams(max_tokens=TOKENS, ignore_eos=True, temperature=0.8, top_p=0.9, seed=3)
    expected = Reference(spec(models, quantize)).generate(PROMPT, TOKENS, ignore_eos=True)
    for shape, draft_quantize in (((1, 1), None), ((4, 4), quantize), ((4, 2), "int8")):
        pipeline = LocalPipeline.load(spec(models, quantize, shape, draft_quantize))
        plain = None
        for method in METHODS:
            for sampling in (greedy, drawn):
                verdicts = pipeline.run(Request(0, PROMPT, sampling, method, find_method(method).options()))
                found = tuple(token for verdict in verdicts for token in verdict.tokens)
                if sampling is greedy:
                    assert found == tuple(expected)
                else:
                    plain = plain or found
                    assert found == plain != tuple(expected)
