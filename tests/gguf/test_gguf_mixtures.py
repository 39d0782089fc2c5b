"""GGUF files of mixtures of experts: the config, the tensors and the answers of the checkpoint that was written."""

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
from support.gguf_architectures import NAMES
from support.gguf_files import (
    K_TYPES,
    Floats,
    assert_reads,
    assert_states_config,
    gguf_refusal,
    save_gguf,
    save_model_and_gguf,
    tensors_of,
    values_in,
)
from support.llama_cpp import LlamaCpp

from pipedec.checkpoints import TensorFiles
from pipedec.checkpoints.digests import weights_digest
from pipedec.families import model_config
from pipedec.formats import WeightFormat
from pipedec.gguf import TensorIndex, model_files
from pipedec.model import StageModel
from pipedec.plan.held import held
from pipedec.verify.reference import load_transformers

pytestmark = pytest.mark.usefixtures("own_cache")
YARN = {"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 8.0, "original_max_position_embeddings": 64}
YARN |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
SECTIONS = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
LINEAR = {"linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LAYERS = 3


def alternating(kind: str) -> list[str]:
    return [kind, "full_attention", kind]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2moe": ("qwen2_moe", {}),
    "qwen3moe": ("qwen3_moe", {"norm_topk_prob": True}),
    "mixtral": ("mixtral", {"sliding_window": None}),
    "gpt-oss": ("gpt_oss", {"rope_parameters": YARN, "layer_types": alternating("sliding_attention")}),
    "glm4moe": ("glm4_moe", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "n_shared_experts": 2}),
    "glm4moe-groups": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "first_k_dense_replace": 2}),
    "qwen35moe": ("qwen3_5_moe_text", {"rope_parameters": SECTIONS, "layer_types": alternating("linear_attention"), **LINEAR}),
}
SIZES = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"), 64)


def write(name: str, folder: Path, changes: dict[str, Any] | None = None, **options: Any) -> tuple[Path, Path]:
    model_type, usual = MODELS[name]
    return save_model_and_gguf(folder, model_type, {"num_hidden_layers": LAYERS} | usual | (changes or {}), **options)


def as_read(tensors: dict[str, Floats]) -> dict[str, Floats]:
    """The tensors of a checkpoint, stacks with outputs before inputs, as GGUF has them."""
    return {key: values.swapaxes(1, 2) if values.ndim == 3 and "experts" in key else values for key, values in tensors.items()}


@pytest.mark.parametrize("name", MODELS)
def test_config_and_tensors_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    source, file = write(name, tmp_path)
    assert_states_config(file, source)
    assert_reads(file, as_read(load_file(source / "model.safetensors")))


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("qwen3moe-Q4_K", "gpt-oss-MXFP4")
@pytest.mark.parametrize(
    ("name", "kind"),
    [("qwen3moe", "Q4_K"), ("qwen2moe", "MXFP4"), ("gpt-oss", "MXFP4"), ("gpt-oss", "Q6_K"), ("glm4moe", "BF16")],
)
def test_blocks_keep_the_values_of_the_library(name: str, kind: str, tmp_path: Path) -> None:
    source, file = write(
        name, tmp_path, dict.fromkeys(SIZES, 256) if kind in K_TYPES else SIZES, kind=kind, kinds={".bias": "F32"}
    )
    assert_reads(file, as_read(values_in(file, source, tmp_path)))
    experts = {place.read_type for key, place in TensorIndex.load(model_files(file)).tensors.items() if "experts" in key}
    assert experts - {"F32"} == {kind} or kind == "F32"


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("qwen3moe-Q8_0-mixed", "gpt-oss-F32-same", "gpt-oss-MXFP4-mixed", "glm4moe-groups-F16-same")
@pytest.mark.parametrize(
    ("name", "kind", "kinds"),
    [
        ("qwen3moe", "F32", None), ("qwen3moe", "Q8_0", {"down_exps": "Q5_0"}), ("gpt-oss", "F32", None),
        ("gpt-oss", "MXFP4", {".bias": "F32", "attn": "Q8_0"}), ("glm4moe-groups", "F16", None), ("glm4moe", "Q8_0", None),
        ("qwen35moe", "Q8_0", None), ("mixtral", "Q4_0", {"gate_exps": "Q8_0"}), ("qwen2moe", "Q5_1", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "same" if value is None else "mixed",
)  # fmt: skip
def test_answers_are_those_of_the_checkpoint(name: str, kind: str, kinds: dict[str, str] | None, tmp_path: Path) -> None:
    """In fewer bits: those of a checkpoint with the values that the file has."""
    source, file = write(name, tmp_path, SIZES, kind=kind, kinds=kinds)
    save_file(values_in(file, source, tmp_path), source / "model.safetensors", {"format": "pt"})
    check_greedy(source, file)


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3moe"])
def test_gates_in_another_type_than_what_they_close(name: str, tmp_path: Path) -> None:
    """Where they are one matrix in the checkpoint, its values are widened."""
    source, file = write(name, tmp_path, SIZES, kind="Q8_0", kinds={".bias": "F32", "gate_exps": "Q4_0"})
    assert_reads(file, as_read(values_in(file, source, tmp_path)))
    types = {place.read_type for key, place in TensorIndex.load(model_files(file)).tensors.items() if ".experts." in key}
    assert types == ({"F32", "Q8_0"} if name == "gpt-oss" else {"Q4_0", "Q8_0"})


def test_gates_in_one_tensor_with_what_they_close(tmp_path: Path) -> None:
    """As llama.cpp's converter writes them if it is asked to."""
    source, _ = write("qwen35moe", tmp_path)
    tensors = load_file(source / "model.safetensors")
    file, expected = tmp_path / "model.gguf", {key: values for key, values in tensors.items() if ".experts." not in key}
    fused, apart = {}, []
    for layer in range(LAYERS):
        experts = f"model.layers.{layer}.mlp.experts"
        gates, ups = (
            np.stack([tensors[f"{experts}.{expert}.{part}_proj.weight"] for expert in range(8)]) for part in ("gate", "up")
        )
        expected[f"{experts}.gate_up_proj"] = fused[f"blk.{layer}.ffn_gate_up_exps.weight"] = np.concatenate([gates, ups], 1)
        expected |= {key: values for key, values in tensors.items() if f"{experts}." in key and "down_proj" in key}
        apart += [f"blk.{layer}.ffn_{part}_exps.weight" for part in ("gate", "up")]
    save_gguf(file, source, kind="Q8_0", leave_out=tuple(apart), extra_tensors=fused)
    assert model_config(file).formats.title == "GGUF: Q8_0"
    save_gguf(file, source, leave_out=tuple(apart), extra_tensors=fused)
    assert_reads(file, expected)
    check_greedy(source, file)


def test_the_layer_that_predicts_more_tokens_is_left_out(tmp_path: Path) -> None:
    ahead = {f"blk.{LAYERS}.{part}.weight": np.ones((64, 128), np.float32) for part in ("nextn.eh_proj", "attn_q", "ffn_up_exps")}
    fields: dict[str, Any] = {"glm4moe__block_count": LAYERS + 1, "glm4moe__nextn_predict_layers": 1, "extra_tensors": ahead}
    source, file = write("glm4moe", tmp_path, **fields)
    assert model_config(file).num_hidden_layers == LAYERS
    assert_reads(file, load_file(source / "model.safetensors"))


@pytest.mark.parametrize("name", ["gpt-oss", "qwen3moe"])
def test_a_stage_holds_the_bytes_of_the_file(name: str, tmp_path: Path) -> None:
    """And a plan counts them."""
    _, file = write(name, tmp_path, SIZES, kind="MXFP4", kinds={".bias": "F32", "gate_inp": "F32"})
    config, stored = model_config(file), sum(place.total_bytes for place in TensorFiles(file).places.values())
    assert StageModel.load(file, range(LAYERS), torch.float32, "cpu").stack.num_bytes == stored
    parts = (config.embedding_tensors(), *map(config.layer_tensors, range(LAYERS)), config.norm_tensors(), config.head_tensors())
    shapes = {key: shape for tensors in parts for key, shape in tensors.items()}
    weights = WeightFormat("float32")
    assert sum(held(config.formats.of(key, shape), shape, weights).num_bytes for key, shape in shapes.items()) == stored


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("qwen3moe", {"leave_out": ("blk.1.ffn_up_exps.weight",)}, "model.layers.1.mlp.experts.0.up_proj.weight is missing"),
        ("gpt-oss", {"leave_out": ("blk.1.ffn_gate_exps.weight",)}, "model.layers.1.mlp.experts.gate_up_proj is missing"),
        ("gpt-oss", {"leave_out": ("blk.2.ffn_up_exps.bias",)}, "model.layers.2.mlp.experts.gate_up_proj_bias is missing"),
        ("gpt-oss", {"leave_out": ("blk.0.attn_sinks.weight",)}, "model.layers.0.self_attn.sinks is missing"),
        ("glm4moe", {"leave_out": ("blk.1.exp_probs_b.bias",)}, "mlp.gate.e_score_correction_bias is missing"),
        ("qwen3moe", {"qwen3moe__expert_count": 16}, "has 8 experts, but its qwen3moe.expert_count is 16"),
        ("qwen3moe", {"qwen3moe__expert_count": None}, "no field qwen3moe.expert_count"),
        ("qwen3moe", {"qwen3moe__expert_feed_forward_length": 32}, "has shape"),
        ("qwen3moe", {"qwen3moe__expert_gating_func": 2}, "qwen3moe.expert_gating_func is 2"),
        ("qwen3moe", {"qwen3moe__expert_weights_scale": 2.5}, "qwen3moe.expert_weights_scale is 2.5"),
        ("glm4moe", {"glm4moe__expert_gating_func": 1}, "glm4moe.expert_gating_func is 1"),
        ("glm4moe", {"glm4moe__expert_weights_norm": None}, "no field glm4moe.expert_weights_norm"),
        ("glm4moe", {"glm4moe__leading_dense_block_count": 2}, "model.layers.1.mlp.down_proj.weight is missing"),
        ("mixtral", {"llama__expert_count": None}, "blk.0.ffn_gate_inp.weight is not part of a llama model"),
        ("gpt-oss", {"gpt-oss__expert_used_count": [2] * LAYERS}, "gpt-oss.expert_used_count is not one number"),
        ("gpt-oss", {"extra_tensors": {"blk.1.ffn_up_exps.weight": np.ones((8, 32, 64), np.float32)}}, "do not belong together"),
        ("gpt-oss", {"extra_tensors": {"blk.1.ffn_up_exps.bias": np.ones((8, 1), np.float32)}}, "do not belong together"),
        ("gpt-oss", {"extra_tensors": {"blk.1.ffn_up_exps.bias": np.ones(8, np.float32)}}, "do not belong together"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_not_supported_is_named(name: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in gguf_refusal(write(name, tmp_path, **options)[1])


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("qwen3moe", "gpt-oss", "glm4moe-groups")
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_from_the_file(name: str, tmp_path: Path) -> None:
    """That the files here are what its converter would write. It rounds where the frequencies of YaRN begin and end to change."""
    changes = {"rope_parameters": YARN | {"truncate": True}} if name == "gpt-oss" else {}
    fields = {"tokenizer": {"model": "none"}, f"{NAMES[MODELS[name][0]]}__vocab_size": VOCABULARY}
    source, file = write(name, tmp_path, changes, **fields)
    with torch.no_grad():
        expected = load_transformers(source, torch.float32)(torch.tensor([PROMPTS[1]])).logits[0, -1]
    found = torch.tensor(LlamaCpp(file).logits(PROMPTS[1], len(expected)))
    torch.testing.assert_close(found, expected, atol=0.01 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize("changed", ["ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_up_exps.bias"])
def test_digests_change_with_each_part_of_a_tensor(changed: str, tmp_path: Path) -> None:
    source, file = write("gpt-oss", tmp_path)
    before = weights_digest(file)
    other = tensors_of(source, json.loads((source / "config.json").read_text()), "gpt-oss")[f"blk.1.{changed}"] + np.float32(1)
    assert weights_digest(save_gguf(tmp_path / "other.gguf", source, extra_tensors={f"blk.1.{changed}": other})) != before
