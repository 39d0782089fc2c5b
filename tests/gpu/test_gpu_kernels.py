"""Kernels on a device beside plain arithmetic: attention, captured forwards, quantised products."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from captures import Repeated
from checkpoints import save_tiny
from flash_stand_in import flash_on_cpu
from random_requests import Requests

from pipedec.model import StageModel, device_capture
from pipedec.model.attention import attention_backend, flash_attention
from pipedec.model.quantized import EMPTY_MATRICES, linear, rounded

LAYERS = range(1, 4)
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-11, torch.bfloat16: 0.05, torch.float16: 0.02}
FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "mistral": {"sliding_window": 5}, "qwen3": {"head_dim": 16}}


def stage_of(path: Path, family: str, dtype: torch.dtype, device: str) -> StageModel:
    save_tiny(family, path, **FAMILIES[family])
    return StageModel.load(path, LAYERS, dtype, device)


def assert_same(stage: StageModel, other: StageModel, seed: int) -> None:
    """Random requests through two stages with the same weights."""
    ours, theirs = Requests(stage, seed, 6, 256, is_scattered=True), Requests(other, seed, 6, 256, is_scattered=False)
    for _ in range(6):
        bound = BOUNDS[stage.dtype]
        torch.testing.assert_close(ours.forward(), theirs.forward(), atol=bound, rtol=bound)
        ours.advance()
        theirs.advance()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_captured_forwards_equal_those_computed_as_they_are(
    tmp_path: Path, device: str, dtype: torch.dtype, family: str, seed: int
) -> None:
    captured, plain = stage_of(tmp_path / "a", family, dtype, device), stage_of(tmp_path / "a", family, dtype, device)
    captured.capture = Repeated() if device == "cpu" else device_capture(torch.device(device))
    assert_same(captured, plain, seed)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_equals_that_of_torch(
    tmp_path: Path, device: str, dtype: torch.dtype, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if device == "cuda" and flash_attention() is None:
        pytest.skip("flash-attn is not installed (docs/gpu.md)")
    flash, plain = stage_of(tmp_path / "a", "llama", dtype, device), stage_of(tmp_path / "a", "llama", dtype, device)
    ours, theirs = (Requests(stage, seed, 6, 256, is_scattered) for stage, is_scattered in ((flash, True), (plain, False)))
    for _ in range(6):
        if device == "cpu":
            with flash_on_cpu():
                found = ours.forward()
        else:
            found = ours.forward()
        with monkeypatch.context() as patch:
            patch.setattr("pipedec.model.stage_model.flash_applies", lambda dtype, device: False)
            torch.testing.assert_close(found, theirs.forward(), atol=BOUNDS[dtype], rtol=BOUNDS[dtype])
        ours.advance()
        theirs.advance()


def test_float32_does_without_flash_attention_and_says_why(device: str) -> None:
    name, why = attention_backend(torch.float32, torch.device(device))
    assert name == "SDPA" and why == {"cpu": "flash-attention needs CUDA", "cuda": "flash-attention needs 16 bits"}[device]


@pytest.mark.parametrize("rows", [1, 7, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_products_are_those_of_the_rounded_matrix(device: str, kind: str, dtype: torch.dtype, rows: int) -> None:
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("quantised weights take float16 activations on GPUs only")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 256, generator=generator) * 0.1
    inputs = torch.randn(rows, 256, generator=generator)
    matrix = EMPTY_MATRICES[kind](*weight.shape, dtype, torch.device(device))
    matrix.copy_(weight.to(device))
    matrix.seal()
    expected = inputs.to(dtype).double() @ rounded(weight.to(dtype), kind).double().T
    found = linear(inputs.to(device, dtype), matrix, None)
    torch.testing.assert_close(found.double().cpu(), expected, atol=40 * BOUNDS[dtype] * 0.1, rtol=BOUNDS[dtype])
