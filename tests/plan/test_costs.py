"""The bytes that a plan counts of a model's weights, and what it makes of them: by the formats in which they are kept."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import quantized_files, quantized_float_files
from support.checkpoints import save_tiny, save_tiny_llama
from support.clusters import clustered
from support.gguf_files import save_gguf

from pipedec.checkpoints import KnownTensors, LayerSpan
from pipedec.cluster.doctor.needs import PROCESS_BYTES, host_needs
from pipedec.config import ServerConfig, Settings
from pipedec.core.errors import UserError
from pipedec.families import KNOWN_MODELS, model_by_name, model_config
from pipedec.families.llama import LlamaConfig
from pipedec.families.shapes import LayerShape, Shape
from pipedec.formats import ALL_PLAIN, PLAIN, FileTensor, Format, Formats, Rounded, WeightFormat, quantization, typical
from pipedec.gguf import BLOCKS
from pipedec.hardware import DEVICES
from pipedec.model import StageModel
from pipedec.plan.budgets import rank_needs
from pipedec.plan.costs import ModelCosts
from pipedec.plan.held import HeldWeights, held
from pipedec.plan.partition import plan
from pipedec.plan.roofline import pass_time
from pipedec.plan.spec import PipelineSpec
from pipedec.plan.table import plan_table

GPU, CPU = DEVICES["rtx3090"], DEVICES["cpu"]


def costs_of(config: Any, dtype: str = "float32", quantize: str | None = None, **more: Any) -> ModelCosts:
    return ModelCosts(config, WeightFormat(dtype, quantize), rows=4, max_model_len=64, passage=2, **more)


STORED = (
    "gptq", "gptq-ordered", "gptq-8bit", "awq", "ct-int8-asymmetric", "ct-w8a8", "fp8-blocks", "fp8-half-scales", "fp8-tensor",
    "mxfp4", "nf4", "nf4-nested", "Q4_0", "Q4_K", "Q6_K", "Q8_0",
)  # fmt: skip


def save_stored(folder: Path, format: str) -> Path:
    """A tiny checkpoint whose matrices are stored in this format."""
    save_tiny("llama", folder / "plain", hidden=256, kv_heads=2, vocab=512, layers=3)
    if format in BLOCKS:
        return save_gguf(folder / "model.gguf", folder / "plain", format)
    if format in quantized_float_files.WRITERS:
        quantized_float_files.quantize_folder(folder / "plain", format, folder / "dense")
        return folder / "plain"
    quantized_files.write_quantized_checkpoint(folder / "plain", folder / "stored", format, np.random.default_rng(1))
    return folder / "stored"


def check_bytes(model: Path, dtype: str, quantize: str | None = None) -> None:
    config = model_by_name(str(model))
    for layers in (range(1), range(1, 2), range(2, 3), range(3)):
        stage = StageModel.load(model, layers, getattr(torch, dtype), "cpu", quantize=quantize)
        for reads_headers in (False, True):
            costs = costs_of(config, dtype, quantize, reads_headers=reads_headers)
            planned = costs.weight_bytes(layers, layers.start == 0, layers.stop == 3)
            assert stage.stack.num_bytes == pytest.approx(planned, rel=0.02), (layers, reads_headers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("quantize", [None, "int8", "int4"])
def test_planned_bytes_are_those_that_stages_hold(tmp_path: Path, quantize: str | None, is_tied: bool, dtype: str) -> None:
    save_tiny("llama", tmp_path, hidden=128, vocab=256, layers=3, tie_word_embeddings=is_tied)
    check_bytes(tmp_path, dtype, quantize)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", STORED)
def test_so_they_are_where_weights_stay_as_they_are_stored(tmp_path: Path, format: str, dtype: str) -> None:
    check_bytes(save_stored(tmp_path, format), dtype)


@dataclass(frozen=True)
class Bytes(Format):
    """A byte for each weight, and a scale for each output, in one of two types."""

    scale: str = "F32"

    @property
    def title(self) -> str:
        return "bytes"

    def tensors(self, shape: Shape) -> dict[str, FileTensor]:
        return {"codes": FileTensor(("U8",), shape), "scales": FileTensor((self.scale, "F32", "F16"), shape[:1])}

    def resolved(self, dtypes: Mapping[str, str]) -> Bytes:
        return Bytes(dtypes.get("scales", self.scale))


class AllBytes(Formats):
    title = "bytes"

    def stated(self, name: str) -> Format:
        return Bytes() if "layers" in name else PLAIN


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint in this format, with scales of 16 bits, of whose matrices the down projections are plain."""
    monkeypatch.setitem(quantization.METHODS, "bytes", lambda description: AllBytes())
    save_tiny_llama(tmp_path, layers=3)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    tensors = load_file(file)
    for name in [name for name in tensors if "layers" in name and "norm" not in name and "down_proj" not in name]:
        weight, prefix = tensors.pop(name), name.removesuffix("weight")
        tensors |= {f"{prefix}codes": weight.to(torch.uint8), f"{prefix}scales": weight[:, 0].half()}
    save_file(tensors, file)
    config.write_text(config.read_text().replace("{", '{"quantization_config": {"quant_method": "bytes"},', 1))
    return tmp_path


def layer_bytes(directory: Path, scale_bytes: int) -> int:
    shapes = model_config(directory).layer_tensors(1)
    plain = sum(4 * math.prod(shape) for name, shape in shapes.items() if len(shape) == 1 or "down_proj" in name)
    coded = [shape for name, shape in shapes.items() if len(shape) == 2 and "down_proj" not in name]
    return plain + sum(math.prod(shape) + scale_bytes * shape[0] for shape in coded)


def test_names_in_the_checkpoint_decide_and_headers_for_its_own_rank(stored: Path) -> None:
    """A plan must be the same on hosts with other shards, which know the same names."""
    config = model_config(stored)
    assert costs_of(config).weight_bytes(range(1, 2), False, False) == layer_bytes(stored, 4)
    assert costs_of(config, reads_headers=True).weight_bytes(range(1, 2), False, False) == layer_bytes(stored, 2)
    spec = PipelineSpec(Settings.of(target=str(stored), draft="none", stages=3, dtype="float32"), ((0, 1), (1, 2), (2, 3)))
    costs = replace(costs_of(config), rows=spec.knee, max_model_len=0, passage=3)
    needs = rank_needs(spec, 2)
    assert needs.fixed_bytes - costs.rank_bytes - spec.kv_block * needs.token_bytes == layer_bytes(stored, 2)


def test_without_files_the_description_decides(stored: Path) -> None:
    """Embedding and head are plain, and so is what another setting widens."""
    whole = costs_of(model_config(stored)).weight_bytes(range(3), True, True)
    (stored / "model.safetensors").rename(stored / "elsewhere")
    shapes = model_config(stored).layer_tensors(0)
    matrices = sum(math.prod(shape) + 4 * shape[0] for shape in shapes.values() if len(shape) == 2)
    costs = costs_of(model_config(stored))
    assert costs.weight_bytes(range(1), False, False) == matrices + 2 * 4 * 32
    ends = (2 * 64 * 32 + 32) * 4
    assert costs.weight_bytes(range(0), True, True) == ends == whole - 3 * layer_bytes(stored, 4)
    widened = costs_of(model_config(stored), formats=ALL_PLAIN)
    assert widened.weight_bytes(range(3), True, True) == 4 * model_config(stored).parameters
    (stored / "model.safetensors").write_bytes(b"damaged")
    assert costs_of(model_config(stored)).weight_bytes(range(1), False, False) == matrices + 2 * 4 * 32


def test_plans_are_the_same_on_hosts_with_other_shards(stored: Path) -> None:
    """The index alone says that the down projections are plain."""
    file, config = stored / "model.safetensors", model_config(stored)
    tensors = load_file(file)
    shards = {
        f"{part}.safetensors": [name for name in tensors if ("layers.1" in name) == (part == "one")] for part in ("one", "two")
    }
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, stored / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    (stored / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    file.unlink()
    whole = costs_of(config).weight_bytes(range(3), True, True)
    (stored / "one.safetensors").unlink()
    assert costs_of(config).weight_bytes(range(3), True, True) == whole
    needs = [costs_of(config, reads_headers=True).weight_bytes(range(layer, layer + 1), False, False) for layer in range(2)]
    assert needs == [layer_bytes(stored, 2), layer_bytes(stored, 4)]


def test_headers_are_read_again_after_a_change(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path, layers=2, tie_word_embeddings=True)
    config, file = model_config(tmp_path), tmp_path / "model.safetensors"
    before = costs_of(config).weight_bytes(range(2), True, True)
    save_file(load_file(file) | {"lm_head.weight": torch.zeros(64, 32)}, file)
    os.utime(file, ns=(1, 1))
    assert costs_of(config).weight_bytes(range(2), True, True) == before + 4 * 64 * 32, "a separate head"


class Uneven(LlamaConfig):
    """Its first two layers have a larger MLP and more keys and values."""

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        return tuple(LayerShape(64, 16 if layer < 2 else 8, 128, 128, None) for layer in range(self.num_hidden_layers))

    def layer_tensors(self, layer: int) -> dict[str, Shape]:
        size = 8 * 28672 if layer < 2 else 28672
        return {f"model.layers.{layer}.up.weight": (size, 8192), f"model.layers.{layer}.norm.weight": (8192,)}


UNEVEN = Uneven(
    model_type="llama", vocab_size=1000, hidden_size=8192, intermediate_size=28672, num_hidden_layers=18, num_attention_heads=64
)


def test_layers_that_differ_are_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, small = costs_of(UNEVEN, "bfloat16"), 28672 * 8192
    assert costs.weight_bytes(range(1, 4), False, False) == 2 * (10 * small + 3 * 8192)
    assert costs.token_bytes(range(1, 4)) == 2 * 2 * 128 * (16 + 8 + 8)
    assert costs.kv_bytes(range(18)) == (64 + 4 * 3) * costs.token_bytes(range(18))
    assert costs.layer_bytes()[1] == 2 * (8 * small + 8192) + costs.kv_bytes(range(1, 2))
    first, rest = (costs.pass_time(GPU, layers, False) for layers in (range(2), range(2, 18)))
    assert first.read_ms == pytest.approx(rest.read_ms, rel=1e-3) and first.past_ms == rest.past_ms / 4
    assert costs.layer_ms(GPU)[0] > 7 * costs.layer_ms(GPU)[2]
    monkeypatch.setitem(KNOWN_MODELS, "uneven", UNEVEN)
    servers = (ServerConfig("a", {"rtx3090": 4}),)
    planned = plan(clustered(servers, {"only": {"stages": 4}}, target="uneven", dtype="bfloat16"))
    assert [len(stage.layers) for stage in planned.stages] == [1, 1, 8, 8]
    assert [stage.weight_bytes for stage in planned.stages[1:3]] == [2 * (8 * small + 8192), 2 * 8 * (small + 8192)]


def test_a_gpu_without_kernels_widens_what_is_quantized() -> None:
    formats, shape = (PLAIN, Bytes(), Rounded(4)), (4096, 4096)
    wide, coded, packed = (held(format, shape, WeightFormat("bfloat16", kernels=False)) for format in formats)
    assert (wide.num_bytes, coded.num_bytes, packed.num_bytes) == (2 << 24, (1 << 24) + 4 * 4096, (1 << 23) + (1 << 21))
    assert [one.read_bytes(on_gpu=False) for one in (wide, coded, packed)] == [2 << 24, coded.num_bytes, packed.num_bytes]
    assert [one.read_bytes(on_gpu=True) for one in (wide, coded, packed)] == [
        2 << 24, coded.num_bytes + (20 << 24), packed.num_bytes + (12 << 24),
    ]  # fmt: skip
    kept = [held(format, shape, WeightFormat("bfloat16")) for format in formats]
    assert [one.read_bytes(on_gpu=True) for one in kept] == [one.num_bytes for one in (wide, coded, packed)]
    assert [pass_time(GPU, one, "bfloat16").reread_ms > 0 for one in (*kept, coded)] == [False, True, True, False]
    flops = {pass_time(GPU, one, "bfloat16").row_ms for one in (wide, coded, packed)}
    assert len(flops) == 1 and pass_time(CPU, HeldWeights(), "float32").ms(1) == 0


@pytest.mark.parametrize("suffix", [*typical.DESCRIPTIONS, "q4_k_m"])
@pytest.mark.parametrize("model", ["llama-3.3-70b", "llama-3.2-1b"])
def test_a_known_model_is_planned_in_a_format(model: str, suffix: str) -> None:
    plain, quantized = (costs_of(model_by_name(name), "bfloat16") for name in (model, f"{model}:{suffix}"))
    layers = range(plain.model.num_hidden_layers)
    share = quantized.weight_bytes(layers, False, False) / plain.weight_bytes(layers, False, False)
    low, high = {"fp8": (0.5, 0.51), "q4_k_m": (0.28, 0.35)}.get(suffix, (0.25, 0.27))
    assert low < share < high
    ends = [one.weight_bytes(range(0), True, True) for one in (plain, quantized)]
    assert ends[0] == ends[1] if suffix != "q4_k_m" else ends[1] < ends[0] / 2
    assert (
        plain.model == quantized.model
        and plain.weight_bytes(layers, False, False) == plain.model.layer_parameters * len(layers) * 2
    )


def test_torchs_kernel_takes_affine_groups_in_bfloat16() -> None:
    name, shape = "model.layers.0.mlp.down_proj.weight", (4096, 14336)
    awq = model_by_name("llama-3.1-8b:awq").formats.of(name, shape)
    assert [awq.has_kernel(dtype) for dtype in ("bfloat16", "float16", "float32")] == [True, False, False]
    described = typical.DESCRIPTIONS["gptq"]
    others: list[dict[str, Any]] = [{"group_size": -1}, {"bits": 8}, {"desc_act": True}]
    found = [quantization.stated_formats({**described, **other}).of(name, shape) for other in others]
    assert [one.has_kernel("bfloat16") for one in found] == [False] * 3
    per_output = quantization.stated_formats({**described, "bits": 8, "group_size": -1}).of(name, shape)
    assert per_output.has_kernel("bfloat16")


def test_llama_cpps_mixture_has_more_bits_where_they_matter() -> None:
    formats = model_by_name("llama-3.1-8b:q4_k_m").formats
    titles = [[formats.stated(f"model.layers.{layer}.{name}.weight").title for layer in range(32)] for name in (
        "self_attn.v_proj", "mlp.down_proj", "self_attn.q_proj",
    )]  # fmt: skip
    assert titles[0] == titles[1] and titles[2] == ["Q4_K"] * 32
    more = [layer for layer, title in enumerate(titles[0]) if title == "Q6_K"]
    assert more == [0, 1, 2, 3, 6, 9, 12, 15, 18, 21, 24, 27, *range(28, 32)]
    ends = [formats.stated(f"{name}.weight").title for name in ("model.embed_tokens", "lm_head")]
    assert ends == ["Q4_K", "Q6_K"]
    assert model_by_name("llama-3.2-1b:q4_k_m").formats.stated("model.embed_tokens.weight").title == "Q6_K", "the head, too"


def test_an_unknown_format_is_refused_with_the_list() -> None:
    with pytest.raises(UserError, match=r"^'q9' is no format of a known model: choose gptq, awq, fp8, mxfp4, nf4 or q4_k_m$"):
        model_by_name("llama-3.1-70b:q9")
    with pytest.raises(UserError, match=r"^'llama-9:awq' is neither a directory with a config.json nor a known model \("):
        model_by_name("llama-9:awq")


def test_a_plan_names_the_format_of_the_weights() -> None:
    servers = (ServerConfig("a", {"rtx3090": 2}),)
    config = clustered(servers, {"only": {"stages": 2}}, target="llama-3.1-8b:q4_k_m", dtype="bfloat16")
    planned = plan(config)
    assert planned.problems == () and planned.numbers == "bfloat16, weights in Q4_K_M"
    (heading, *_) = [part for part in plan_table(planned).renderables if hasattr(part, "title")]
    assert str(heading.title).startswith("only: llama-3.1-8b:q4_k_m in bfloat16, weights in Q4_K_M, 2 stages")
    widened = plan(config.for_partition(given={"dequantize": "always"}))
    assert widened.numbers == "bfloat16"
    assert sum(stage.weight_bytes for stage in widened.stages) == 2 * model_by_name("llama-3.1-8b").parameters
    with pytest.raises(
        UserError, match=r"^quantize is int8, but the weights of llama-3\.1-8b:q4_k_m are quantized already \(Q4_K_M\)"
    ):
        plan(config.for_partition(given={"quantize": "int8"}))
    assert host_needs(config, planned)["a"].models["target"] is None, "it has no files"


def file_bytes(file: Path, *parts: str) -> int:
    return sum(tensor.nbytes for name, tensor in load_file(file).items() if any(part in name for part in parts))


def test_the_doctor_counts_the_bytes_of_the_files(stored: Path) -> None:
    config = clustered(
        [ServerConfig("a", {"rtx3090": 1}), ServerConfig("b", {"rtx3090": 1})], {"p": {"stages": 2, "layers": [1, 2]}},
        target=str(stored), draft="none", dtype="float32",
    )  # fmt: skip
    found, file = host_needs(config, plan(config)), stored / "model.safetensors"
    assert found["a"].checkpoint_bytes == file_bytes(file, "embed_tokens", "layers.0.")
    assert found["b"].checkpoint_bytes == file_bytes(file, "lm_head", "model.norm", "layers.1.", "layers.2.")
    assert found["b"].memory_bytes == PROCESS_BYTES + 4 * 64 * 32, "the embedding is the largest tensor"
    sizes = KnownTensors(model_config(stored)).file_bytes(LayerSpan(range(1), False, False), 4)
    assert sizes["model.layers.0.self_attn.q_proj.weight"] == 32 * 32 + 32 * 2
