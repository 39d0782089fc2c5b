"""Weights in GGUF files: every type as gguf's own de-quantiser has it, every family as transformers has it, on any stages."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file
from support.checkpoints import save_tiny
from support.gguf_files import byte_level_tokenizer, save_gguf
from support.stage_chain import StageChain
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipedec.checkpoints import LayerSpan, span_shapes
from pipedec.checkpoints.digests import config_digest, fingerprint, weights_digest
from pipedec.families import model_config
from pipedec.gguf import TensorIndex, model_files
from pipedec.gguf.index import TYPES
from pipedec.model import Checkpoint
from pipedec.model.weights import CHUNK_VALUES
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


def _factors(head_dim: int, factor: float) -> Any:
    """As llama.cpp's converter writes them: what transformers divides each frequency by."""
    scaling = {**LLAMA31, "factor": factor, "original_max_position_embeddings": 8192, "rope_theta": 500_000.0}
    config = LlamaConfig(hidden_size=128, num_attention_heads=2, max_position_embeddings=131072, rope_parameters=scaling)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500_000.0 ** -(torch.arange(0, head_dim, 2) / head_dim)
    return (plain / scaled).numpy()
