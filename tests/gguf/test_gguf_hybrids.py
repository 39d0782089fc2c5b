"""GGUF files of models with linear attention: the config and the tensors of the checkpoint that was written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures.answers import PROMPTS, check_greedy
from architectures.zoo import VOCABULARY
from safetensors.numpy import load_file, save_file
from support.gguf_files import assert_reads, assert_states_config, gguf_refusal, save_gguf, save_model_and_gguf, values_in
from support.llama_cpp import LlamaCpp
from transformers import AutoModelForCausalLM

from pipedec.families.skeleton import stated_config
from pipedec.gguf import TensorIndex, model_files

pytestmark = pytest.mark.usefixtures("own_cache")
ROPE = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 16,
    "layer_types": None,  # every fourth has attention
}  # fmt: skip
EXPERTS = {
    "mlp_only_layers": [],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
QWEN35 = {"rope_parameters": ROPE | {"mrope_section": [2, 1, 1]}, **LINEAR}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen35": ("qwen3_5_text", QWEN35),
    "qwen35-even": ("qwen3_5_text", QWEN35 | {"linear_num_key_heads": 6, "tie_word_embeddings": True}),
    "qwen3next": ("qwen3_next", {"rope_parameters": ROPE, **LINEAR, **EXPERTS}),
}


def write(name: str, folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Path, Path]:
    model_type, usual = MODELS[name]
    return save_model_and_gguf(folder, model_type, usual | (changes or {}), **options)


@pytest.mark.parametrize("name", MODELS)
def test_config_and_tensors_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    source, file = write(name, tmp_path)
    assert_states_config(file, source)
    assert json.loads((model_files(file) / "config.json").read_text())["layer_types"] == stated_config(source).layer_types
    assert_reads(file, load_file(source / "model.safetensors"))


def test_matrices_that_an_older_converter_left_whole(tmp_path: Path) -> None:
    source, file = write("qwen3next", tmp_path, is_new=False)
    assert_reads(file, load_file(source / "model.safetensors"))


@pytest.mark.parametrize("name", ["qwen35", "qwen3next"])
@pytest.mark.parametrize(
    ("kind", "value_dim", "is_widened"),
    [
        ("F16", 16, False), ("BF16", 16, False), ("Q8_0", 64, False), ("Q4_0", 32, False), ("Q6_K", 256, False),
        ("Q8_0", 16, True), ("Q4_K", 128, True),
    ],
)  # fmt: skip
def test_blocks_keep_the_values_of_the_library(name: str, kind: str, value_dim: int, is_widened: bool, tmp_path: Path) -> None:
    """Columns of value heads stay blocks, if none has values of two heads."""
    sizes = {"hidden_size": 256, "linear_value_head_dim": value_dim, "linear_num_value_heads": 4}
    source, file = write(name, tmp_path, sizes, kind=kind, kinds={"conv1d": "F32"})
    assert_reads(file, values_in(file, source, tmp_path))
    read_type = TensorIndex.load(model_files(file)).tensors["model.layers.0.linear_attn.out_proj.weight"].read_type
    assert read_type == ("F32" if is_widened and name == "qwen35" else kind)


def test_parts_of_a_matrix_in_different_types(tmp_path: Path) -> None:
    source, file = write("qwen3next", tmp_path, kind="Q8_0", kinds={"attn_gate": "Q4_0"})
    assert_reads(file, values_in(file, source, tmp_path))
    types = {key: place.read_type for key, place in TensorIndex.load(model_files(file)).tensors.items() if "in_proj" in key}
    assert types["model.layers.0.linear_attn.in_proj_qkvz.weight"] == "F32"
    assert types["model.layers.0.linear_attn.in_proj_ba.weight"] == "Q8_0"


def test_vectors_that_quantising_leaves_without_a_dimension(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.shared_expert_gate.weight"
    source, file = write("qwen3next", tmp_path)
    original = load_file(source / "model.safetensors")
    save_gguf(file, source, extra_tensors={"blk.0.ffn_gate_inp_shexp.weight": original[name][0]})
    assert_reads(file, original)


@pytest.mark.parametrize("name", ["qwen35", "qwen3next"])
def test_layers_that_predict_more_tokens_are_left_out(name: str, tmp_path: Path) -> None:
    ahead = {f"blk.5.{part}.weight": np.ones((64, 128), np.float32) for part in ("nextn.eh_proj", "attn_q", "ffn_up")}
    fields: dict[str, Any] = {f"{name}__block_count": 6, f"{name}__nextn_predict_layers": 1, "extra_tensors": ahead}
    source, file = write(name, tmp_path, **fields)
    config = json.loads((model_files(file) / "config.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 5
    assert_reads(file, load_file(source / "model.safetensors"))


def test_layers_that_the_file_names_one_by_one(tmp_path: Path) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention", "linear_attention"]
    pattern = [kind != "full_attention" for kind in kinds]
    source, file = write("qwen35", tmp_path, {"layer_types": kinds}, qwen35__attention__recurrent_layers=pattern)
    assert json.loads((model_files(file) / "config.json").read_text())["layer_types"] == kinds
    assert_reads(file, load_file(source / "model.safetensors"))


@pytest.mark.parametrize(("name", "kind"), [("qwen35", "F32"), ("qwen35", "Q8_0"), ("qwen3next", "Q8_0")])
def test_answers_are_those_of_the_checkpoint(name: str, kind: str, tmp_path: Path) -> None:
    """Q8_0: those of a checkpoint with the values that the file has."""
    source, file = write(name, tmp_path, {"linear_value_head_dim": 32}, kind=kind)
    save_file(values_in(file, source, tmp_path), source / "model.safetensors", {"format": "pt"})
    check_greedy(source, file)


@pytest.mark.parametrize(
    ("name", "metadata", "words"),
    [
        ("qwen35", {"qwen35__ssm__conv_kernel": None}, "no field qwen35.ssm.conv_kernel"),
        ("qwen35", {"qwen35__attention__recurrent_layers": [True]}, "has 1 values for 5 layers"),
        ("qwen35", {"qwen35__ssm__group_count": 0}, "metadata is damaged"),
        ("qwen35", {"qwen35__nextn_predict_layers": 9}, "no layers before the qwen35.nextn_predict_layers"),
        ("qwen35", {"qwen35__expert_count": 4}, "mixture of experts"),
        ("qwen3next", {"qwen3next__expert_count": None}, "no field qwen3next.expert_count"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_supported_is_named(name: str, metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in gguf_refusal(write(name, tmp_path, **metadata)[1])


@pytest.mark.parametrize(("name", "is_new"), [("qwen35", True), ("qwen35-even", True), ("qwen3next", True), ("qwen3next", False)])
def test_llama_cpp_computes_the_same_from_the_file(name: str, is_new: bool, tmp_path: Path) -> None:
    """That the files here are what its converter would write. It needs keys that are as wide as values."""
    fields = {"tokenizer": {"model": "none"}, f"{name.partition('-')[0]}__vocab_size": VOCABULARY}
    source, file = write(name, tmp_path, {"linear_key_head_dim": 16}, is_new=is_new, **fields)
    with torch.no_grad():
        expected = (
            AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()(torch.tensor([PROMPTS[2]])).logits[0, -1]
        )
    found = torch.tensor(LlamaCpp(file).logits(PROMPTS[2], len(expected)))
    torch.testing.assert_close(found, expected, atol=0.01 * float(expected.abs().max()), rtol=0)
