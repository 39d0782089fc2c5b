"""Mixtures of experts in every form of checkpoints: stored formats, stacks of matrices, shards, and within multimodal models.

Answers are those of ``generate`` with the same weights.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from support.bita_files import save_random_bita
from support.quantized_files import QUANTIZATION, WRITERS, write_quantized_checkpoint
from support.quantized_float_files import write_float8
from support.specs import bare_spec
from support.thread_differences import written
from support.thread_models import END, Case, ThreadModels, naive_answer
from torch import Tensor
from transformers import AutoModelForCausalLM, Mxfp4Config

from architectures.answers import PROMPTS, SAMPLINGS, answers, generated
from architectures.zoo import LAYERS, save_model
from pipedec.checkpoints import CheckpointPart, LayerSpan, TensorFiles
from pipedec.checkpoints.parts import missing_files, part_digests
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.formats import WeightFormat
from pipedec.methods import find_method
from pipedec.model import Checkpoint, StageModel
from pipedec.plan.costs import ModelCosts
from pipedec.verify.reference import Reference, load_transformers

INNER = {"moe_intermediate_size": 64}  # as groups of inputs need it
WITH_EXPERTS = {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 48}  # of Gemma 4
FAST = [("qwen3_moe", "awq"), ("deepseek_v3", "fp8-odd-blocks"), ("qwen3_moe", "nf4")]
OTHERS = [("qwen3_moe", format) for format in WRITERS if ("qwen3_moe", format) not in FAST]
CASES = [*FAST, *(pytest.param(*case, marks=[pytest.mark.slow]) for case in OTHERS)]


def expected(target: Path) -> list[int]:
    return generated(load_transformers(target, torch.float32), PROMPTS[1], SAMPLINGS["greedy"])[0]


def answer(target: Path, stages: int = 2, method: str = "pp", **settings: str) -> list[int]:
    pipeline = LocalPipeline.load(bare_spec(target, LAYERS, (stages, stages), model_impl="transformers", **settings))
    return answers(pipeline, method, [("greedy", 1)])[0]


def rewrite(target: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    file = target / "model.safetensors"
    save_file(change(load_file(file)), file, {"format": "pt"})


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the matrices of all experts of a layer in one tensor, those of gates and of what they gate one below the other."""
    found, matrices = dict[str, Tensor](), dict[str, list[Tensor]]()
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.*\.experts)\.\d+\.(\w+)_proj\.weight", name):
            matrices.setdefault(f"{match[1]}.{match[2]}_proj", []).append(tensor)  # in the order of their names: 8 experts
        else:
            found[name] = tensor
    for name in [name for name in matrices if name.endswith("gate_proj")]:
        gates, up = matrices.pop(name), matrices.pop(name.replace("gate_proj", "up_proj"))
        matrices[name.replace("gate_proj", "gate_up_proj")] = [torch.cat(pair) for pair in zip(gates, up, strict=True)]
    return found | {name: torch.stack(own) for name, own in matrices.items()}


def with_inputs_first(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """With every tensor of a stack of matrices of experts transposed."""
    return {
        name: tensor.mT.contiguous() if ".experts." in name and tensor.dim() == 3 else tensor for name, tensor in tensors.items()
    }


@pytest.mark.in_turn(6)
@pytest.mark.parametrize(("model_type", "format"), CASES)
def test_experts_compute_as_they_are_stored(model_type: str, format: str, tmp_path: Path) -> None:
    """Routers and shared gates are plain, as the checkpoint states."""
    save_model(model_type, tmp_path / "dense", **INNER)
    listed = "llm_int8_skip_modules" if format in ("nf4", "nf4-nested", "fp4") else "modules_to_not_convert"
    write_quantized_checkpoint(
        tmp_path / "dense", tmp_path / "stored", format, dense=tmp_path / "wide",
        quantization={listed: ["lm_head", "mlp.gate", "mlp.shared_expert_gate"]},
    )  # fmt: skip
    config, checkpoint = model_config(tmp_path / "stored"), Checkpoint(tmp_path / "stored")
    checkpoint.check_complete(config)
    experts = config.expert_tensors(LAYERS - 1)
    assert len(experts) == 3 * 8
    assert not any(checkpoint.format_of(config, *one).title == "plain" for one in experts.items())
    wanted = expected(tmp_path / "wide")
    assert expected(tmp_path / "stored") == wanted
    assert [answer(tmp_path / "stored", dequantize=widens) for widens in ("never", "always")] == [wanted] * 2


def test_a_router_that_is_left_as_it_is_leaves_gates_quantized(tmp_path: Path) -> None:
    """The gates of a dense layer have a name that begins like the router's."""
    save_model("deepseek_v3", tmp_path / "dense", first_k_dense_replace=1, **INNER)
    write_quantized_checkpoint(
        tmp_path / "dense", tmp_path / "stored", "awq", dense=tmp_path / "wide", others={r"_with_mqa|self_attn": None},
        quantization={"modules_to_not_convert": ["self_attn", "mlp.gate"]},
    )  # fmt: skip
    Checkpoint(tmp_path / "stored").check_complete(model_config(tmp_path / "stored"))
    assert answer(tmp_path / "stored", dequantize="never") == expected(tmp_path / "wide")


def test_stacks_in_mxfp4(tmp_path: Path) -> None:
    """As gpt-oss has them: only matrices of experts, whose biases are plain."""
    plain = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    save_model("gpt_oss", tmp_path / "dense")
    write_quantized_checkpoint(
        tmp_path / "dense", tmp_path / "stored", "mxfp4", dense=tmp_path / "wide", others={"self_attn": None},
        quantization={"modules_to_not_convert": plain}, has_inputs_first=True,
    )  # fmt: skip
    names = load_file(tmp_path / "stored/model.safetensors").keys()
    assert {f"model.layers.1.mlp.experts.gate_up_proj{end}" for end in ("_blocks", "_scales", "_bias")} <= names
    Checkpoint(tmp_path / "stored").check_complete(model_config(tmp_path / "stored"))
    wanted = expected(tmp_path / "wide")
    assert [answer(tmp_path / "stored", dequantize=widens) for widens in ("never", "always")] == [wanted] * 2
    assert expected(tmp_path / "stored") == wanted
    widened = AutoModelForCausalLM.from_pretrained(
        tmp_path / "stored", dtype=torch.float32, experts_implementation="eager",
        quantization_config=Mxfp4Config(modules_to_not_convert=plain, dequantize=True),
    )  # fmt: skip
    assert generated(widened.eval(), PROMPTS[1], SAMPLINGS["greedy"])[0] == wanted


@pytest.mark.parametrize("model_type", ["qwen3_5_moe_text", "qwen3_5_moe", "glm4_moe"])
def test_experts_may_be_stored_as_stacks(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path)
    wanted = expected(tmp_path)
    rewrite(tmp_path, stacked)
    config = model_config(tmp_path)
    assert len(config.expert_tensors(1)) == 2
    Checkpoint(tmp_path).check_complete(config)
    assert expected(tmp_path) == wanted == answer(tmp_path)


@pytest.mark.parametrize("model_type", ["qwen3_vl_moe", "gpt_oss"])
def test_stacks_may_have_inputs_first(model_type: str, tmp_path: Path) -> None:
    """As those of Qwen3-VL-MoE and gpt-oss have, of which transformers saves the first ones otherwise."""
    save_model(model_type, tmp_path)
    wanted = expected(tmp_path)
    for _ in range(2):
        assert answer(tmp_path) == wanted
        rewrite(tmp_path, with_inputs_first)
        Checkpoint(tmp_path).check_complete(model_config(tmp_path))


def test_stacks_in_fp8_may_have_inputs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WRITERS, "fp8-small-blocks", lambda weight, _: write_float8(weight, None, block=(16, 16)))
    monkeypatch.setitem(QUANTIZATION, "fp8-small-blocks", QUANTIZATION["fp8-blocks"] | {"weight_block_size": [16, 16]})
    save_model("qwen3_vl_moe", tmp_path / "dense")
    write_quantized_checkpoint(
        tmp_path / "dense", tmp_path / "stored", "fp8-small-blocks", dense=tmp_path / "wide",
        quantization={"modules_to_not_convert": ["model.visual", "lm_head", "mlp.gate"]},
    )  # fmt: skip
    wanted = expected(tmp_path / "wide")
    assert answer(tmp_path / "stored", dequantize="never") == wanted
    rewrite(tmp_path / "stored", with_inputs_first)
    Checkpoint(tmp_path / "stored").check_complete(model_config(tmp_path / "stored"))
    assert answer(tmp_path / "stored", dequantize="never") == expected(tmp_path / "stored") == wanted
    rewrite(tmp_path / "stored", lambda tensors: {
        name: tensor.mT.contiguous() if name.endswith("proj_scale_inv") else tensor for name, tensor in tensors.items()
    })  # fmt: skip
    with pytest.raises(UserError, match=r"proj_scale_inv has shape \[8, .*\], but config.json asks for \[8, .*\]"):
        answer(tmp_path / "stored")


@pytest.mark.parametrize("change", [lambda stack: stack[:7], lambda stack: stack[:, :, :-1], lambda stack: stack[0]])
def test_a_stack_of_another_shape_is_named(change: Callable[[Tensor], Tensor], tmp_path: Path) -> None:
    save_model("qwen3_5_moe_text", tmp_path)
    name = "model.layers.1.mlp.experts.down_proj"
    rewrite(tmp_path, lambda tensors: {
        one: change(tensor).contiguous() if one == name else tensor for one, tensor in stacked(tensors).items()
    })  # fmt: skip
    config = model_config(tmp_path)
    for check in (lambda: Checkpoint(tmp_path).check_complete(config), lambda: answer(tmp_path)):
        with pytest.raises(UserError, match=rf"{name} has shape \[.*\], but config.json asks for \[8, 64, 48\]"):
            check()


@pytest.mark.fast_cases("qwen3_moe-int4")
@pytest.mark.parametrize("quantize", ["int8", "int4"])
@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_experts_are_rounded_as_the_reference_rounds_them(model_type: str, quantize: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path, **(INNER if model_type == "qwen3_moe" else {"intermediate_size": 128}))
    spec = bare_spec(tmp_path, LAYERS, (3, 3), model_impl="transformers", quantize=quantize)
    tokens = len(answers(pipeline := LocalPipeline.load(spec), "pp", [("greedy", 1)])[0])
    wanted = Reference(spec).generate(PROMPTS[1], tokens, ignore_eos=True)
    assert answers(pipeline, "pp", [("greedy", 1)]) == [wanted] != [expected(tmp_path)]


@pytest.mark.parametrize("model_type", ["qwen3_moe", "gpt_oss"])
def test_a_plan_counts_rounded_experts_and_routers_as_they_are(model_type: str, tmp_path: Path) -> None:
    save_model(model_type, tmp_path)
    config, layers = model_config(tmp_path), range(LAYERS)
    stage = StageModel.load(tmp_path, layers, torch.float32, "cpu", config, quantize="int8")
    costs = ModelCosts(config, WeightFormat("float32", "int8"), 8, 512, 1)
    assert config.routers and stage.stack.num_bytes == costs.weight_bytes(layers, True, True)


@pytest.mark.parametrize(("model_type", "changes"), [("gemma4", WITH_EXPERTS), ("gemma4_text", WITH_EXPERTS)])
def test_experts_beside_a_dense_network(model_type: str, changes: dict[str, object], tmp_path: Path) -> None:
    save_model(model_type, tmp_path, **changes)
    config = model_config(tmp_path)
    assert config.experts[0] is not None and len(config.expert_tensors(0)) == 2
    Checkpoint(tmp_path).check_complete(config)
    assert answer(tmp_path) == expected(tmp_path)


def test_heads_ahead_with_experts_are_left_out(tmp_path: Path) -> None:
    save_model("qwen3_5_moe", tmp_path)
    wanted = expected(tmp_path)
    heads = {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.experts.3.down_proj.weight": torch.ones(64, 48)}
    rewrite(tmp_path, lambda tensors: tensors | heads)
    Checkpoint(tmp_path).check_complete(model_config(tmp_path))
    assert model_config(tmp_path).left_out([*heads])["mtp"] == 2
    assert answer(tmp_path) == wanted


def test_a_host_needs_the_shards_of_its_layers_alone(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path / "whole")
    load_transformers(tmp_path / "whole", torch.float32).save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    part = CheckpointPart("target", str(tmp_path / "shards"), (LayerSpan(range(2, 4), first=False, last=False),))
    files = TensorFiles(tmp_path / "shards")
    names = part.tensors(files)
    assert sorted(names) == sorted(name for name in files.file_of if re.match(r"model\.layers\.[23]\.", name))
    needed = {files.file_of[name] for name in names}
    for file in {*files.file_of.values()} - needed:
        file.unlink()
    assert missing_files([part]) == [] and part_digests([part])["target"].keys() == {*names}
    config = model_config(tmp_path / "shards")
    Checkpoint(tmp_path / "shards").check_complete(config, is_part=True)
    assert StageModel.load(tmp_path / "shards", range(2, 4), torch.float32, "cpu", config).stack.num_bytes > 0
    lost = min(needed)
    lost.unlink()
    assert missing_files([part]) == [lost]


def test_an_answer_with_a_choice_of_experts_by_rounding_is_not_clear(tmp_path: Path) -> None:
    save_model("qwen3_moe", tmp_path)
    model = load_transformers(tmp_path, torch.float32)
    assert generated(model, PROMPTS[1], SAMPLINGS["greedy"])[1]
    with torch.no_grad():
        model.model.layers[3].mlp.gate.weight[:] = model.model.layers[3].mlp.gate.weight[0]
    assert not generated(model, PROMPTS[1], SAMPLINGS["greedy"])[1]


def save_threaded(models: ThreadModels, folder: Path) -> None:
    """A mixture with the tokenizer of the models of threads, and a BiTA that has learned nothing."""
    save_model("qwen3_moe", folder / "target", vocab_size=models.tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=END)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(models.spec(4, 1).target / name, folder / "target" / name)
    save_random_bita(folder / "bita", folder / "target")


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.parametrize("setting", ["greedy", "filtered"])
def test_threads_equal_the_references(setting: str, tmp_path: Path, thread_models: ThreadModels) -> None:
    save_threaded(thread_models, tmp_path)
    case, bound = Case("apar", setting), thread_models.bound("apar")
    prompt, usual = thread_models.prompt_ids(case.prompt), thread_models.sampling(case)
    opener = thread_models.tokenizer.token_to_id("[Fork]")
    sampling = structs.replace(usual, logit_bias={**(usual.logit_bias or {}), opener: 43.0, END: 36.0})
    wanted = naive_answer(load_transformers(tmp_path / "target", torch.float32), bound, prompt, sampling, (END,))
    assert len(wanted.threads) > 1
    pipeline = LocalPipeline.load(
        bare_spec(tmp_path / "target", LAYERS, (3, 3), thread_models.spec(4, 1).draft, tmp_path / "bita")
    )
    for method in ("pp", "pipedec", "bita", DEFAULT_METHOD):
        request = TokenizedRequest(0, prompt, sampling, method, find_method(method).options(), threads=bound.dialect.to_json())
        list(pipeline.run(request))
        assert written(pipeline.last.sequence) == written(wanted), method
