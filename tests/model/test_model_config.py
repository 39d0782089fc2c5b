"""Reading config.json, and a one-line error for every config that cannot be used."""

from __future__ import annotations

import json

import pytest
from support.checkpoints import save_tiny, save_tiny_llama, save_tiny_mistral, save_tiny_qwen2

from pipedec.core import UserError
from pipedec.model.config import ModelConfig


def change_json(file, **values):
    content = json.loads(file.read_text())
    content.update(values)
    file.write_text(json.dumps(content))


def test_biases_and_windows_of_the_families(tmp_path):
    save_tiny_llama(tmp_path / "llama", attention_bias=True, mlp_bias=True)
    llama = ModelConfig.from_directory(tmp_path / "llama")
    assert (llama.attention_bias, llama.output_bias, llama.mlp_bias) == (True, True, True)
    assert llama.sliding_windows == (None,) * 4
    save_tiny_mistral(tmp_path / "mistral", sliding_window=7)
    assert ModelConfig.from_directory(tmp_path / "mistral").sliding_windows == (7,) * 4
    save_tiny_qwen2(tmp_path / "qwen2", use_sliding_window=True, sliding_window=9, max_window_layers=3)
    qwen2 = ModelConfig.from_directory(tmp_path / "qwen2")
    assert (qwen2.attention_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    assert qwen2.sliding_windows == (None, None, None, 9)
    assert not qwen2.qk_norm
    save_tiny("qwen3", tmp_path / "qwen3", attention_bias=True, use_sliding_window=True, sliding_window=9, max_window_layers=3)
    qwen3 = ModelConfig.from_directory(tmp_path / "qwen3")
    assert (qwen3.attention_bias, qwen3.output_bias, qwen3.mlp_bias, qwen3.qk_norm) == (True, True, False, True)
    assert qwen3.sliding_windows == (None, None, None, 9)
    assert qwen3.head_dim == 128


def test_head_size_follows_from_the_hidden_size_unless_given(tmp_path):
    save_tiny_llama(tmp_path)
    assert ModelConfig.from_directory(tmp_path).head_dim == 8
    change_json(tmp_path / "config.json", head_dim=24)
    assert ModelConfig.from_directory(tmp_path).head_dim == 24


@pytest.mark.parametrize(
    ("in_generation_config", "in_config", "expected"),
    [(5, 2, (5,)), ([5, 6], 2, (5, 6)), (None, 2, (2,)), (None, [2, 3], (2, 3)), (None, None, ())],
)
def test_end_tokens_come_from_the_generation_config_first(tmp_path, in_generation_config, in_config, expected):
    save_tiny_llama(tmp_path)
    change_json(tmp_path / "generation_config.json", eos_token_id=in_generation_config)
    change_json(tmp_path / "config.json", eos_token_id=in_config)
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == expected


def test_end_tokens_without_a_generation_config(tmp_path):
    save_tiny_llama(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    assert ModelConfig.from_directory(tmp_path).eos_token_ids == (2,)


def assert_refused(path, *words):
    with pytest.raises(UserError) as caught:
        ModelConfig.from_directory(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_other_families_are_refused_by_name(tmp_path):
    save_tiny_llama(tmp_path)
    change_json(tmp_path / "config.json", model_type="gpt2")
    assert_refused(tmp_path, "'gpt2'", "llama, mistral, qwen2, qwen3")


def test_unreadable_directories_are_refused(tmp_path):
    assert_refused(tmp_path / "nowhere", "nowhere", "not a directory")
    assert_refused(tmp_path, "config.json", "missing")
    (tmp_path / "config.json").write_text("<html>not found</html>")
    assert_refused(tmp_path, "config.json", "JSON")
    (tmp_path / "config.json").write_text("[1]")
    assert_refused(tmp_path, "config.json", "JSON object")
    (tmp_path / "config.json").write_bytes(b"\xff\xfe\xff")
    assert_refused(tmp_path, "config.json", "JSON")


def test_values_that_transformers_refuses_and_quantized_weights(tmp_path):
    save_tiny_llama(tmp_path)
    change_json(tmp_path / "config.json", num_attention_heads=5)
    assert_refused(tmp_path, "config.json", "refused")
    change_json(tmp_path / "config.json", num_attention_heads=4, quantization_config={"quant_method": "gptq"})
    assert_refused(tmp_path, "quantized by gptq", "--quantize int8 or int4")
