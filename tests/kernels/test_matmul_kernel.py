"""Products with weights as they are stored are those with the widened weights, for every format, and the same in any company."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.gguf_files import quantized
from support.quantized_files import QUANTIZATION, WRITERS
from torch import Tensor
from torch.nn import functional

from pipedec.formats import ROUNDED, Affine, Float8, Format, Ggml, stated_formats
from pipedec.formats.typical import DESCRIPTIONS
from pipedec.gguf import BLOCKS
from pipedec.model.formats import empty_matrix
from pipedec.model.kernels.matmul import grouped_matmul, matmul, plain_weights, reference

kernels = pytest.importorskip("support.kernels")
CPU = torch.device("cpu")
SHAPES = {  # outputs and inputs in the proportions of a projection of the model
    "llama-3-70b": (64, 224), "llama-3.2-1b": (128, 32), "qwen3-8b": (96, 256), "qwen2.5-0.5b": (28, 152), "phi-4": (80, 280),
    "mistral-7b": (112, 32), "gemma-3-27b": (42, 168), "gpt-oss-20b": (90, 90), "deepseek-v3": (112, 32), "olmo-2-7b": (64, 172),
    "smollm2-135m": (72, 192), "qwen3-30b-a3b": (48, 128),
}  # fmt: skip
GROUPS = {f"{name}-{group}": (name, group) for name in ("gptq-asymmetric", "ct-int4", "ct-int8") for group in (64, 128)}
NAME = "model.layers.0.mlp.up_proj.weight"
FORMATS: dict[str, Format] = {**{type: Ggml(type) for type in BLOCKS}, **ROUNDED}
TYPICAL = {name: stated_formats(stated).stated(NAME) for name, stated in DESCRIPTIONS.items()}
TYPES = {torch.uint8: "U8", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float8_e8m0fnu: "F8_E8M0"}
NAMES = [*WRITERS, *GROUPS, *FORMATS]


@pytest.fixture(autouse=True)
def interpreted() -> Iterator[None]:
    if not kernels.triton.knobs.runtime.interpret:
        pytest.skip("needs TRITON_INTERPRET=1")
    with kernels.interpreted():
        yield


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(name: str, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Any:
    """A matrix of a format with about so many outputs and inputs, of which the last outputs are cut off."""
    whole = 256 if name in BLOCKS else 64
    outputs, inputs = -(-outputs // 8) * 8, -(-inputs // whole) * whole
    weight = numbers(outputs, inputs, seed=1)
    if name in FORMATS:
        format = FORMATS[name]
        tensors = {"weight": torch.from_numpy(quantized(weight.numpy(), name)) if name in BLOCKS else weight}
    else:
        writer, group = GROUPS.get(name, (name, None))
        options = {} if group is None else {"group": group}
        tensors, _ = WRITERS[writer](weight, np.random.default_rng(1), **options)
        format = stated_formats(QUANTIZATION[writer]).stated(NAME)
        if isinstance(format, Affine):
            format = replace(format, group=format.group if group is None else group)
        format = format.resolved({suffix: TYPES[one.dtype] for suffix, one in tensors.items() if one.dtype in TYPES})
        if isinstance(format, Float8) and format.scale not in tensors:
            format = replace(format, scale=next(suffix for suffix in tensors if "scale" in suffix))
    tensors = {suffix: tensor for suffix, tensor in tensors.items() if suffix in format.tensors((outputs, inputs))}
    matrix = empty_matrix(format, outputs, inputs, dtype, CPU)
    matrix.fill(tensors)
    return matrix.prepared()[0 : outputs - 3]


def check(matrix: Any, rows: int, tolerance: float = 2e-6) -> None:
    """``tolerance``: of the sum of the magnitudes that are added up."""
    rows_RK, bias_N = numbers(rows, matrix.shape[1], seed=2).to(matrix.dtype), numbers(len(matrix), seed=3).to(matrix.dtype)
    found, wide_NK = matrix.linear(rows_RK, bias_N), matrix.widened().to(matrix.dtype).float()
    expected = functional.linear(rows_RK.float(), wide_NK, bias_N.float())
    size = functional.linear(rows_RK.float().abs(), wide_NK.abs(), bias_N.float().abs())
    assert found.dtype == matrix.dtype and bool(((found.float() - expected).abs() <= tolerance * size).all())
    for row in {0, rows - 1}:
        assert torch.equal(matrix.linear(rows_RK[row : row + 1], bias_N)[0], found[row])


@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_with_widened_weights(name: str) -> None:
    shapes = list(SHAPES.values())
    check(stored(name, *shapes[NAMES.index(name) % len(shapes)]), rows=3)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_row_has_the_same_bits_in_any_company(shape: tuple[int, int]) -> None:
    matrix = plain_weights(numbers(*shape))
    rows_RK = numbers(70, shape[1], seed=2)
    together = matmul(rows_RK, matrix)
    torch.testing.assert_close(together, reference(rows_RK, numbers(*shape)), atol=1e-4, rtol=0)
    for count in (1, 16, 17, 40):
        assert torch.equal(matmul(rows_RK[:count], matrix), together[:count])


@pytest.mark.parametrize("name", ["awq", "mxfp4", "Q6_K", "fp8-blocks"])
def test_so_it_is_with_weights_in_fewer_bits(name: str) -> None:
    for rows in (16, 40):
        check(stored(name, 24, 64), rows)


@pytest.mark.parametrize("name", ["gptq-asymmetric", "mxfp4", "nf4-nested", "Q5_K", "int4", "int8", "fbgemm"])
def test_in_float16_widened_weights_are_rounded_once(name: str) -> None:
    check(stored(name, 24, 64, torch.float16), rows=3, tolerance=1e-3)


@pytest.mark.parametrize("name", ["awq", "mxfp4", "Q4_K", "Q5_0", "int4", "int8", "fp8-tensor"])
def test_rows_of_experts_are_multiplied_by_the_weights_of_theirs(name: str) -> None:
    """Three experts of 8 outputs, one below the other; a tile of nothing, and rows that no expert has."""
    matrix = stored(name, 27, 64)[0:24]
    tiles_T3 = torch.tensor([[2, 0, 5], [-1, 0, 0], [0, 5, 16], [0, 21, 1]], dtype=torch.int32)
    rows_PK, biases_XN = numbers(25, matrix.shape[1], seed=2), numbers(3, 8, seed=3)
    found = grouped_matmul(rows_PK, matrix.stored().of_experts(3), tiles_T3, 16, biases_XN)
    for expert, rows in ((2, slice(5)), (0, slice(5, 22))):
        alone = matmul(rows_PK[rows], matrix[8 * expert : 8 * expert + 8].stored(), biases_XN[expert])
        assert torch.equal(found[rows], alone)


def of_products(formats: Mapping[str, Format], outputs: int, inputs: int, dtype: torch.dtype, rows: tuple[int, ...]) -> Any:
    meta = torch.device("meta")
    with kernels.recorded() as found:
        for format in formats.values():
            matrix = empty_matrix(format, outputs, inputs, dtype, meta)
            for count in rows:
                matrix.linear(torch.empty(count, inputs, dtype=dtype, device=meta))
    return found


def launches(dtype: torch.dtype) -> Any:
    """Products of Llama 3 70B's and 3.2 1B's sizes: in bfloat16 of all formats, in other types of one of each kind."""
    formats = {**TYPICAL, **FORMATS}
    if dtype != torch.bfloat16:
        return of_products({name: formats[name] for name in ("awq", "mxfp4", "Q4_K", "int8")}, 8192, 28672, dtype, (16,))
    return of_products(formats, 8192, 28672, dtype, (16, 64)) + of_products(ROUNDED, 8192, 2048, dtype, (16,))


def test_every_format_launches_one_kernel_for_a_product() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        assert len(of_products({**TYPICAL, **FORMATS}, 8192, 28672, dtype, (1, 32, 64))) == 3 * len({**TYPICAL, **FORMATS})
