"""8-bit floats and 4-bit tables: read as they are stored, bit for bit the weights they stand for, refused in one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny
from support.quantized_float_files import E4M3, QUANTIZATION, WRITERS, quantize_folder, write_bnb4, write_float8, write_mxfp4
from support.stage_chain import StageChain
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pipedec.core.errors import UserError
from pipedec.families import model_config
from pipedec.formats import PLAIN, Bnb4, Float8, Format, Mxfp4, file_names, stated_formats
from pipedec.formats.by_module import is_listed
from pipedec.model import weights
from pipedec.model.formats import QuantizedMatrix, base, empty_matrix, stacked
from pipedec.model.formats.float8 import widened_float8
from pipedec.model.weights import Checkpoint

SIZES: dict[str, Any] = {"layers": 2, "hidden": 192, "heads": 6, "kv_heads": 3, "intermediate_size": 384}
Q_K_V = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
GATE_UP = [f"model.layers.1.mlp.{name}_proj.weight" for name in ("gate", "up")]
DOWN = "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path / "model", **SIZES)
    return tmp_path / "model"


def quantized(folder: Path, name: str, **kwargs: Any) -> dict[str, Tensor]:
    return quantize_folder(folder, name, folder.parent / "dense", **kwargs)


def matrix_of(format: Format, shape: tuple[int, int], dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    matrix = empty_matrix(format, *shape, dtype, torch.device("cpu"))
    assert isinstance(matrix, QuantizedMatrix)
    return matrix


def read(folder: Path, names: list[str], values: dict[str, Tensor]) -> None:
    """Read matrices, which are fused where that is possible, and compare."""
    checkpoint, config = Checkpoint(folder), model_config(folder)
    formats = [checkpoint.format_of(config, name, tuple(values[name].shape)) for name in names]
    sizes, inputs = [len(values[name]) for name in names], values[names[0]].shape[1]
    fused = stacked(formats, sizes, inputs, torch.float32, torch.device("cpu"))
    parts = fused.split(sizes)
    checkpoint.read_into(dict(zip(names, parts, strict=True)))
    for name, part in zip(names, parts, strict=True):
        assert isinstance(part, QuantizedMatrix)
        assert torch.equal(part.widened(), values[name]), name
    rows = torch.randn(5, inputs, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(fused.linear(rows), rows @ torch.cat([values[name] for name in names]).T, atol=1e-4, rtol=1e-5)


MATRIX = "layers.0.x_proj.weight"


def names_of(tensors: Mapping[str, Tensor]) -> set[str]:
    return {MATRIX.removesuffix("weight") + suffix for suffix in tensors}


@pytest.mark.parametrize("chunk_values", [1, weights.CHUNK_VALUES])
@pytest.mark.parametrize("name", WRITERS)
def test_matrices_are_bit_for_bit_those_of_the_format(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, chunk_values: int
) -> None:
    monkeypatch.setattr(weights, "CHUNK_VALUES", chunk_values)
    values = quantized(folder, name)
    Checkpoint(folder).check_complete(model_config(folder))
    for names in (Q_K_V, GATE_UP, [DOWN]):
        read(folder, names, values)


@pytest.mark.parametrize("name", WRITERS)
def test_logits_are_those_of_the_dense_checkpoint(folder: Path, name: str) -> None:
    quantized(folder, name)
    ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(1))
    expected = StageChain(folder.parent / "dense", (2,)).prefill(ids, 12)
    for cut in ((2,), (1, 1)):
        found = StageChain(folder, cut).prefill(ids, 12)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
    assert expected.std() > 0.1


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-tensor", "mxfp4", "nf4-nested"])
def test_transformers_modules_compute_with_the_same_matrices(folder: Path, name: str) -> None:
    quantized(folder, name)
    ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(1))
    expected = StageChain(folder.parent / "dense", (2,)).prefill(ids, 12)
    found = StageChain(folder, (1, 1), impl="transformers").prefill(ids, 12)
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_skipped_modules_are_plain_and_a_head_that_is_not_skipped_is_read_as_stored(folder: Path) -> None:
    kept = r"model\.layers\.0\.mlp\.(gate|up)_proj"
    values = quantized(
        folder,
        "fp8-blocks",
        quantized=lambda module: module == "lm_head" or (module.endswith("_proj") and "layers.0.mlp" not in module),
        modules_to_not_convert=[kept, "layers.0.mlp.down_proj"],
    )
    checkpoint, config = Checkpoint(folder), model_config(folder)
    checkpoint.check_complete(config)
    stated = config.formats.stated
    assert stated(DOWN) is PLAIN and stated("model.layers.0.mlp.up_proj.weight") is PLAIN
    assert stated("lm_head.weight") == stated(Q_K_V[0]) == Float8("weight_scale_inv", (128, 128))
    assert stated("model.embed_tokens.weight") is PLAIN
    read(folder, ["lm_head.weight"], values)
    ids = torch.arange(9)
    expected = StageChain(folder.parent / "dense", (2,)).prefill(ids, 9)
    torch.testing.assert_close(StageChain(folder, (2,)).prefill(ids, 9), expected, atol=1e-4, rtol=1e-4)


def test_an_embedding_in_8_bits_gives_its_rows(folder: Path) -> None:
    values = quantized(
        folder, "fp8-tensor-of-1", quantized=lambda module: module.endswith("embed_tokens"), modules_to_convert=["embed_tokens"]
    )
    checkpoint, config = Checkpoint(folder), model_config(folder)
    name = "model.embed_tokens.weight"
    table = matrix_of(checkpoint.format_of(config, name, (64, 192)), (64, 192))
    checkpoint.read_into({name: table})
    ids = torch.tensor([63, 0, 7, 7])
    assert torch.equal(table.rows(ids), values[name][ids])


@pytest.mark.parametrize("name", WRITERS)
def test_rows_and_parts_of_every_format(name: str) -> None:
    config = stated_formats(QUANTIZATION[name])
    weight = torch.randn(400, 320, generator=torch.Generator().manual_seed(0))
    tensors, dense = WRITERS[name](weight, np.random.default_rng(0))
    format = config.of(MATRIX, (400, 320), names_of(tensors)).resolved(dtype_names(tensors))
    matrix = matrix_of(format, (400, 320))
    matrix.fill(tensors)
    ids = torch.tensor([399, 0, 200, 127, 128, 0])
    assert torch.equal(matrix.rows(ids), dense[ids])
    start = max(format.step, 128)
    assert torch.equal(matrix[start : start + 70].widened(), dense[start : start + 70])
    half = matrix_of(format, (400, 320), torch.bfloat16)
    half.fill(tensors)
    assert torch.equal(half.rows(ids), dense[ids].bfloat16())


def dtype_names(tensors: dict[str, Tensor]) -> dict[str, str]:
    names = {
        torch.float32: "F32", torch.bfloat16: "BF16", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3",
        torch.float8_e8m0fnu: "F8_E8M0",
    }  # fmt: skip
    return {suffix: names[tensor.dtype] for suffix, tensor in tensors.items()}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("shape", [(512, 896), (384, 1024), (256, 2048)])
def test_memory_is_what_the_file_takes(name: str, shape: tuple[int, int]) -> None:
    tensors, _ = WRITERS[name](torch.randn(shape), np.random.default_rng(0))
    found = stated_formats(QUANTIZATION[name]).of(MATRIX, shape, names_of(tensors))
    format = found.resolved(dtype_names(tensors))
    held = sum(tensor.nbytes for tensor in matrix_of(format, shape).tensors())
    stored = sum(tensor.nbytes for suffix, tensor in tensors.items() if suffix in format.tensors(shape))
    assert held == format.held_bytes(shape, 4)
    assert held <= 1.03 * stored


class Largest(TorchDispatchMode):
    """Keeps the size of the largest new tensor."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not func.is_view and all(result is not one for one in args):
            self.num_bytes = max(self.num_bytes, result.nbytes)
        return result


@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-tensor", "fbgemm", "mxfp4", "nf4", "nf4-nested"])
def test_a_matrix_is_filled_as_it_is_and_multiplied_slice_by_slice(name: str) -> None:
    shape = 2048, 1024
    tensors, dense = WRITERS[name](torch.randn(shape), np.random.default_rng(0))
    found = stated_formats(QUANTIZATION[name]).of(MATRIX, shape, names_of(tensors))
    matrix = matrix_of(found.resolved(dtype_names(tensors)), shape)
    with Largest() as filling:
        matrix.fill(tensors)
    assert filling.num_bytes <= 2048 * 1024, "no more than a byte per number"
    rows = torch.randn(16, 1024)
    with Largest() as computing:
        product = matrix.linear(rows)
    assert computing.num_bytes <= 4 * base.LOADED_VALUES["cpu"] < dense.nbytes / 3
    torch.testing.assert_close(product, rows @ dense.T, atol=1e-3, rtol=1e-4)


def test_formats_fuse_only_where_blocks_end() -> None:
    block, device = Float8("weight_scale_inv", (128, 128)), torch.device("cpu")
    whole = stacked([block] * 3, [256, 128, 100], 64, torch.float32, device)
    assert isinstance(whole, QuantizedMatrix) and whole.shape == (484, 64)
    assert [len(part) for part in whole.split([256, 128, 100])] == [256, 128, 100]
    cut = stacked([block] * 3, [192, 96, 96], 64, torch.float32, device)
    assert not isinstance(cut, QuantizedMatrix) and len(cut.tensors()) == 6
    assert isinstance(stacked([Bnb4("nf4", True)] * 3, [7, 5, 3], 64, torch.float32, device), QuantizedMatrix)
    assert isinstance(stacked([Float8()] * 2, [7, 5], 64, torch.float32, device), QuantizedMatrix)


def test_matrices_with_different_nested_maps_are_not_one() -> None:
    tensors, _ = write_bnb4(torch.randn(64, 64), np.random.default_rng(0), is_nested=True)
    matrix = matrix_of(Bnb4("nf4", True), (128, 64))
    matrix[:64].fill(tensors)
    tensors["weight.nested_quant_map"] = tensors["weight.nested_quant_map"] * 2
    with pytest.raises(UserError, match="nested_quant_map differs"):
        matrix[64:].fill(tensors)


# Other implementations


@pytest.mark.skipif(torch.cuda.is_available(), reason="transformers would compute with activations in 8 bits")
@pytest.mark.parametrize("name", ["fp8-blocks", "fp8-exponents", "fp8-tensor"])
def test_transformers_loads_the_same_model(tmp_path: Path, name: str) -> None:
    save_tiny("llama", tmp_path / "model", layers=2, hidden=256, heads=8, kv_heads=4)
    quantized(tmp_path / "model", name)
    ids = torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)(ids[None]).logits[0]
    torch.testing.assert_close(StageChain(tmp_path / "model", (1, 1)).prefill(ids, 12), expected, atol=1e-4, rtol=1e-4)


def test_every_8_bit_float_is_the_published_one() -> None:
    codes = torch.tensor([byte for byte in range(256) if byte & 127 != 127], dtype=torch.uint8)
    assert np.array_equal(widened_float8(codes).numpy(), E4M3[codes.numpy()])
    assert torch.equal(widened_float8(codes), codes.view(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_float8_blocks_equal_those_of_transformers(dtype: torch.dtype) -> None:
    for shape, block in (((256, 384), (128, 128)), ((300, 200), (128, 128)), ((64, 96), (32, 48))):
        tensors, _ = write_float8(torch.randn(shape), np.random.default_rng(1), block=block, dtype=dtype)
        matrix = matrix_of(Float8("weight_scale_inv", block).resolved(dtype_names(tensors)), shape)
        matrix.fill(tensors)
        weight, scales = tensors["weight"], tensors["weight_scale_inv"]
        assert torch.equal(matrix.widened(), _dequantize_fp8_weight(weight, scales, list(block), torch.float32))
        if shape[0] % block[0] == 0 == shape[1] % block[1]:
            given = {"w": [weight], "w_scale_inv": [scales.float()]}
            assert torch.equal(matrix.widened(), Fp8Dequantize(None).convert(given)["w"][0])


def test_float8_with_half_scales_rounds_to_what_compressed_tensors_computes() -> None:
    for scale_dtype in (torch.bfloat16, torch.float16):
        codes = torch.randint(0, 127, (64, 96), dtype=torch.uint8).view(torch.float8_e4m3fn)
        scales = torch.rand(64, 1).add(0.1).to(scale_dtype)
        matrix = matrix_of(Float8("weight_scale", (1, 0), {torch.bfloat16: "BF16", torch.float16: "F16"}[scale_dtype]), (64, 96))
        matrix.fill({"weight": codes, "weight_scale": scales})
        assert torch.equal(matrix.widened().to(scale_dtype), codes.to(scale_dtype) * scales)


def test_mxfp4_equals_that_of_transformers_with_every_exponent() -> None:
    tensors, _ = write_mxfp4(torch.randn(96, 320), np.random.default_rng(1))
    tensors["weight_scales"] = (torch.arange(96 * 10) % 255).to(torch.uint8).view(96, 10)
    matrix = matrix_of(Mxfp4(), (96, 320))
    matrix.fill(tensors)
    (expected,) = convert_moe_packed_tensors(tensors["weight_blocks"][None], tensors["weight_scales"][None], dtype=torch.float32)
    assert torch.equal(matrix.widened(), expected.T)
    matrix.held["scales"].fill_(255)
    assert matrix.widened().isnan().all(), "an exponent that is not a number"


# Refusals


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "e5m2.*not supported"),
        ({"quant_method": "fp8", "activation_scheme": "none"}, "activation_scheme must be dynamic or static"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "weight_block_size must be two positive integers"),
        ({"quant_method": "fp8", "weight_block_size": "128"}, "weight_block_size must be two positive integers"),
        ({"quant_method": "fp8", "modules_to_not_convert": "lm_head"}, "modules_to_not_convert must be a list"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "load_in_8bit.*not supported"),
        ({"quant_method": "bitsandbytes", "_load_in_8bit": True, "_load_in_4bit": False}, "load_in_8bit.*not supported"),
        ({"quant_method": "bitsandbytes"}, "without load_in_4bit"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "af4"}, "must be nf4 or fp4"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_storage": "bfloat16"}, "must be uint8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "llm_int8_skip_modules": [1]}, "llm_int8_skip_modules must be"),
        ({"quant_method": "nvfp4"}, "nvfp4, which is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt NVFP4, which is not supported"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}, "a quantized cache (.FP8.) is not"),
        ({"quant_method": "modelopt", "quant_algo": ["FP8"]}, "modelopt .*, which is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(quantization: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as caught:
        stated_formats(quantization)
    assert "\n" not in str(caught.value)


def changed(tensors: dict[str, Tensor], name: str, change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    return tensors | {name: change(tensors[name]).contiguous()}


def described(**values: Any) -> Callable[[Tensor], Tensor]:
    """A change of bitsandbytes' description."""
    return lambda text: torch.tensor(list(json.dumps(json.loads(bytes(text.tolist())) | values).encode()), dtype=torch.uint8)


@pytest.mark.parametrize(
    ("name", "suffix", "change", "words"),
    [
        ("fp8-blocks", "weight", lambda one: one.float().to(torch.float8_e5m2), "F8_E5M2; not F8_E4M3"),
        ("fp8-blocks", "weight", lambda one: torch.full_like(one, torch.nan), "down_proj.weight: it holds numbers that are NaN"),
        ("fp8-blocks", "weight_scale_inv", lambda one: one[:-1], r"shape \[1, 3\], but config.json asks for \[2, 3\]"),
        ("fp8-blocks", "weight_scale_inv", lambda one: one.to(torch.int32), "I32; not F32 or BF16"),
        ("fp8-tensor", "weight_scale_inv", lambda one: one.repeat(2), r"shape \[2\], but config.json asks for \[\]"),
        ("fbgemm", "weight_scale", lambda one: one[:-1], r"shape \[191, 1\], but config.json asks for \[192, 1\]"),
        ("mxfp4", "weight_blocks", lambda one: one[:, :-1], r"asks for \[192, 12, 16\]"),
        ("mxfp4", "weight_scales", lambda one: one.float(), "F32; not U8"),
        ("nf4", "weight", lambda one: one[:-1], r"asks for \[36864, 1\]"),
        ("nf4", "weight", lambda one: one.bfloat16(), "BF16; not U8"),
        ("nf4", "weight.absmax", lambda one: one[:-1], r"asks for \[1152\]"),
        ("nf4", "weight.absmax", lambda one: one.double(), "F64; not F32"),
        ("nf4-nested", "weight.nested_absmax", lambda one: one[:-1], r"asks for \[5\]"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", lambda one: one[:-1], "down_proj.weight: .*not JSON"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", described(blocksize=128), "blocksize is 128, but only 64"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", described(quant_type="fp4"), "quant_type is fp4, but only nf4"),
        ("nf4", "weight.quant_state.bitsandbytes__nf4", described(shape=[384, 192]), "asks for 384 inputs"),
        ("nf4-nested", "weight.quant_state.bitsandbytes__nf4", described(nested_blocksize=64), "nested_blocksize is 64"),
        ("nf4-nested", "weight.quant_state.bitsandbytes__nf4", described(nested_offset=None), "nested_offset is None"),
    ],
)
def test_damaged_tensors_are_refused_by_name(
    folder: Path, name: str, suffix: str, change: Callable[[Tensor], Tensor], words: str
) -> None:
    quantized(folder, name)
    file = folder / "model.safetensors"
    save_file(changed(load_file(file), DOWN.removesuffix("weight") + suffix, change), file)
    with pytest.raises(UserError, match=words) as caught:
        StageChain(folder, (2,))
    assert "\n" not in str(caught.value) and str(file) in str(caught.value)


@pytest.mark.parametrize("suffix", ["weight_scale_inv", "weight"])
def test_a_matrix_without_its_scales_or_its_weights_is_refused(folder: Path, suffix: str) -> None:
    quantized(folder, "fp8-blocks")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    del tensors[DOWN.removesuffix("weight") + suffix]
    save_file(tensors, file)
    with pytest.raises(UserError, match=r"unquantized checkpoint|is missing from the checkpoint"):
        StageChain(folder, (2,))


@pytest.mark.parametrize(("format", "inputs"), [(Mxfp4(), 48), (Bnb4("nf4"), 96), (Bnb4("fp4", True), 32)])
def test_sizes_that_hold_no_whole_groups_are_refused(format: Format, inputs: int) -> None:
    with pytest.raises(UserError, match=f"multiple of .*, not {inputs}"):
        matrix_of(format, (64, inputs))


# Descriptions


def test_patterns_of_modules_match_beginnings_and_ends() -> None:
    assert is_listed("model.layers.1.mlp", ["model.layers.1"])
    assert not is_listed("model.layers.11.mlp", ["model.layers.1"])
    assert is_listed("model.layers.11.mlp", [r"model\.layers\.\d+"])
    assert is_listed("model.layers.3.fc1", ["fc1"]) and not is_listed("model.fc1.proj", ["fc1"])
    assert is_listed("model.[", ["model.["]) and not is_listed("model", ["model.["])


def test_modelopt_ignores_by_wildcards() -> None:
    stated = stated_formats({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head", "model.layers.1.*"]}).stated
    assert stated("lm_head.weight") is stated("model.layers.1.mlp.up_proj.weight") is PLAIN
    assert stated("model.layers.11.mlp.up_proj.weight") == Float8()


def test_users_learn_that_activations_keep_their_precision() -> None:
    for name in ("fp8-blocks", "fp8-tensor", "fbgemm", "modelopt"):
        (note,) = stated_formats(QUANTIZATION[name]).notes
        assert note.endswith("full precision.")
    assert stated_formats(QUANTIZATION["nf4"]).notes == ()


@pytest.mark.parametrize("name", WRITERS)
def test_the_names_in_the_file_are_those_of_the_format(name: str) -> None:
    tensors, _ = WRITERS[name](torch.randn(128, 192), np.random.default_rng(0))
    known = {f"layers.0.a.{suffix}" for suffix in tensors}
    format = stated_formats(QUANTIZATION[name]).of("layers.0.a.weight", (128, 192), known)
    names = file_names("layers.0.a.weight", format, (128, 192)).keys()
    assert names | {f"layers.0.a.{one}" for one in format.unused} >= known
    assert math.prod(format.tensors((128, 192))[next(iter(format.tensors((128, 192))))].shape) in (128 * 192, 128 * 96)
