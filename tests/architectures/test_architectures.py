"""Every causal architecture of the installed transformers that has a pipeline plan gives the answers of ``generate``, or is
refused by name.

CI tries a tenth of them; ``make architectures`` tries all, and writes docs/results/architectures.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantized_files import write_quantized_checkpoint
from support.specs import bare_spec
from transformers import conversion_mapping
from transformers.core_model_loading import Concatenate, WeightConverter
from transformers.masking_utils import and_masks, causal_mask_function, chunked_overlay, sliding_window_overlay

from architectures.answers import PROMPTS, SAMPLINGS, answers, compare, generated
from architectures.table import DOCUMENT, Row, described, read_table, write_row
from architectures.zoo import LAYERS, architectures, save_config, save_model
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.engine.local import LocalPipeline
from pipedec.families import Reach, StateCounts, TransformersConfig, model_config
from pipedec.families.observation import _observed_mask
from pipedec.formats import ALL_PLAIN, WeightFormat
from pipedec.model import Checkpoint, StageModel
from pipedec.model.matrices import SMALLEST_PACKED
from pipedec.plan.costs import ModelCosts
from pipedec.verify.reference import load_transformers


@pytest.mark.slow
@pytest.mark.numbers
@pytest.mark.in_turn(10)
@pytest.mark.parametrize("model_type", architectures())
def test_an_architecture_is_exact_or_refused(model_type: str, tmp_path: Path, pytestconfig: pytest.Config) -> None:
    rows = pytestconfig.getoption("architecture_rows")
    save_config(model_type, tmp_path / "config")
    try:
        config = model_config(tmp_path / "config", "transformers")
    except UserError as refusal:
        row = Row(model_type, refused=str(refusal))
    else:
        assert isinstance(config, TransformersConfig)
        save_model(model_type, tmp_path / "target")
        found = compare(tmp_path / "target", tmp_path)
        row = Row(model_type, described(config), found.answers, found.ties)
        assert not found.different, found.different
    if rows is not None:
        write_row(row, Path(rows))


@pytest.mark.parametrize("model_type", ["gemma2", "olmo3", "youtu", "qwen3_5_text", "kimi_linear", "gpt_oss"])
def test_a_plan_counts_the_bytes_that_stages_load(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path)
    config = model_config(tmp_path, "transformers")
    counts = StateCounts(3, 40, 5)
    costs = ModelCosts(config, WeightFormat("float32"), 8, 512, 1, states=counts)
    for layers in (range(2), range(2, 4), range(4, LAYERS), range(LAYERS)):
        stage = StageModel.load(tmp_path, layers, torch.float32, "cpu", config)
        assert stage.stack.num_bytes == costs.weight_bytes(layers, layers.start == 0, layers.stop == LAYERS)
        pools = stage.make_pool(64, 16, counts).num_bytes + costs.state_bytes(layers)  # of a chunk, made in its forward
        assert pools == (64 + 16) * costs.token_bytes(layers) + costs.state_pool_bytes(layers)


@pytest.mark.parametrize("model_type", ["falcon_mamba", "jamba"])
def test_a_decay_for_each_number_of_a_state_is_refused_with_the_reason(model_type: str, tmp_path: Path) -> None:
    save_config(model_type, tmp_path)
    with pytest.raises(
        UserError, match="has decays by channel and number of a state \\(Mamba-1\\), so rows of a tree cannot share"
    ):
        model_config(tmp_path)


def test_a_plan_counts_the_keys_and_values_that_are_computed_from_latents(tmp_path: Path) -> None:
    save_config("youtu", tmp_path)
    config = model_config(tmp_path)
    short, long = (ModelCosts(config, WeightFormat("float32"), 8, length, 1) for length in (512, 1512))
    layer = config.layers[0]
    expanded = layer.num_heads * (layer.key_dim + layer.value_dim) * 4
    assert long.workspace_bytes("cpu") - short.workspace_bytes("cpu") == 1000 * expanded


def test_a_head_that_shares_the_embedding_may_be_packed(tmp_path: Path) -> None:
    save_model("gemma", tmp_path, vocab_size=SMALLEST_PACKED // 64)
    expected, _ = generated(load_transformers(tmp_path, torch.float32), PROMPTS[1], SAMPLINGS["greedy"])
    pipeline = LocalPipeline.load(bare_spec(tmp_path, LAYERS, (1, 1), model_impl="transformers"))
    assert answers(pipeline, "pp", [("greedy", 1)]) == [expected]


@pytest.mark.failure_case("M16")
def test_buffers_that_modules_ignore_are_no_foreign_tensors(tmp_path: Path) -> None:
    """As files of Pythia have them in every layer."""
    save_model("gpt_neox", tmp_path)
    file, layer, config = tmp_path / "model.safetensors", "gpt_neox.layers.1.attention", model_config(tmp_path)
    buffers = {
        "bias": torch.ones(1, 1, 8, 8, dtype=torch.bool),
        "masked_bias": torch.tensor(-1e9),
        "rotary_emb.inv_freq": torch.ones(4),
    }
    tensors = load_file(file) | {f"{layer}.{name}": values for name, values in buffers.items()}
    save_file(tensors, file, {"format": "pt"})
    Checkpoint(tmp_path).check_complete(config)
    assert StageModel.load(tmp_path, range(LAYERS), torch.float32, "cpu", config).config == config
    save_file(tensors | {f"{layer}.sinks": torch.ones(4)}, file, {"format": "pt"})
    with pytest.raises(UserError, match=rf"{layer}.sinks is not part of this gpt_neox model"):
        Checkpoint(tmp_path).check_complete(config)


def test_a_parameter_may_be_several_tensors_of_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up projections of Phi 3, which is one matrix in the model, as two tensors in the file."""
    names = [f"mlp.{own}.weight" for own in ("gate_part", "up_part")]
    merged = WeightConverter(names, "mlp.gate_up_proj.weight", [Concatenate(dim=0)])
    conversion_mapping.get_checkpoint_conversion_mapping("phi3")  # makes the table of all architectures
    monkeypatch.setitem(vars(conversion_mapping)["_checkpoint_conversion_mapping_cache"], "phi3", [merged])
    save_model("phi3", tmp_path / "fused", num_key_value_heads=4)
    config = model_config(tmp_path / "fused")
    assert names[1] in " ".join(config.layer_tensors(0))
    assert len(config.layer_tensors(0)) == len(load_file(tmp_path / "fused/model.safetensors")) // LAYERS
    pipeline = LocalPipeline.load(bare_spec(tmp_path / "fused", LAYERS, (2, 2)))
    expected, _ = generated(load_transformers(tmp_path / "fused", torch.float32), PROMPTS[1], SAMPLINGS["greedy"])
    assert answers(pipeline, "pp", [("greedy", 1)]) == [expected]


@pytest.mark.parametrize("format", ["gptq-ordered", "fp8-odd-blocks"])
@pytest.mark.parametrize("model_type", ["gemma3_text", "phi3", "glm4", "cohere2", "youtu"])
def test_modules_compute_with_weights_as_they_are_stored(model_type: str, format: str, tmp_path: Path) -> None:
    """Also in modules with several maps in one matrix, and with keys and values from latents."""
    save_model(model_type, tmp_path / "dense")
    write_quantized_checkpoint(tmp_path / "dense", tmp_path / "stored", format, dense=tmp_path / "wide")
    assert model_config(tmp_path / "stored").formats is not ALL_PLAIN
    expected, _ = generated(load_transformers(tmp_path / "wide", torch.float32), PROMPTS[1], SAMPLINGS["greedy"])
    pipeline = LocalPipeline.load(bare_spec(tmp_path / "stored", LAYERS, (2, 2), dequantize="never"))
    assert answers(pipeline, "pp", [("greedy", 1)]) == [expected]


@pytest.mark.numbers
@pytest.mark.parametrize("model_type", ["gpt_oss", "deepseek_v3"])
def test_mixtures_of_experts(model_type: str, tmp_path: Path) -> None:
    """Stacks with biases, windows and sinks; experts in groups, one shared by all rows, and latents."""
    save_model(model_type, tmp_path / "target")
    found = compare(tmp_path / "target", tmp_path, [3], [DEFAULT_METHOD], ["greedy"])
    assert found.answers and not found.different, found.different


@pytest.mark.parametrize("size", [1, 8])
def test_windows_and_chunks_have_other_masks(size: int) -> None:
    window = and_masks(sliding_window_overlay(size), causal_mask_function)
    chunk = and_masks(chunked_overlay(size, torch.zeros(1)), causal_mask_function)
    assert _observed_mask(window, local_size=size).reach == Reach(size)
    assert _observed_mask(chunk, local_size=size).reach == (Reach(size, is_chunk=True) if size > 1 else Reach(1))
    assert _observed_mask(causal_mask_function).reach is None


def test_the_table_has_every_architecture() -> None:
    assert [row.model_type for row in read_table(DOCUMENT)] == list(architectures()), "run `make architectures`"
