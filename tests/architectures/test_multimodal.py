"""Multimodal checkpoints are served as their text models: answers are those of the whole model, given text alone."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_files import write_quantized_checkpoint
from support.specs import bare_spec

from architectures.answers import METHODS, PROMPTS, SAMPLINGS, answers, generated
from architectures.zoo import LAYERS, MULTIMODAL, save_model, tiny_multimodal_config
from pipedec.core.errors import UserError
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.families.registry import checkpoint_dtype, context_length
from pipedec.formats import ALL_PLAIN, WeightFormat
from pipedec.model import Checkpoint, StageModel
from pipedec.plan.costs import ModelCosts
from pipedec.verify.reference import load_transformers

TOWERS = {
    "gemma3": ["multi_modal_projector", "vision_tower"], "gemma4": ["model.embed_vision", "model.vision_tower"],
    "mistral3": ["multi_modal_projector", "vision_tower"], "qwen2_5_vl": ["visual"], "qwen3_vl": ["model.visual"],
    "qwen3_5": ["model.visual"], "qwen3_5_moe": ["model.visual"], "qwen3_vl_moe": ["model.visual"],
    "kimi_k25": ["mm_projector", "model", "vision_tower"],
}  # fmt: skip


def check_answers(target: Path, numbers_of_stages: Sequence[int] = (3,), methods: Sequence[str] = ("pp",)) -> None:
    """One greedy answer is that of the whole model."""
    expected, _ = generated(load_transformers(target, torch.float32), PROMPTS[1], SAMPLINGS["greedy"])
    for stages in numbers_of_stages:
        pipeline = LocalPipeline.load(bare_spec(target, LAYERS, (stages, stages)))
        for method in methods:
            assert answers(pipeline, method, [("greedy", 1)]) == [expected], (stages, method)


def rewrite(target: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, target / "model.safetensors", {"format": "pt"})


@pytest.mark.numbers
@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_answers_are_those_of_the_whole_model(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path)
    check_answers(tmp_path, (1, 3), METHODS)


@pytest.mark.parametrize("model_type", MULTIMODAL)
def test_what_is_left_out_is_named_once(model_type: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_model(model_type, tmp_path)
    rewrite(tmp_path, load_file(tmp_path / "model.safetensors") | {"mtp.layers.0.norm.weight": torch.ones(64)})
    Checkpoint(tmp_path).check_complete(model_config(tmp_path))
    with caplog.at_level(logging.INFO, "pipedec"):
        LocalPipeline.load(bare_spec(tmp_path, LAYERS, (3, 3)))
    (line,) = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert re.sub(r" \(\d+ tensors?\)", "", line) == f"left out of {tmp_path}: {', '.join(sorted([*TOWERS[model_type], 'mtp']))}"
    assert "mtp (1 tensor)" in line


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl", "qwen3_5"])
def test_a_plan_counts_the_text_model_alone(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path)
    config = model_config(tmp_path)
    costs = ModelCosts(config, WeightFormat("float32"), 8, 512, 1)
    for layers in (range(2), range(2, LAYERS), range(LAYERS)):
        stage = StageModel.load(tmp_path, layers, torch.float32, "cpu", config)
        assert stage.stack.num_bytes == costs.weight_bytes(layers, layers.start == 0, layers.stop == LAYERS)


@pytest.mark.parametrize(
    ("model_type", "pattern", "replacement"),
    [
        ("mistral3", r"^language_model\.model\.", "model.language_model."),
        ("gemma3", r"^language_model\.model\.", "model.language_model."),
        ("qwen2_5_vl", r"^model\.", "model.language_model."),
        ("gemma3", r"^(vision_tower|multi_modal_projector)", r"model.\1"),
    ],
)
def test_checkpoints_have_names_in_several_fashions(model_type: str, pattern: str, replacement: str, tmp_path: Path) -> None:
    """Those of transformers 4 and of older files."""
    save_model(model_type, tmp_path)
    tensors = {re.sub(pattern, replacement, name): tensor for name, tensor in load_file(tmp_path / "model.safetensors").items()}
    before = model_config(tmp_path)
    rewrite(tmp_path, tensors)
    config = model_config(tmp_path)
    assert {*tensors} >= {*config.layer_tensors(0)} and config.parameters == before.parameters
    Checkpoint(tmp_path).check_complete(config)
    check_answers(tmp_path)


def test_a_tensor_of_the_text_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    save_model("gemma3", tmp_path)
    tensors, layer = load_file(tmp_path / "model.safetensors"), "language_model.model.layers.1"
    rewrite(tmp_path, tensors | {f"{layer}.sinks": torch.ones(4)})
    with pytest.raises(UserError, match=rf"{layer}.sinks is not part of this gemma3_text model"):
        Checkpoint(tmp_path).check_complete(model_config(tmp_path))
    del tensors[f"{layer}.mlp.up_proj.weight"]
    rewrite(tmp_path, tensors)
    with pytest.raises(UserError, match=rf"tensor {layer}.mlp.up_proj.weight is missing from the checkpoint"):
        Checkpoint(tmp_path).check_complete(model_config(tmp_path))


@pytest.mark.parametrize(("format", "place"), [("gptq-ordered", "whole"), ("fp8-odd-blocks", "text")])
def test_weights_may_be_stored_in_formats(format: str, place: str, tmp_path: Path) -> None:
    """Which the config of the whole model names, or that of the text model, with towers that are as they were."""
    save_model("mistral3", tmp_path / "dense")
    write_quantized_checkpoint(tmp_path / "dense", tmp_path / "stored", format, dense=tmp_path / "wide")
    file = tmp_path / "stored" / "config.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    if place == "text":
        quantization = document.pop("quantization_config") | {"modules_to_not_convert": ["vision_tower", "multi_modal_projector"]}
        document["text_config"]["quantization_config"] = quantization
        file.write_text(json.dumps(document), encoding="utf-8")
    Checkpoint(tmp_path / "stored").check_complete(model_config(tmp_path / "stored"))
    assert model_config(tmp_path / "stored").formats is not ALL_PLAIN
    expected, _ = generated(load_transformers(tmp_path / "wide", torch.float32), PROMPTS[1], SAMPLINGS["greedy"])
    assert generated(load_transformers(tmp_path / "stored", torch.float32), PROMPTS[1], SAMPLINGS["greedy"])[0] == expected
    pipeline = LocalPipeline.load(bare_spec(tmp_path / "stored", LAYERS, (2, 2), dequantize="never"))
    assert answers(pipeline, "pp", [("greedy", 1)]) == [expected]


def write_config(folder: Path, whole: dict[str, Any], text: dict[str, Any]) -> None:
    document = tiny_multimodal_config("mistral3").to_dict()
    document["text_config"] |= text
    (folder / "config.json").write_text(json.dumps(document | whole), encoding="utf-8")


def test_numbers_of_the_text_model_are_read_where_they_are(tmp_path: Path) -> None:
    write_config(tmp_path, {"dtype": None}, {"dtype": "bfloat16", "eos_token_id": [2, 7]})
    config = model_config(tmp_path)
    assert (checkpoint_dtype(tmp_path), context_length(tmp_path), config.context_length) == ("bfloat16", 512, 512)
    assert config.eos_token_ids == (2, 7) and (config.model_type, config.num_hidden_layers) == ("mistral", LAYERS)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 5}', encoding="utf-8")
    assert model_config(tmp_path).eos_token_ids == (5,)


def test_older_configs_have_the_keys_of_the_text_model_beside_those_of_towers(tmp_path: Path) -> None:
    document = tiny_multimodal_config("qwen2_5_vl").to_dict()
    text = {key: value for key, value in document.pop("text_config").items() if key not in ("model_type", "rope_parameters")}
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}}
    (tmp_path / "config.json").write_text(json.dumps(text | document | rope), encoding="utf-8")
    config = model_config(tmp_path)
    assert (config.model_type, config.num_hidden_layers, context_length(tmp_path)) == ("qwen2_5_vl_text", LAYERS, 512)


@pytest.mark.parametrize("where", ["whole", "text"])
def test_a_head_may_be_tied_by_either_config(where: str, tmp_path: Path) -> None:
    write_config(tmp_path, {"tie_word_embeddings": where == "whole"}, {"tie_word_embeddings": where == "text"})
    config, own = model_config(tmp_path), "language_model.lm_head.weight"
    assert config.head_tensors() == config.embedding_tensors() and own in config.head_tensors([own])


def test_a_text_model_is_refused_for_its_own_reason(tmp_path: Path) -> None:
    tiny_multimodal_config("gemma4", hidden_size_per_layer_input=8).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"'gemma4' feeds token ids to every layer \(per-layer inputs\)"):
        model_config(tmp_path)
