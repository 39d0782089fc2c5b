"""Reading config.json, and a one-line error for every config that cannot be used."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from hypothesis import given, reject
from hypothesis import strategies as st
from support.checkpoints import FAMILIES, save_tiny, save_tiny_llama
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from pipedec.core.errors import UserError
from pipedec.families import LayerShape, Reach, context_length, model_config
from pipedec.model.rotary import Rotary

REQUIRED = {
    "vocab_size": 640, "hidden_size": 96, "intermediate_size": 32, "num_hidden_layers": 30, "num_attention_heads": 32,
}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
OPTIONAL = {
    "num_key_value_heads": [None, 4],
    "head_dim": [8],
    "rms_norm_eps": [1e-5],
    "hidden_act": ["gelu"],
    "tie_word_embeddings": [True, False],
    "attention_bias": [True],
    "mlp_bias": [True],
    "max_position_embeddings": [4096],
    "eos_token_id": [None, 7, [7, 9]],
    "sliding_window": [None, 5],
    "use_sliding_window": [True, False],
    "max_window_layers": [3],
    "layer_types": [None, ["full_attention", "sliding_attention"] * 15],
    "rope_theta": [500_000, 1e6],
    "rope_scaling": [None, LLAMA3, {"type": "linear", "factor": 2.0}],
    "rope_parameters": [None, {"rope_type": "default", "rope_theta": 2e4}, {**LLAMA3, "original_max_position_embeddings": 99}],
    "partial_rotary_factor": [0.5],
    "original_max_position_embeddings": [1024],
}  # fmt: skip


def change_json(file, **values):
    content = json.loads(file.read_text())
    content.update(values)
    file.write_text(json.dumps(content))


def test_biases_of_the_families(tmp_path):
    for family, changes, biases in (
        ("llama", {"attention_bias": True, "mlp_bias": True}, (True, True, True)),
        ("qwen2", {}, (True, False, False)),
        ("qwen3", {"attention_bias": True}, (True, True, False)),
    ):
        save_tiny(family, tmp_path / family, **changes)
        assert model_config(tmp_path / family).biases == biases


@given(
    family=st.sampled_from(sorted(FAMILIES)),
    optional=st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in OPTIONAL.items()}),
)
def test_every_file_means_what_it_means_to_transformers(tmp_path_factory, family, optional):
    """Whatever it leaves out, and whichever version of transformers wrote it."""
    directory = tmp_path_factory.mktemp("config")
    (directory / "config.json").write_text(json.dumps({"model_type": family, **REQUIRED, **optional}))
    try:
        theirs = AutoConfig.from_pretrained(directory)
    except StrictDataclassError:  # null, which not every family allows
        reject()
    theirs.standardize_rope_params()  # as its functions of the frequencies do before they read the parameters
    config = model_config(directory)
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    ends = theirs.eos_token_id
    windows = [theirs.sliding_window if family == "mistral" else None] * theirs.num_hidden_layers
    if family in ("qwen2", "qwen3"):
        windows = [theirs.sliding_window if kind == "sliding_attention" else None for kind in theirs.layer_types]
    same = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps",
        "hidden_act", "tie_word_embeddings", "max_position_embeddings",
    )  # fmt: skip
    assert {name: getattr(config, name) for name in same} == {name: getattr(theirs, name) for name in same}
    assert config.eos_token_ids == (() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,))
    assert config.rope == {name: value for name, value in theirs.rope_parameters.items() if value is not None}
    heads = theirs.num_attention_heads, theirs.num_key_value_heads
    reaches = [None if window is None else Reach(window) for window in windows]
    assert config.layers == tuple(LayerShape(*heads, head_dim, head_dim, reach) for reach in reaches)


@pytest.mark.failure_case("M17")
@pytest.mark.parametrize(
    ("kind", "rope", "expected"),
    [
        ("llama", None, 64),
        ("llama", {"type": "linear", "factor": 4.0}, 256),
        ("llama", {"rope_type": "dynamic", "factor": 2.5}, 160),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128),
        ("qwen2", {"type": "yarn", "factor": 2.0}, 128),
        ("qwen3", {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}, 64),
        ("llama", {**LLAMA3, "original_max_position_embeddings": 16}, 64),
        ("llama", {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 64),
        ("gpt_neox", {"rope_type": "linear", "factor": 4.0}, 256),
        ("gemma3_text", {"rope_type": "linear", "factor": 4.0}, 64),
    ],
    ids=str,
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_stretched_rotary_embedding_lengthens_the_context(tmp_path, kind, rope, expected, spelling):
    """Where ``max_position_embeddings`` is the length before it; in both spellings, for ranks and for the front-end."""
    config = AutoConfig.for_model(
        kind,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_hidden_layers=1,
        vocab_size=64,
        head_dim=8,
    ).to_dict()
    del config["rope_parameters"]
    theta = {"rope_theta": 10_000.0} if spelling == "rope_parameters" and rope else {}
    config |= {"max_position_embeddings": 64, spelling: None if rope is None else {**rope, **theta}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(tmp_path) == model_config(tmp_path).context_length == expected
    assert context_length(tmp_path, 50) == 50


def test_frequencies_of_llama_3_are_those_of_transformers_in_all_bits(tmp_path):
    save_tiny_llama(tmp_path, head_dim=64, rope_parameters={**LLAMA3, "rope_theta": 500_000.0}, max_position_embeddings=8192)
    theirs, _ = ROPE_INIT_FUNCTIONS["llama3"](AutoConfig.from_pretrained(tmp_path))
    config = model_config(tmp_path)
    cos_R1D, sin_R1D = Rotary(config).cos_sin(torch.tensor([1]), torch.tensor([2]))
    assert torch.equal(cos_R1D[0, 0, :32], theirs.cos())
    assert torch.equal(sin_R1D[0, 0, 32:], theirs.sin())


@pytest.mark.slow
def test_reading_a_config_and_computing_with_it_does_not_import_transformers(tmp_path):
    """It would take two seconds of every rank and every command."""
    save_tiny_llama(tmp_path, rope_parameters={**LLAMA3, "rope_theta": 500_000.0})
    script = """
import sys, torch
from pipedec.model import StageModel
StageModel.load(sys.argv[1], range(4), torch.float32, "cpu")
assert "transformers" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script, tmp_path], check=True, cwd=Path(__file__).parents[2])


def test_end_tokens_come_from_the_generation_config_first(tmp_path):
    save_tiny_llama(tmp_path)
    for in_generation_config, in_config, expected in (
        (5, 2, (5,)), ([5, 6], 2, (5, 6)), (None, [2, 3], (2, 3)), (None, None, ()), (None, 2, (2,)),
    ):  # fmt: skip
        change_json(tmp_path / "generation_config.json", eos_token_id=in_generation_config)
        change_json(tmp_path / "config.json", eos_token_id=in_config)
        assert model_config(tmp_path).eos_token_ids == expected
    (tmp_path / "generation_config.json").unlink()
    assert model_config(tmp_path).eos_token_ids == (2,)


def assert_refused(path, *words):
    with pytest.raises(UserError) as caught:
        model_config(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_other_families_are_refused_by_name(tmp_path):
    save_tiny_llama(tmp_path)
    change_json(tmp_path / "config.json", model_type="gpt2")
    assert_refused(tmp_path, "'gpt2'", "has no pipeline plan in transformers")
    with pytest.raises(UserError, match=r"'gpt2' needs --model-impl transformers; pipedec itself has llama, mistral, qwen2"):
        model_config(tmp_path, "pipedec")


def test_unreadable_directories_are_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", "nowhere", "not a directory")
    assert_refused(tmp_path, "config.json", "missing")
    (tmp_path / "config.json").write_text("<html>not found</html>")
    assert_refused(tmp_path, "config.json", "JSON")
    (tmp_path / "config.json").write_text("[1]")
    assert_refused(tmp_path, "config.json", "JSON object")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\xff")
    assert_refused(tmp_path, "config.json", "UTF-8")


@pytest.mark.parametrize(
    ("family", "values", "words"),
    [
        ("llama", {"num_attention_heads": 5}, "num_key_value_heads 2 must divide num_attention_heads 5"),
        ("llama", {"num_attention_heads": 5, "head_dim": None}, "num_attention_heads 5 must divide hidden_size 32"),
        ("llama", {"vocab_size": "64"}, "vocab_size: must be an integer (1 to 10000000), not '64'"),
        ("llama", {"rms_norm_eps": -1e-6}, "rms_norm_eps: must be a number (at least 0), not -1e-06"),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.low_freq_factor must be a"),
        ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta must be a positive number"),
        ("qwen2", {"layer_types": ["full_attention"]}, "layer_types must name 4 layers, not 1"),
        ("qwen2", {"layer_types": ["linear_attention"] * 4}, "must be one of full_attention, sliding_attention"),
        ("llama", {"quantization_config": {"quant_method": "exl3"}}, "quantized by exl3, which is not supported: choose"),
    ],
)
def test_impossible_values_are_refused(tmp_path, family, values, words):
    save_tiny(family, tmp_path)
    change_json(tmp_path / "config.json", **values)
    assert_refused(tmp_path, str(tmp_path), words)
