"""Experts by one launch for all, in Triton's interpreter, give what they give one by one, in any company and beside padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from architectures.zoo import tiny_config
from support.gguf_files import quantized
from support.quantized_files import QUANTIZATION, WRITERS
from torch import Tensor
from transformers import AutoModelForCausalLM

from pipedec.families.skeleton import has_experts
from pipedec.formats import PLAIN, ROUNDED, Float8, Format, Ggml, stated_formats
from pipedec.model.experts import ExpertMatrices, Experts, tiles_of
from pipedec.model.formats import stacked
from pipedec.model.kernels.matmul import grouped_matmul
from pipedec.model.matrices import Products

kernels = pytest.importorskip("support.kernels")
pytestmark = [
    pytest.mark.numbers, pytest.mark.skipif(not kernels.triton.knobs.runtime.interpret, reason="needs TRITON_INTERPRET=1"),
]  # fmt: skip
EXPERTS, TOP_K, ROWS, SIZE = 8, 2, 5, 64


def module_of(model_type: str) -> Any:
    config = tiny_config(model_type)
    if model_type == "qwen3_moe":
        config.moe_intermediate_size = 64  # whole groups of int4
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    module = next(filter(has_experts, model.modules()))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module.requires_grad_(False)


def experts_of(module: Any, format: Format) -> Experts:
    """With the module's weights, of each parameter one below the other."""
    found = {}
    for name, stack in module.named_parameters():
        if stack.dim() == 3:
            stack = stack.mT if module.is_transposed else stack
            experts, outputs, inputs = stack.shape
            whole = stacked([format] * experts, [outputs] * experts, inputs, stack.dtype, stack.device)
            found[name] = ExpertMatrices.of(whole, experts)
            for matrix, weight_NK in zip(found[name].matrices, stack, strict=True):
                matrix.fill({"weight": weight_NK})
    return Experts(Products(), found)


@pytest.mark.parametrize(("model_type", "format"), [("qwen3_moe", PLAIN), ("gpt_oss", PLAIN), ("aria_text", PLAIN),
                                                    ("qwen3_moe", ROUNDED["int8"]), ("qwen3_moe", ROUNDED["int4"])])  # fmt: skip
def test_one_launch_gives_what_each_expert_gives(model_type: str, format: Format) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:TOP_K] for _ in range(ROWS)])
    routed = torch.randn(ROWS, SIZE, generator=generator), ids, torch.rand(ROWS, TOP_K, generator=generator)
    module = module_of(model_type)
    experts = experts_of(module, format)
    expected = experts(module, *routed)
    with kernels.interpreted():
        assert experts.can_group
        found = experts(module, *routed)
        assert int(experts.num_read) == len(ids.unique())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
        alone = experts(module, *(one[:1] for one in routed))
        assert torch.equal(alone[0], found[0]) and int(experts.num_read) == TOP_K
        padded = experts(module, *routed, torch.tensor([2], dtype=torch.int32))
        assert torch.equal(padded[:2], found[:2]) and int(experts.num_read) == len(ids[:2].unique())


def of_gguf(name: str) -> tuple[Format, list[dict[str, Tensor]]]:
    """Three experts in a type of llama.cpp's, [64, 256]."""
    weights = torch.randn(3, 64, 256, generator=torch.Generator().manual_seed(1)).numpy()
    return Ggml(name), [{"weight": torch.from_numpy(quantized(weight, name))} for weight in weights]


def written(name: str) -> tuple[Format, list[dict[str, Tensor]]]:
    """Three experts in a format of quantised checkpoints, [128, 128]."""
    weights = torch.randn(3, 128, 128, generator=torch.Generator().manual_seed(1))
    found = [WRITERS[name](weight_NK, np.random.default_rng(1))[0] for weight_NK in weights]
    format = stated_formats(QUANTIZATION[name]).stated("model.layers.0.mlp.experts.0.up_proj.weight")
    kinds = {
        torch.uint8: "U8",
        torch.float16: "F16",
        torch.bfloat16: "BF16",
        torch.float32: "F32",
        torch.float8_e8m0fnu: "F8_E8M0",
    }
    format = format.resolved({suffix: kinds[one.dtype] for suffix, one in found[0].items() if one.dtype in kinds})
    if isinstance(format, Float8) and format.scale not in found[0]:
        format = replace(format, scale=next(suffix for suffix in found[0] if "scale" in suffix))
    return format, [{suffix: one for suffix, one in tensors.items() if suffix in format.tensors((128, 128))} for tensors in found]


@pytest.mark.parametrize("name", [*WRITERS, "Q8_0", "Q4_K", "Q6_K"])
def test_experts_of_a_format_are_read_where_they_are(name: str) -> None:
    """Three experts, of which the second has no row; formats whose matrices cannot be one in memory are left to the slow path."""
    format, experts = written(name) if name in WRITERS else of_gguf(name)
    outputs, inputs = (128, 128) if name in WRITERS else (64, 256)
    whole = stacked([format] * 3, [outputs] * 3, inputs, torch.float32, torch.device("cpu"))
    matrices = ExpertMatrices.of(whole, 3)
    for matrix, tensors in zip(matrices.matrices, experts, strict=True):
        matrix.fill(tensors)
    matrices.prepare()
    rows = torch.randn(5, inputs, generator=torch.Generator().manual_seed(2))
    expected = torch.cat([matrices.matrices[0].linear(rows[:2]), matrices.matrices[2].linear(rows[2:])])
    with kernels.interpreted():
        stored = matrices.stored()
        assert (stored is not None) == (format.is_fusable and outputs % format.step == 0)
        if stored is not None:
            found = grouped_matmul(rows, stored, tiles_of(torch.tensor([2, 0, 3]), 5, 16), 16)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
