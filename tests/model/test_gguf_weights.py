"""Weights in GGUF files: every type as gguf's own de-quantiser has it, every family as transformers has it, on any stages."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny
from support.gguf_files import byte_level_tokenizer, quantized, save_gguf
from support.stage_chain import StageChain
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipedec.checkpoints import LayerSpan, TensorFiles, span_shapes
from pipedec.checkpoints.digests import config_digest, fingerprint, weights_digest
from pipedec.core.errors import UserError
from pipedec.families import checkpoint_dtype, model_config
from pipedec.formats import Ggml
from pipedec.gguf import BLOCKS, TensorIndex, model_files, write_quantized
from pipedec.gguf.index import TYPES
from pipedec.model import Checkpoint, StageModel
from pipedec.model.formats import QuantizedMatrix, WidenedMatrix, empty_matrix, stacked
from pipedec.model.formats.ggml import GgmlMatrix
from pipedec.model.matrices import StackedMatrix
from pipedec.model.weights import CHUNK_VALUES
from pipedec.plan.dtypes import Arithmetic, target_dtype
from pipedec.verify.reference import load_transformers

pytestmark = pytest.mark.usefixtures("own_cache")
IDS = torch.randint(0, 64, (20,), generator=torch.Generator().manual_seed(1))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", {"head_dim": 16, "kv_heads": 1, "attention_bias": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 12}),
    "qwen2": ("qwen2", {}),
}
SCALED = {
    "linear": ({"rope_type": "linear", "factor": 2.5}, {"type": "linear", "factor": 2.5}),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8},
        {"type": "yarn", "factor": 4.0, "original_context_length": 8},
    ),
}
# By name: the family, the type of matrices, others by a part of their names, and changes of the config.
STORED: dict[str, tuple[str, str, dict[str, str] | None, dict[str, Any]]] = {
    "llama-q4_k": ("llama", "Q4_K", None, {}),
    "llama-mixed": ("llama", "Q4_K", {"attn_v": "Q6_K", "blk.1.ffn_down": "Q6_K", "output.weight": "Q6_K"}, {}),
    "llama-mixed-tied": ("llama", "Q4_1", {"token_embd": "Q8_0", "attn_k": "Q5_1"}, {"tie_word_embeddings": True}),
    "llama-wide-heads": ("llama", "Q5_0", None, {"head_dim": 64, "kv_heads": 1, "attention_bias": True}),
    "mistral-tied": ("mistral", "Q5_K", None, {"sliding_window": None, "tie_word_embeddings": True}),
    "qwen2-tied": ("qwen2", "Q4_0", {"ffn_gate": "Q8_0"}, {"tie_word_embeddings": True}),
}
SCALES: dict[str, tuple[int, ...]]
SCALES = {kind: (208,) if kind == "Q6_K" else (0, 2) if kind.endswith(("_1", "4_K", "5_K")) else (0,) for kind in BLOCKS}
SCALES["MXFP4"] = ()
LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def logits(model: Path, cut: tuple[int, ...]) -> torch.Tensor:
    return StageChain(model, cut).prefill(IDS, 7)


def read(model: Path) -> dict[str, torch.Tensor]:
    """All tensors as a float32 stage gets them."""
    config, checkpoint = model_config(model), Checkpoint(model)
    checkpoint.check_complete(config)
    shapes = span_shapes(config, LayerSpan(range(config.num_hidden_layers), first=True, last=True), checkpoint.names)
    tensors = {name: torch.empty(shape) for name, shape in shapes.items()}
    checkpoint.read_into(tensors)
    return tensors


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A checkpoint whose rows have whole blocks of every type."""
    path = tmp_path_factory.mktemp("wide")
    save_tiny("llama", path, hidden=256, layers=1, vocab=300)
    return path


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_read_as_the_gguf_library_and_transformers_read_it(tmp_path, pair, wide, kind):
    file = save_gguf(tmp_path / "model.gguf", wide, kind, tokenizer=byte_level_tokenizer(pair.target))
    found = read(file)
    if kind in ("F16", "Q5_0", "Q4_K"):
        expected = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32).state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(values, expected[name]) for name, values in found.items())
    down = next(tensor for tensor in GGUFReader(file).tensors if tensor.name == "blk.0.ffn_down.weight")
    assert down.tensor_type.name == kind
    own = dequantize(down.data, down.tensor_type)
    assert torch.equal(found["model.layers.0.mlp.down_proj.weight"], torch.tensor(own))
    assert 0.02 < own.std() < 0.5, "the values must mean something"


def test_values_are_cast_only_once(tmp_path):
    save_tiny("llama", tmp_path / "source", layers=1)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", "Q8_0")
    name = "model.layers.0.self_attn.q_proj.weight"
    wide = torch.empty(32, 32)
    Checkpoint(file).read_into({name: wide})
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        narrow = torch.empty(32, 32, dtype=dtype)
        Checkpoint(file).read_into({name: narrow})
        assert torch.equal(narrow, wide.to(dtype))


def test_a_matrix_is_read_in_slices_of_rows(tmp_path):
    """The embedding has more values than are de-quantised at once."""
    save_tiny("llama", tmp_path / "source", layers=1, hidden=64, vocab=CHUNK_VALUES // 64 + 100)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source")
    whole = load_file(tmp_path / "source" / "model.safetensors")
    for name, values in read(file).items():
        assert torch.equal(values, whole[name]), name
    index, place = TensorIndex.load(model_files(file)), "model.layers.0.self_attn.k_proj.weight"
    assert index.read(place, 5, 9).tolist() == whole[place][5:9].tolist()


@pytest.mark.parametrize("name", MODELS)
def test_a_model_from_gguf_equals_the_same_one_from_safetensors(tmp_path, name):
    family, options = MODELS[name]
    save_tiny(family, tmp_path / "source", **options)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source")
    for cut in ((4,), (2, 1, 1)):
        assert torch.equal(logits(file, cut), logits(tmp_path / "source", cut))
    with torch.no_grad():
        expected = load_transformers(file, torch.float32)(IDS[None]).logits[0]
    torch.testing.assert_close(logits(file, (1, 3)), expected, atol=2e-4, rtol=0)


@pytest.mark.failure_case("M17")
@pytest.mark.parametrize("rope", SCALED)
def test_scaled_rotary_embeddings(tmp_path, rope):
    parameters, fields = SCALED[rope]
    save_tiny("llama", tmp_path / "source", rope_parameters={"rope_theta": 1000.0, **parameters}, max_position_embeddings=32)
    fields = {f"llama__rope__scaling__{name}": value for name, value in fields.items()}
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", **fields)
    assert torch.equal(logits(file, (4,)), logits(tmp_path / "source", (4,)))
    assert model_config(file).context_length == {"linear": 80, "yarn": 32}[rope]


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3s_scaling_is_found_in_its_factors(tmp_path, factor):
    scaling = {**LLAMA31, "factor": factor, "original_max_position_embeddings": 8192}
    save_tiny("llama", tmp_path / "source", hidden=128, heads=2, rope_parameters={"rope_theta": 500_000.0, **scaling})
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", extra_tensors={"rope_freqs.weight": _factors(64, factor)})
    found = json.loads((model_files(file) / "config.json").read_text())["rope_parameters"]
    assert found == {"rope_theta": 500_000.0, **scaling}
    assert torch.equal(logits(file, (4,)), logits(tmp_path / "source", (4,)))


def test_digests_tell_files_apart_and_change_with_them(tmp_path, pair):
    models = []
    for name, kind in (("a", "F32"), ("b", "F32"), ("c", "F16")):
        (tmp_path / name).mkdir()
        models.append(save_gguf(tmp_path / name / "model.gguf", pair.target, kind))
    for digest in (fingerprint, weights_digest):
        first, same, other = map(digest, models)
        assert first == same != other
    assert len({config_digest(model) for model in models[:2]}) == 1


def widened(file: Path, folder: Path) -> Path:
    """The same model as a checkpoint of float32 numbers, which the gguf library de-quantises."""
    folder.mkdir()
    index = TensorIndex.load(model_files(file))
    save_file({name: torch.from_numpy(index.read(name)) for name in index.tensors}, folder / "model.safetensors")
    shutil.copy(model_files(file) / "config.json", folder)
    return folder


def random_rows(kind: str, outputs: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Rows of any bytes, apart from scales that are no finite numbers: in MXFP4, the largest exponents."""
    size, num_bytes = BLOCKS[kind]
    blocks = np.random.default_rng(seed).integers(0, 256, (outputs, inputs // size, num_bytes), np.uint8)
    if kind == "MXFP4":
        blocks[..., 0] %= 253
    for place in SCALES[kind]:
        blocks[..., place + 1] &= 0xFB
    return blocks.reshape(outputs, -1)


def filled(kind: str, rows: np.ndarray, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    size, num_bytes = BLOCKS[kind]
    matrix = empty_matrix(Ggml(kind), len(rows), rows.shape[1] // num_bytes * size, dtype, torch.device("cpu"))
    assert isinstance(matrix, QuantizedMatrix)
    matrix.fill({"weight": torch.from_numpy(rows)})
    return matrix


@pytest.mark.parametrize("blocks", [1, 3, 40])
@pytest.mark.parametrize("kind", BLOCKS)
def test_the_values_of_random_blocks_are_those_of_the_gguf_library_bit_for_bit(kind, blocks):
    size, _ = BLOCKS[kind]
    rows = random_rows(kind, 70, blocks * size)
    for place in SCALES[kind]:  # of the first outputs the scales are 0, subnormal, or as large as they can be
        rows.reshape(70, blocks, -1)[:3, :, place : place + 2] = [[[0, 0]], [[1, 0]], [[0xFF, 0x7B]]]
    expected = dequantize(rows, GGMLQuantizationType[kind]).view(np.int32)
    matrix = filled(kind, rows)
    assert np.array_equal(matrix.widened().numpy().view(np.int32), expected)
    assert np.array_equal(matrix[3:9].widened().numpy().view(np.int32), expected[3:9])
    assert np.array_equal(matrix.rows(torch.tensor([69, 0, 2])).numpy().view(np.int32), expected[[69, 0, 2]])
    assert sum(tensor.nbytes for tensor in matrix.tensors()) == rows.nbytes == Ggml(kind).held_bytes(tuple(matrix.shape), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_product_is_that_with_the_values(kind, dtype):
    rows = quantized(np.random.default_rng(0).normal(0, 0.1, (1040, 768)).astype(np.float32), kind)  # more than one slice
    matrix = filled(kind, rows, dtype)
    values = matrix.widened().double()
    inputs = torch.randn(5, 768, generator=torch.Generator().manual_seed(1)).to(dtype)
    bias = torch.randn(1040, generator=torch.Generator().manual_seed(2)).to(dtype)
    expected = inputs.double() @ values.T + bias.double()
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.02}[dtype] * float(expected.abs().max())
    for prepared in (matrix, matrix.prepared(keeps_rows=True), matrix.prepared()):
        torch.testing.assert_close(prepared.linear(inputs, bias).double(), expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_the_kernel_for_4_bits_is_off_by_as_much_as_rounded_weights(kind):
    rows = quantized(np.random.default_rng(0).normal(0.03, 0.1, (48, 768)).astype(np.float32), kind)
    matrix = filled(kind, rows, torch.bfloat16)
    values = matrix.widened()
    held = matrix.prepared().tensors()
    assert sum(tensor.nbytes for tensor in held) == Ggml(kind).held_bytes((48, 768), 2) == 48 * 768 * 5 // 8
    found = matrix.linear(torch.eye(768, dtype=torch.bfloat16)).T.float()
    groups = values.unflatten(1, (-1, 32))
    largest = groups.amax(2) - groups.amin(2) + groups.abs().amax(2)  # at least that of any code
    off = (found - values).abs().unflatten(1, (-1, 32)).amax(2)
    assert (off <= (8 / 7 + 2) * largest / 256).all(), "of which 2 by the kernel's weights and products"
    assert off.mean() > 0


def test_the_kernel_for_4_bits_takes_whole_tiles_of_outputs_only():
    matrix = filled("Q4_0", random_rows("Q4_0", 40, 64), torch.bfloat16)
    before = [tensor.clone() for tensor in matrix.tensors()]
    assert all(torch.equal(found, kept) for found, kept in zip(matrix.prepared().tensors(), before, strict=True))


def test_blocks_are_read_in_slices_of_rows_and_values_cast_once(tmp_path):
    name, vocab = "model.embed_tokens.weight", CHUNK_VALUES // 64 + 100
    save_tiny("llama", tmp_path / "source", layers=1, hidden=64, vocab=vocab)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", "Q4_0")
    expected = torch.from_numpy(TensorIndex.load(model_files(file)).read(name))
    stored = empty_matrix(Ggml("Q4_0"), vocab, 64, torch.float32, torch.device("cpu"))
    Checkpoint(file).read_into({name: stored})
    assert isinstance(stored, GgmlMatrix) and torch.equal(stored.widened(), expected)
    for dtype in (torch.float32, torch.bfloat16):
        wide = WidenedMatrix(torch.empty(vocab, 64, dtype=dtype), [(Ggml("Q4_0"), vocab)])
        Checkpoint(file).read_into({name: wide})
        assert torch.equal(wide.weight_NK, expected.to(dtype))


def test_rows_of_no_whole_blocks_are_refused():
    with pytest.raises(UserError, match=r"^Q4_K takes matrices whose inputs are a multiple of 256, not 192$"):
        empty_matrix(Ggml("Q4_K"), 16, 192, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("name", STORED)
def test_a_stored_model_computes_what_its_values_do(tmp_path, name):
    family, kind, kinds, options = STORED[name]
    save_tiny(family, tmp_path / "source", layers=3, hidden=256, heads=8, vocab=96, **options)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", kind, kinds=kinds)
    expected = logits(widened(file, tmp_path / "widened"), (3,))
    for cut in ((3,), (1, 2)):
        torch.testing.assert_close(logits(file, cut), expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    with torch.no_grad():
        reference = load_transformers(file, torch.float32)(IDS[None]).logits[0]
    torch.testing.assert_close(logits(file, (3,)), reference, atol=1e-4 * float(expected.abs().max()), rtol=0)
    types = sorted({kind, *(kinds or {}).values()})
    assert model_config(file).formats.title == f"GGUF: {', '.join(types)}"


def test_matrices_of_one_type_are_fused():
    sizes, device = (64, 32, 32), torch.device("cpu")
    same = stacked([Ggml("Q4_K")] * 3, sizes, 256, torch.float32, device)
    mixed = stacked([Ggml("Q4_K"), Ggml("Q4_K"), Ggml("Q6_K")], sizes, 256, torch.float32, device)
    assert isinstance(same, GgmlMatrix) and isinstance(mixed, StackedMatrix)
    assert [block.format for block in mixed.split(sizes)] == [Ggml("Q4_K"), Ggml("Q4_K"), Ggml("Q6_K")]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_stage_holds_the_bytes_of_the_file(tmp_path, kind, tied):
    save_tiny("llama", tmp_path / "source", layers=2, hidden=256, vocab=96, tie_word_embeddings=tied)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", kind, kinds={"token_embd": "Q8_0"})
    stored = sum(place.num_bytes for place in TensorFiles(file).places.values())
    assert StageModel.load(file, range(2), torch.float32, "cpu").stack.num_bytes == stored


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_blocks_can_be_rounded_to_other_bits(tmp_path, quantize):
    save_tiny("llama", tmp_path / "source", layers=2, hidden=64)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", "Q8_0")
    found, expected = (
        StageModel.load(model, range(2), torch.float32, "cpu", quantize=quantize).stack.tensors()
        for model in (file, widened(file, tmp_path / "widened"))
    )
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("kind", "kinds", "dtype"),
    [
        ("F32", {}, "float32"), ("F16", {}, "float16"), ("BF16", {}, "bfloat16"), ("Q8_0", {}, "bfloat16"),
        ("F32", {"ffn_up": "F16"}, "float16"), ("F16", {"ffn_up": "Q4_0"}, "bfloat16"),
    ],
)  # fmt: skip
def test_the_dtype_of_a_file_is_that_of_its_matrices(tmp_path, kind, kinds, dtype):
    save_tiny("llama", tmp_path / "source", layers=1)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source", kind, kinds=kinds)
    assert checkpoint_dtype(file) == dtype
    assert target_dtype("auto", dtype, [Arithmetic(is_gpu=False, has_bfloat16=True)]).name == "float32"


def test_a_checkpoint_whose_blocks_end_early_is_one_line(tmp_path):
    save_tiny("llama", tmp_path, layers=1)
    write_quantized(
        tmp_path, {name: values.numpy() for name, values in load_file(tmp_path / "model.safetensors").items()}, "Q8_0"
    )
    (tmp_path / "model.safetensors").unlink()
    assert model_config(tmp_path).formats.title == "GGUF: Q8_0"
    StageModel.load(tmp_path, range(1), torch.float32, "cpu")
    os.truncate(tmp_path / "model.gguf", 2000)
    with pytest.raises(UserError) as caught:
        StageModel.load(tmp_path, range(1), torch.float32, "cpu")
    assert str(tmp_path / "model.gguf") in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "gguf.json").write_text("{}")
    with pytest.raises(UserError, match=r"gguf\.json is no index of a GGUF file .*; copy the checkpoint again$"):
        model_config(tmp_path)


def _factors(head_dim: int, factor: float) -> Any:
    """As llama.cpp's converter writes them: what transformers divides each frequency by."""
    scaling = {**LLAMA31, "factor": factor, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy()
