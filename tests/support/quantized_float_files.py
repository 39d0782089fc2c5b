"""Checkpoints in 8-bit floats and 4-bit tables, packed as their formats are published: random numbers, or the nearest ones.

Shares no code with the package: numbers are computed here from the bits, one by one.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Written = tuple[dict[str, Tensor], Tensor]
Writer = Callable[[Tensor, np.random.Generator | None], Written]


def e4m3(byte: int) -> float:
    """4 bits of exponent, 3 of mantissa; all ones are not a number."""
    sign, exponent, mantissa = (-1.0 if byte & 128 else 1.0), (byte >> 3) & 15, byte & 7
    if byte & 127 == 127:
        return float("nan")
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(nibble: int) -> float:
    """2 bits of exponent, 1 of mantissa."""
    sign, exponent, mantissa = (-1.0 if nibble & 8 else 1.0), (nibble >> 1) & 3, nibble & 1
    return sign * (mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


E4M3 = np.array([e4m3(byte) for byte in range(256)], np.float32)
E2M1 = np.array([e2m1(nibble) for nibble in range(16)], np.float32)
NF4 = np.array(  # QLoRA, appendix E
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, 0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
SMALLEST = 1e-8  # of the largest number of a block
NESTED_MAP = np.sort(np.random.default_rng(5).uniform(-1, 1, 256)).astype(np.float32)


def nearest(table: Floats, values: NDArray[Any]) -> Bytes:
    """Places in the table."""
    order = np.argsort(np.where(np.isnan(table), np.inf, table), kind="stable")[: len(table) - np.isnan(table).sum()]
    middles = (table[order][1:].astype(np.float64) + table[order][:-1]) / 2
    return order[np.searchsorted(middles, values)].astype(np.uint8)


def write_float8(
    weight: Tensor,
    rng: np.random.Generator | None,
    scale: str = "weight_scale_inv",
    block: tuple[int, int] | None = None,
    shape: Callable[[int, int], tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    further: Iterable[str] = (),
) -> Written:
    """Numbers with a scale for each ``block``; without it, for the matrix. Without ``rng`` they are the nearest ones.

    Args:
        shape: of the scales in the file, from the number of blocks of outputs and of inputs.
        dtype: of the scales: also float8_e8m0fnu, and uint8 for its bytes.
        further: suffixes of tensors with a number of no consequence.
    """
    outputs, inputs = weight.shape
    rows, columns = block or (outputs, inputs)
    grid = -(-outputs // rows), -(-inputs // columns)
    parts = [[weight[r * rows : (r + 1) * rows, c * columns : (c + 1) * columns] for c in range(grid[1])] for r in range(grid[0])]
    needed = np.array([[max(float(part.abs().max()), SMALLEST) / 448 for part in row] for row in parts])
    if dtype in (torch.float8_e8m0fnu, torch.uint8):
        exponents = np.ceil(np.log2(needed)) + 127 if rng is None else rng.integers(127 - 14, 127 - 10, grid)
        exponents = exponents.astype(np.uint8)
        scales = np.array([2.0 ** (int(one) - 127) for one in exponents.flat], np.float32).reshape(grid)
        stored = torch.from_numpy(exponents).view(dtype)
    else:
        chosen = needed if rng is None else rng.uniform(0.5, 2, grid) * float(weight.std()) / 130
        stored = torch.from_numpy(chosen.astype(np.float32)).to(dtype)
        scales = stored.float().numpy()
    if rng is None:
        each = np.repeat(np.repeat(scales, rows, 0)[:outputs], columns, 1)[:, :inputs]
        codes = nearest(E4M3, weight.numpy() / each)
    else:
        codes = rng.choice(np.array([byte for byte in range(256) if byte & 127 != 127], np.uint8), (outputs, inputs))
    dense = np.empty((outputs, inputs), np.float32)
    for row in range(outputs):
        for first in range(0, inputs, columns):
            part = slice(first, first + columns)
            dense[row, part] = E4M3[codes[row, part]] * scales[row // rows, first // columns]
    tensors = {"weight": torch.from_numpy(codes).view(torch.float8_e4m3fn)}
    tensors[scale] = stored if shape is None else stored.reshape(shape(*grid))
    return tensors | {one: torch.tensor(1.5) for one in further}, torch.from_numpy(dense)


def write_rows_float8(weight: Tensor, rng: np.random.Generator | None, shape: Callable[[int, int], tuple[int, ...]]) -> Written:
    return write_float8(weight, rng, "weight_scale", (1, weight.shape[1]), shape, further=("input_scale_ub",))


def write_mxfp4(weight: Tensor, rng: np.random.Generator | None) -> Written:
    outputs, inputs = weight.shape
    grouped = weight.float().numpy().reshape(outputs, inputs // 32, 16, 2)
    largest = np.maximum(np.abs(grouped).max((2, 3)), SMALLEST)
    found = np.floor(np.log2(largest)) - 2 + 127 if rng is None else rng.integers(127 - 7, 127 - 3, (outputs, inputs // 32))
    exponents = found.astype(np.uint8)
    scales = np.array([2.0 ** (int(one) - 127) for one in exponents.flat], np.float32).reshape(exponents.shape)
    if rng is None:
        nibbles = nearest(E2M1, grouped / scales[..., None, None])
    else:
        nibbles = rng.integers(0, 16, grouped.shape).astype(np.uint8)
    dense = (E2M1[nibbles] * scales[..., None, None]).reshape(outputs, inputs)
    blocks = nibbles[..., 0] | nibbles[..., 1] << 4
    return {"weight_blocks": torch.from_numpy(blocks), "weight_scales": torch.from_numpy(exponents)}, torch.from_numpy(dense)


def write_bnb4(weight: Tensor, rng: np.random.Generator | None, table: str = "nf4", is_nested: bool = False) -> Written:
    outputs, inputs = weight.shape
    values, blocks = {"nf4": NF4, "fp4": FP4}[table], outputs * inputs // 64
    grouped = weight.float().numpy().reshape(blocks, 64)
    largest = np.maximum(np.abs(grouped).max(1), SMALLEST)
    size = float(weight.std())
    state: dict[str, Any] = {"quant_type": table, "blocksize": 64, "dtype": "bfloat16", "shape": [outputs, inputs]}
    tensors: dict[str, NDArray[Any]] = {"weight.quant_map": values}
    if is_nested:
        offset = float(np.float32(largest.mean() if rng is None else rng.uniform(1, 2) * size))
        if rng is None:
            padded = np.pad(largest - offset, (0, -blocks % 256)).reshape(-1, 256)
            nested = np.maximum(np.abs(padded).max(1), SMALLEST).astype(np.float32)
            codes = nearest(NESTED_MAP, (padded / nested[:, None]).reshape(-1)[:blocks])
        else:
            codes = rng.integers(0, 256, blocks).astype(np.uint8)
            nested = (rng.uniform(0.5, 1, -(-blocks // 256)) * size).astype(np.float32)
        absmax = NESTED_MAP[codes] * np.repeat(nested, 256)[:blocks] + np.float32(offset)
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        tensors |= {"weight.absmax": codes, "weight.nested_absmax": nested, "weight.nested_quant_map": NESTED_MAP}
    else:
        absmax = (largest if rng is None else rng.uniform(1, 3, blocks) * size).astype(np.float32)
        tensors["weight.absmax"] = absmax
    nibbles = nearest(values, grouped / absmax[:, None]).reshape(-1) if rng is None else rng.integers(0, 16, weight.numel())
    nibbles = nibbles.astype(np.uint8)
    tensors["weight"] = nibbles[::2, None] << 4 | nibbles[1::2, None]
    text = json.dumps(state).encode()
    tensors[f"weight.quant_state.bitsandbytes__{table}"] = np.frombuffer(text, np.uint8).copy()
    dense = (values[nibbles].reshape(-1, 64) * absmax[:, None]).reshape(outputs, inputs)
    return {suffix: torch.from_numpy(one.copy()) for suffix, one in tensors.items()}, torch.from_numpy(dense)


WRITERS: dict[str, Writer] = {
    "fp8-blocks": partial(write_float8, block=(128, 128)),
    "fp8-odd-blocks": partial(write_float8, block=(32, 80)),
    "fp8-large-blocks": partial(write_float8, block=(192, 64)),
    "fp8-half-scales": partial(write_float8, block=(128, 128), dtype=torch.bfloat16),
    "fp8-exponents": partial(write_float8, block=(128, 128), dtype=torch.float8_e8m0fnu),
    "fp8-exponents-in-bytes": partial(write_float8, block=(128, 128), dtype=torch.uint8),
    "fp8-other-name": partial(write_float8, scale="scale", block=(128, 128), dtype=torch.float8_e8m0fnu),
    "fp8-tensor": partial(write_float8, shape=lambda *_: (), further=("activation_scale",)),
    "fp8-tensor-of-1": partial(write_float8, scale="weight_scale", shape=lambda *_: (1,), further=("input_scale",)),
    "fbgemm": partial(write_rows_float8, shape=lambda rows, _: (rows, 1)),
    "fbgemm-vector": partial(write_rows_float8, shape=lambda rows, _: (rows,)),
    "modelopt": partial(write_float8, scale="weight_scale", shape=lambda *_: (), further=("input_scale", "k_scale", "v_scale")),
    "mxfp4": write_mxfp4,
    "nf4": write_bnb4,
    "nf4-nested": partial(write_bnb4, is_nested=True),
    "fp4": partial(write_bnb4, table="fp4"),
}

_FINE = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_FBGEMM = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
_BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
QUANTIZATION: dict[str, dict[str, Any]] = {
    "fp8-blocks": _FINE,
    "fp8-odd-blocks": _FINE | {"weight_block_size": [32, 80]},
    "fp8-large-blocks": _FINE | {"weight_block_size": [192, 64]},
    "fp8-half-scales": _FINE,
    "fp8-exponents": _FINE | {"scale_fmt": "ue8m0"},
    "fp8-exponents-in-bytes": _FINE | {"scale_fmt": "ue8m0"},
    "fp8-other-name": _FINE | {"scale_fmt": "ue8m0", "fmt": "e4m3"},
    "fp8-tensor": _FINE | {"activation_scheme": "static", "weight_block_size": None},
    "fp8-tensor-of-1": {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    "fbgemm": _FBGEMM,
    "fbgemm-vector": _FBGEMM,
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "*vision*"]},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": None},
    "nf4": _BNB | {"_load_in_4bit": True, "llm_int8_skip_modules": ["lm_head"]},
    "nf4-nested": _BNB | {"bnb_4bit_use_double_quant": True},
    "fp4": _BNB | {"bnb_4bit_quant_type": "fp4", "bnb_4bit_quant_storage": "uint8"},
}


def quantize_folder(
    folder: Path,
    name: str,
    dense: Path,
    quantized: Callable[[str], bool] = lambda module: module.endswith("_proj"),
    **config: Any,
) -> dict[str, Tensor]:
    """Replace the matrices of a checkpoint, and write to ``dense`` the one with their values. Returns those by name.

    Args:
        name: of a writer.
        quantized: whether the matrix of a module is replaced.
        config: further keys of ``quantization_config``.
    """
    tensors, rng = load_file(folder / "model.safetensors"), np.random.default_rng(3)
    values: dict[str, Tensor] = {}
    written: dict[str, Tensor] = {}
    for one, tensor in tensors.items():
        if tensor.dim() == 2 and quantized(one.removesuffix(".weight")):
            parts, values[one] = WRITERS[name](tensor, rng)
            written |= {one.removesuffix("weight") + suffix: part for suffix, part in parts.items()}
        else:
            written[one] = tensor
    document = json.loads((folder / "config.json").read_text())
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(document))
    save_file(tensors | values, dense / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(document | {"quantization_config": QUANTIZATION[name] | config}))
    save_file(written, folder / "model.safetensors")
    return values
