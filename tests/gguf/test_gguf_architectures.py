"""GGUF files of every architecture: the config, the tensors and the answers of the checkpoint that was written."""

from __future__ import annotations

import json
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.answers import PROMPTS, check_greedy
from architectures.zoo import VOCABULARY, save_model
from safetensors.torch import load_file, save_file
from support.gguf_architectures import NAMES
from support.gguf_files import gguf_refusal, save_gguf, save_model_and_gguf
from support.llama_cpp import LlamaCpp
from support.stage_chain import StageChain

from pipedec.families import model_config
from pipedec.families.skeleton import stated_config
from pipedec.gguf import TensorIndex, model_files
from pipedec.gguf.architectures import ARCHITECTURES
from pipedec.model import Checkpoint
from pipedec.verify.reference import load_transformers

pytestmark = pytest.mark.usefixtures("own_cache")
BASE = {"rope_type": "default", "rope_theta": 500_000.0}
YARN = {"rope_theta": 500_000.0, "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}
LONG = {"rope_type": "longrope", "rope_theta": 10_000.0, "original_max_position_embeddings": 256}
LONG |= {"long_factor": [1.0, 1.1, 1.5, 2.0, 3.0, 5.0, 8.0, 8.5], "short_factor": [1.0, 1.0, 1.05, 1.1, 1.1, 1.2, 1.3, 1.3]}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e6, "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
MINISTRAL = YARN | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "beta_fast": 32.0, "beta_slow": 1.0}
SCALED = {"attention_multiplier": 0.0625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0}


def alternating(period: int, layers: int = 5) -> list[str]:
    return ["full_attention" if (layer + 1) % period == 0 else "sliding_attention" for layer in range(layers)]


GEMMA3 = {"num_hidden_layers": 7, "layer_types": alternating(6, 7), "query_pre_attn_scalar": 16}
GEMMA3_LINEAR = {
    "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {"layer_types": alternating(2), "query_pre_attn_scalar": 16}),
    "gemma3": ("gemma3_text", GEMMA3),
    "gemma3-linear": ("gemma3_text", GEMMA3 | {"rope_parameters": GEMMA3_LINEAR}),
    "phi2": ("phi", {}),
    "phi3": ("phi3", {}),
    "phi3-unlimited": ("phi3", {"sliding_window": None}),
    "phi3-longrope": ("phi3", {"rope_parameters": LONG, "original_max_position_embeddings": 256, "sliding_window": None}),
    "phi3-partial": ("phi3", {"rope_parameters": {**BASE, "partial_rotary_factor": 0.75}, "sliding_window": None}),
    "starcoder2": ("starcoder2", {"sliding_window": 4096}),
    "olmo": ("olmo", {}),
    "olmo-clipped": ("olmo", {"clip_qkv": 1.5, "num_key_value_heads": 4}),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", {"rope_parameters": {"full_attention": BASE, "sliding_attention": BASE}}),
    "olmo3-yarn": ("olmo3", {"rope_parameters": {"full_attention": YARN | {"attention_factor": 1.2}, "sliding_attention": BASE}}),
    "command-r": ("cohere", {}),
    "command-r-norms": ("cohere", {"use_qk_norm": True}),
    "cohere2": ("cohere2", {"layer_types": alternating(4)}),
    "granite": ("granite", SCALED),
    "glm4": ("glm4", {}),
    "exaone4": ("exaone4", {}),
    "exaone4-unlimited": (
        "exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5, "rope_parameters": LLAMA3},
    ),
    "smollm3": ("smollm3", {"sliding_window": None}),
    "arcee": ("arcee", {}),
    "ernie4_5": ("ernie4_5", {}),
    "seed_oss": ("seed_oss", {}),
    "apertus": ("apertus", {}),
    "gptneox": ("gpt_neox", {}),
    "gptneox-sequential": ("gpt_neox", {"use_parallel_residual": False}),
    "minicpm3": ("minicpm3", {"v_head_dim": 16}),
    "minicpm3-longrope": (
        "minicpm3", {"v_head_dim": 16, "rope_parameters": LONG | {
            "long_factor": LONG["long_factor"][:4], "short_factor": LONG["short_factor"][:4],
            "original_max_position_embeddings": 512,
        }},
    ),
    "jais2": ("jais2", {}),
    "mistral3": ("mistral", {"sliding_window": None}),
    "ministral3": ("ministral3", {"rope_parameters": MINISTRAL, "sliding_window": None}),
}  # fmt: skip
ALWAYS = ("gemma3", "phi3-longrope")  # whose answers are compared by default, too
# llama.cpp has windows only in the largest EXAONE 4 and never in Phi-3, norms of queries only in the largest Command R, and
# chooses the factors of longrope by the length of its context.
NOT_LLAMA_CPP = ("phi3", "phi3-longrope", "exaone4", "command-r-norms")
# Keys whose values do not change what a model computes, or not that of a checkpoint.
UNIMPORTANT = {"dtype", "transformers_version", "architectures", "_name_or_path", "sliding_window_pattern", "pretraining_tp"}
UNIMPORTANT |= {"bos_token_id", "pad_token_id", "eos_token_id", "initializer_range", "original_max_position_embeddings"}


def write(name: str, folder: Path, vocab_size: bool = False, **metadata: Any) -> tuple[Path, Path]:
    model_type, changes = MODELS[name]
    if name == "mistral3":
        metadata["architecture"] = name
    if vocab_size:
        metadata[f"{metadata.get('architecture') or NAMES.get(model_type, model_type)}__vocab_size"] = VOCABULARY
    return save_model_and_gguf(folder, model_type, changes, **metadata)


def test_every_architecture_has_a_file() -> None:
    """Here, or where those with linear attention and with experts are."""
    elsewhere = {"qwen35", "qwen35moe", "qwen3next", "qwen2moe", "qwen3moe", "gpt-oss", "glm4moe"}
    here = {name.partition("-")[0] for name in MODELS}
    assert {name for name in ARCHITECTURES if name.partition("-")[0] not in here} == elsewhere


@pytest.mark.parametrize("name", MODELS)
def test_config_and_tensors_are_those_that_were_written(name: str, tmp_path: Path) -> None:
    source, file = write(name, tmp_path)
    stated, written = (stated_config(folder).to_dict() for folder in (model_files(file), source))
    if name == "mistral":  # the file calls it llama
        unlike = {key for key in (*written, *stated) if key not in stated or key not in written}
        assert unlike <= {"attention_bias", "mlp_bias", "pretraining_tp", "sliding_window"} and stated["model_type"] == "llama"
        written = {key: value for key, value in written.items() if key not in (*unlike, "model_type")}
    for key in written.keys() - UNIMPORTANT:
        assert stated[key] == written[key], key
    checkpoint, weights = Checkpoint(file), load_file(source / "model.safetensors")
    assert set(checkpoint.names) == weights.keys()
    for key, values in weights.items():
        read = torch.empty(values.shape)
        checkpoint.read_into({key: read})
        assert torch.equal(read, values.float()), key


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MODELS])
def test_answers_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    source, file = write(name, tmp_path)
    config, own = model_config(file, "transformers"), model_config(source, "transformers")
    not_equal = {field.name for field in fields(own) if getattr(config, field.name) != getattr(own, field.name)}
    assert not_equal <= {"location", "eos_token_id"} | ({"model_type"} if name == "mistral" else set())
    Checkpoint(file).check_complete(config)
    check_greedy(source, file)


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases("gemma3", "olmo2")
@pytest.mark.parametrize("name", sorted(MODELS.keys() - {*NOT_LLAMA_CPP}))
def test_llama_cpp_computes_the_same_from_the_file(name: str, tmp_path: Path) -> None:
    """That the files here are what its converter would write."""
    source, file = write(name, tmp_path, tokenizer={"model": "none"}, vocab_size=True)
    with torch.no_grad():
        expected = load_transformers(source, torch.float32)(torch.tensor([PROMPTS[2]])).logits[0, -1]
    found = torch.tensor(LlamaCpp(file).logits(PROMPTS[2], len(expected)))
    torch.testing.assert_close(found, expected, atol=0.01 * float(expected.abs().max()), rtol=0)


@pytest.mark.parametrize(
    ("name", "metadata", "words"),
    [
        ("gemma2", {"gemma2__expert_count": 4}, "mixture of experts"),
        ("gemma3", {"gemma3__attention__head_count": [4] * 7}, "gemma3.attention.head_count is not one number"),
        ("gemma3", {"gemma3__rope__dimension_count": 8}, "turns 8 of 16 numbers"),
        ("gemma3", {"gemma3__attention__causal": False}, "its attention is not causal"),
        ("gemma3", {"gemma3__attn_logit_softcapping": 50.0}, "gemma3.attn_logit_softcapping is 50.0"),
        ("gemma3", {"gemma3__attention__value_length": 8}, "not as wide as its keys"),
        ("glm4", {"glm4__nextn_predict_layers": 1}, "glm4.nextn_predict_layers is 1"),
        ("glm4", {"glm4__rope__dimension_sections": [2, 2, 2, 0]}, "glm4.rope.dimension_sections is"),
        ("granite", {"granite__attention__scale": None}, "no field granite.attention.scale"),
        ("olmo3", {"olmo2__attention__sliding_window_pattern": [True, False]}, "has 2 values for 5 layers"),
        ("llama", {"llama__attention__sliding_window": 8}, "llama.attention.sliding_window is 8"),
        ("llama", {"llama__logit_scale": 8.0}, "llama.logit_scale is 8.0"),
        ("phi3", {"extra_tensors": {"rope_factors_long.weight": torch.ones(8).numpy()}}, "do not both have 8 values"),
        ("olmo3-yarn", {"olmo2__rope__scaling__yarn_ext_factor": 0.5}, "scaled by 'yarn'"),
        ("apertus", {"xielu__beta": None}, "act_fn.beta is missing"),
        ("arcee", {"extra_tensors": {"blk.0.ffn_gate.weight": torch.ones(96, 64).numpy()}}, "blk.0.ffn_gate.weight is not part"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_would_change_the_formula_is_refused(name: str, metadata: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert words in gguf_refusal(write(name, tmp_path, **metadata)[1])


def test_what_older_files_lack(tmp_path: Path) -> None:
    """Gemma 2 without its window, and Phi-3 of 4096 positions without its own."""
    for name, key, window in (
        ("gemma2", "gemma2__attention__sliding_window", 4096),
        ("phi3", "phi3__attention__sliding_window", 2047),
    ):
        (tmp_path / name).mkdir()
        _, file = write(name, tmp_path / name, **{key: None, f"{name}__context_length": 4096})
        assert json.loads((model_files(file) / "config.json").read_text())["sliding_window"] == window


def test_the_largest_gemmas_scale_queries_by_their_width(tmp_path: Path) -> None:
    changes = {"num_hidden_layers": 46, "layer_types": alternating(2, 46), "query_pre_attn_scalar": 8, "head_dim": 16}
    save_model("gemma2", tmp_path / "source", hidden_size=32, **changes)
    file = save_gguf(tmp_path / "model.gguf", tmp_path / "source")
    assert json.loads((model_files(file) / "config.json").read_text())["query_pre_attn_scalar"] == 8


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases("gemma3", "phi3-partial", "gptneox")
@pytest.mark.parametrize("name", MODELS)
def test_blocks_compute_what_their_values_do(name: str, tmp_path: Path) -> None:
    """Rows of queries and keys lie in another order in some files, and those of fused matrices."""
    _, file = write(name, tmp_path, kind="Q8_0", kinds={"ffn_down": "Q4_1", "attn_k": "Q5_0"})
    index, values = TensorIndex.load(model_files(file)), tmp_path / "values"
    values.mkdir()
    shutil.copy(model_files(file) / "config.json", values)
    save_file({key: torch.from_numpy(index.read(key)) for key in index.tensors}, values / "model.safetensors")
    layers = len(model_config(file, "transformers").layers)
    ids = torch.tensor(PROMPTS[1])
    expected = StageChain(values, (layers,), impl="transformers").prefill(ids, 7)
    found = StageChain(file, (2, layers - 2), impl="transformers").prefill(ids, 7)
    torch.testing.assert_close(found, expected, atol=1e-4 * float(expected.abs().max()), rtol=0)
    assert model_config(file).formats.title in ("GGUF: Q4_1, Q5_0, Q8_0", "GGUF: Q4_1, Q8_0"), "some have no keys apart"
