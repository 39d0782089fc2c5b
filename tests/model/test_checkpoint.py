"""Checkpoints: the tensors that a stage reads, and a one-line error for every kind of damage."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.checkpoints import save_tiny_llama
from support.stage_chain import lone_cache

from pipedec.checkpoints import LayerSpan, span_shapes
from pipedec.core.errors import UserError
from pipedec.families import model_config
from pipedec.model.rows import LaneRows
from pipedec.model.stage_model import StageModel
from pipedec.model.weights import Checkpoint

EMBEDDING, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@pytest.fixture
def single(tmp_path):
    save_tiny_llama(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    save_tiny_llama(tmp_path, max_shard_size="20KB")
    assert len(shards(tmp_path)) > 2
    return tmp_path


def shards(path):
    return sorted(path.glob("model-*.safetensors"))


def rewrite(file, change):
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def assert_refused(path, *words, check=False):
    with pytest.raises(UserError) as caught:
        checkpoint = Checkpoint(path)
        if check:
            checkpoint.check_complete(model_config(path))
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_stage_reads_only_its_own_tensors(single):
    config, checkpoint = model_config(single), Checkpoint(single)
    first = list(span_shapes(config, LayerSpan(range(0, 1), first=True, last=False), checkpoint.names))
    middle = list(span_shapes(config, LayerSpan(range(1, 3), first=False, last=False), checkpoint.names))
    last = list(span_shapes(config, LayerSpan(range(3, 4), first=False, last=True), checkpoint.names))
    assert first[0] == EMBEDDING and last[-2:] == [FINAL_NORM, HEAD]
    assert all(name.startswith(("model.layers.1.", "model.layers.2.")) for name in middle)
    assert sorted(first + middle + last) == sorted(load_file(single / "model.safetensors"))
    checkpoint.check_complete(config)


def test_a_tied_head_uses_the_embedding_and_may_be_there_as_a_copy(tmp_path):
    save_tiny_llama(tmp_path, tie_word_embeddings=True)
    config, checkpoint = model_config(tmp_path), Checkpoint(tmp_path)
    assert HEAD not in checkpoint
    assert list(span_shapes(config, LayerSpan(range(3, 4), first=False, last=True), checkpoint.names))[-1] == EMBEDDING
    checkpoint.check_complete(config)
    rewrite(tmp_path / "model.safetensors", lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    Checkpoint(tmp_path).check_complete(config)


def test_shards_give_the_same_stage_as_one_file(tmp_path):
    hidden = torch.randn(3, 32)
    outputs = []
    for size in ("1GB", "20KB"):
        save_tiny_llama(tmp_path / size, max_shard_size=size)
        stage = StageModel.load(tmp_path / size, range(1, 4), torch.float32, "cpu")
        outputs.append(stage.logits(stage.forward(hidden, [LaneRows(torch.arange(3), lone_cache(stage))])))
    assert torch.equal(*outputs)


@pytest.mark.failure_case("M1")
def test_a_missing_shard_is_named_by_who_needs_it(sharded):
    missing = shards(sharded)[1]
    config, needed = model_config(sharded), load_file(missing)
    missing.unlink()
    assert_refused(sharded, missing.name, "missing", check=True)
    Checkpoint(sharded).check_complete(config, is_part=True)
    for layer in range(config.num_hidden_layers):
        if any(name.startswith(f"model.layers.{layer}.") for name in needed):
            with pytest.raises(UserError, match=f"{missing.name} is missing"):
                StageModel.load(sharded, range(layer, layer + 1), torch.float32, "cpu")
        elif 0 < layer < config.num_hidden_layers - 1:
            StageModel.load(sharded, range(layer, layer + 1), torch.float32, "cpu")


@pytest.mark.parametrize("content", [None, b"<html>not found</html>", b""])
@pytest.mark.failure_case("M1")
def test_a_damaged_file_is_named(sharded, content):
    damaged = shards(sharded)[-1]
    damaged.write_bytes(damaged.read_bytes()[:-10] if content is None else content)
    assert_refused(sharded, damaged.name, "not a whole safetensors file")


@pytest.mark.failure_case("M1")
def test_swapped_shards_are_refused(sharded):
    first, second = shards(sharded)[:2]
    contents = first.read_bytes(), second.read_bytes()
    second.write_bytes(contents[0])
    first.write_bytes(contents[1])
    assert_refused(sharded, "model-0000", "missing, though")


@pytest.mark.parametrize("content", ["<html>", "[]", '{"weight_map": {"a": [1]}}'])
def test_a_damaged_index_is_named(sharded, content):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert_refused(sharded, "model.safetensors.index.json", "not a safetensors index")


@pytest.mark.failure_case("M3")
def test_pickle_weights_and_empty_directories_are_refused(tmp_path):
    assert_refused(tmp_path, "neither model.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert_refused(tmp_path, "convert them to safetensors")


@pytest.mark.failure_case("M1")
def test_missing_unused_misshaped_and_quantized_tensors_are_named(single):
    file, norm = single / "model.safetensors", "model.layers.2.input_layernorm.weight"
    original = file.read_bytes()
    rewrite(file, lambda tensors: tensors.pop(norm))
    assert_refused(single, norm, "missing", check=True)
    file.write_bytes(original)
    rewrite(file, lambda tensors: tensors.update({"model.layers.9.extra": torch.zeros(1)}))
    assert_refused(single, "model.layers.9.extra", "not part of", check=True)
    file.write_bytes(original)
    rewrite(file, lambda tensors: tensors.update({norm: torch.zeros(31)}))
    assert_refused(single, norm, "[31]", "[32]", check=True)
    with pytest.raises(UserError, match=r"input_layernorm.*\[31\].*\[32\]"):
        StageModel.load(single, range(2, 3), torch.float32, "cpu")
    rewrite(file, lambda tensors: tensors.update({norm: torch.zeros(32, dtype=torch.int8)}))
    assert_refused(single, norm, "I8", check=True)


@pytest.mark.failure_case("M16")
def test_old_rotary_buffers_are_ignored(single):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    rewrite(single / "model.safetensors", lambda tensors: tensors.update({name: torch.zeros(4)}))
    Checkpoint(single).check_complete(model_config(single))
