"""Kernels on a device beside plain arithmetic: attention, captured forwards, quantised products."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.captures import Repeated
from support.checkpoints import HYBRID, save_tiny
from support.flash_stand_in import flash_attn_varlen_func
from support.quantized_files import QUANTIZATION, WRITERS
from support.random_requests import Requests
from torch import Tensor

from pipedec.formats import ROUNDED, stated_formats
from pipedec.model import StageModel, device_capture
from pipedec.model.flash_lanes import flash_attention, flash_kernel
from pipedec.model.formats import empty_matrix, rounded

LAYERS = range(1, 4)
BOUNDS = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.02}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {}, "mistral": {"sliding_window": 5}, "qwen3": {"head_dim": 16}, "qwen3_5_text": HYBRID,
}  # fmt: skip


def stages_of(path: Path, family: str, dtype: torch.dtype, device: str) -> list[StageModel]:
    """Two stages with the same weights on the device, and one in float64 on the CPU."""
    save_tiny(family, path, **FAMILIES[family])
    places = (dtype, device), (dtype, device), (torch.float64, "cpu")
    return [StageModel.load(path, LAYERS, *place) for place in places]


def random_requests(stages: list[StageModel], seed: int) -> Iterator[list[Requests]]:
    """The same requests for each stage, several times; those of the first one lie in scattered slots."""
    requests = [Requests(stage, seed, 6, 256, is_scattered=index == 0) for index, stage in enumerate(stages)]
    for _ in range(6):
        yield requests
        for one in requests:
            one.advance()


class Errors:
    """How far results are from exact ones: computed in one format, in two orders, they are about as far."""

    def __init__(self) -> None:
        self._total = [0.0, 0.0]

    def add(self, found: Tensor, plain: Tensor, exact: Tensor) -> None:
        for index, one in enumerate((found, plain)):
            self._total[index] += float((one.double().cpu() - exact).abs().mean())

    def check(self) -> None:
        """What was found is not twice as far from the exact results as what was computed plainly."""
        assert self._total[0] <= 2 * self._total[1] + 1e-5, self._total


@pytest.mark.fast_cases
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_captured_forwards_equal_those_computed_as_they_are(
    tmp_path: Path, device: str, dtype: torch.dtype, family: str, seed: int
) -> None:
    stages = stages_of(tmp_path, family, dtype, device)
    stages[0].capture = Repeated() if device == "cpu" else device_capture(torch.device(device))
    errors = Errors()
    for requests in random_requests(stages, seed):
        errors.add(*(one.forward() for one in requests))
    errors.check()


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_flash_attention_equals_that_of_torch(tmp_path: Path, device: str, dtype: torch.dtype, seed: int) -> None:
    if device == "cuda" and flash_attention() is None:
        pytest.skip("flash-attn is not installed (docs/gpu.md)")
    stages = stages_of(tmp_path, "llama", dtype, device)
    stages[0].flash = flash_attn_varlen_func if device == "cpu" else flash_attention()
    stages[1].flash = None
    errors = Errors()
    for requests in random_requests(stages, seed):
        errors.add(*(one.forward() for one in requests))
    errors.check()


def test_float32_does_without_flash_attention_and_says_why(device: str) -> None:
    kernel, why = flash_kernel(torch.float32, torch.device(device))
    assert kernel is None and why == {"cpu": "flash-attention needs CUDA", "cuda": "flash-attention needs 16 bits"}[device]


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_products_are_those_of_the_rounded_matrix(device: str, kind: str, dtype: torch.dtype, rows: int) -> None:
    if device == "cpu" and dtype == torch.float16:
        pytest.skip("quantised weights take float16 activations on GPUs only")
    generator = torch.Generator().manual_seed(rows)
    weight = torch.randn(96, 256, generator=generator) * 0.1
    inputs = torch.randn(rows, 256, generator=generator)
    matrix = empty_matrix(ROUNDED[kind], *weight.shape, dtype, torch.device(device))
    matrix.fill({"weight": weight.to(device, dtype)})
    expected = inputs.to(dtype).double() @ rounded(weight.to(dtype), kind).double().T
    found = matrix.prepared().linear(inputs.to(device, dtype))
    torch.testing.assert_close(found.double().cpu(), expected, atol=40 * BOUNDS[dtype] * 0.1, rtol=BOUNDS[dtype])


@pytest.mark.parametrize("rows", [1, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["gptq", "gptq-asymmetric", "gptq-ordered", "gptq-8bit", "awq", "ct-int4", "ct-w8a8"])
def test_products_with_stored_integers_are_those_of_the_matrix(device: str, name: str, dtype: torch.dtype, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    tensors, dense = WRITERS[name](torch.randn(96, 256, generator=generator) * 0.1, np.random.default_rng(rows))
    inputs = torch.randn(rows, 256, generator=generator)
    format = stated_formats(QUANTIZATION[name]).stated("model.layers.0.mlp.up_proj.weight")
    matrix = empty_matrix(format, *dense.shape, dtype, torch.device(device))
    matrix.fill({suffix: tensor for suffix, tensor in tensors.items() if suffix in format.tensors((96, 256))})
    expected = inputs.to(dtype).double() @ dense.double().T
    found = matrix.prepared().linear(inputs.to(device, dtype))
    torch.testing.assert_close(found.double().cpu(), expected, atol=40 * BOUNDS[dtype] * 0.1, rtol=BOUNDS[dtype])
