"""Target and draft have one tokenizer, and their embeddings are padded to different numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny_llama
from support.tiny_pair import tiny_tokenizer

from pipedec.config import Settings
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.engine.build import resolve
from pipedec.engine.local import LocalPipeline
from pipedec.methods import METHODS

TOKENS = 300  # of the tokenizer
SIZES = {
    "smaller": (320, 304),
    "larger": (300, 320),
    "padded": (320, 320),
    "pruned": (320, 200),
}  # embeddings of target and draft
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {}, "drawn": {"temperature": 1.0, "seed": 1}, "hot": {"temperature": 3.0, "seed": 2, "top_p": 0.95},
    "structured": {"structured_outputs": StructuredOutputs(regex="[a-z ]{30}")},
    "structured, drawn": {"structured_outputs": StructuredOutputs(regex="[a-zé]{30}"), "temperature": 1.0, "seed": 3},
}  # fmt: skip


@pytest.fixture(scope="module", params=SIZES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[LocalPipeline, int, int]:
    """A pipeline, and the embeddings of its target and its draft."""
    folder = tmp_path_factory.mktemp(request.param)
    size, draft_size = SIZES[request.param]
    model = save_tiny_llama(folder / "target", vocab=size, layers=2, max_position_embeddings=512)
    torch.manual_seed(0)
    model.resize_token_embeddings(draft_size, mean_resizing=False)
    model.save_pretrained(folder / "draft")
    for name in ("target", "draft"):
        tiny_tokenizer().save_pretrained(folder / name)
    save_random_bita(folder / "bita", folder / "target")
    models = {name: folder / name for name in ("target", "draft", "bita")}
    spec = resolve(Settings.of(**models, stages=2, dtype="float64", device="cpu", priors=False))
    return LocalPipeline.load(spec), size, draft_size


@pytest.mark.in_turn(3)
@pytest.mark.failure_case("M15")
@pytest.mark.fast_cases("smaller-hot", "larger-drawn", "larger-structured", "smaller-structured, drawn")
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_method_says_what_the_target_says(loaded: tuple[LocalPipeline, int, int], setting: str) -> None:
    """Also where prompt and answer have tokens that the draft lacks."""
    pipeline, size, draft_size = loaded
    last = size - 1
    ends = SETTINGS[setting].get("structured_outputs") is not None
    said: dict[str, tuple[int, ...]] = {}
    for method in METHODS:
        for prompt in ((1, 9, 30, 4, 51, 17), (1, 9, last, 30, last, last)):
            sampling = SamplingParams(max_tokens=40, ignore_eos=not ends, **SETTINGS[setting])
            asked = TokenizedRequest(0, prompt, sampling, method, tenant="one")
            answer = tuple(token for verdict in pipeline.run(asked) for token in verdict.tokens)
            assert answer == said.setdefault(f"{prompt}", answer), (method, prompt)
            if METHODS[method].draft == "required" and draft_size >= TOKENS:
                assert pipeline.last.metrics.hits > len(answer) / 4, "the draft is of use behind tokens that it lacks"
    if setting == "hot" and last >= TOKENS:
        assert any(token >= TOKENS for answer in said.values() for token in answer), "else this tests nothing"
