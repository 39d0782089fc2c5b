"""Plans of mixtures of experts: which weights are in memory, which a pass reads, and how many rows pay."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from pipedec.config import ClusterConfig, load_cluster
from pipedec.core.limits import CAPTURED_ROWS
from pipedec.families import KNOWN_MODELS, ExpertsShape, ModelConfig
from pipedec.families.plan_shapes import GptOssShape, Qwen3MoeShape, Qwen35Shape
from pipedec.formats import WeightFormat
from pipedec.hardware import DEVICES
from pipedec.plan.costs import ModelCosts
from pipedec.plan.curves import timesteps_per_token
from pipedec.plan.emulation import Emulation
from pipedec.plan.held import HeldWeights, as_experts, together
from pipedec.plan.partition import Measured, Plan, plan, room_of
from pipedec.plan.roofline import ExpertReads, pass_time
from pipedec.plan.table import plan_table

GPU = DEVICES["rtx3090"]
BFLOAT16 = WeightFormat("bfloat16")


def costs_of(model: ModelConfig) -> ModelCosts:
    return ModelCosts(model, BFLOAT16, 32, 4096, 4)


def cluster(directory: Path, target: str, cards: int) -> ClusterConfig:
    path = directory / "cluster.yaml"
    path.write_text(
        f"target: {target}\ndraft: qwen3-0.6b\ngpu_memory_utilization: 0.95\nmax_model_len: 2048\n"
        f"network: {{latency_us: 50, bandwidth_gbps: 10}}\nservers: [{{host: one, devices: {{rtx3090: {cards}}}}}]\n"
        f"partition: cards\npartitions:\n  cards:\n    stages: {cards}\n"
        f"    devices: [{{host: one, device: rtx3090, count: {cards}}}]\n"
        "    draft_device: {host: one, device: rtx3090, shared: true}\n"
    )
    return load_cluster(path)


def shown(made: Plan) -> str:
    console = Console(width=100, file=StringIO())
    console.print(plan_table(made))
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("shape", "config", "names"),
    [
        (
            Qwen3MoeShape(
                model_type="qwen3_moe", vocab_size=100, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
            ),
            "Qwen3MoeConfig", {"intermediate_size": "moe_intermediate_size"},
        ),
        (
            Qwen35Shape(
                model_type="qwen3_5_moe_text", vocab_size=100, hidden_size=64, intermediate_size=32, num_hidden_layers=4,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
                linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=16,
                shared_expert_intermediate_size=48,
            ),
            "Qwen3_5MoeTextConfig", {"intermediate_size": "moe_intermediate_size"},
        ),
        (
            GptOssShape(
                model_type="gpt_oss", vocab_size=100, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2,
            ),
            "GptOssConfig", {"num_experts": "num_local_experts"},
        ),
    ],
)  # fmt: skip
def test_the_shapes_have_the_weights_of_transformers(shape: ModelConfig, config: str, names: dict[str, str]) -> None:
    import torch
    import transformers

    stated = {names.get(name, name): value for name, value in vars(shape).items() if type(value) is int}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, config)(**stated))
    theirs = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    own = shape.embedding_tensors() | shape.norm_tensors() | shape.head_tensors()
    routed: dict[str, tuple[int, ...]] = {}
    for layer in range(shape.num_hidden_layers):
        own |= shape.layer_tensors(layer)
        routed |= shape.expert_tensors(layer)
    assert {name: own[name] for name in own if name not in routed} == {
        name: tensor for name, tensor in theirs.items() if ".experts." not in name
    }, "transformers keeps the experts of a layer together"
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert set(shape.experts) == {ExpertsShape(4, 2)}


def test_all_experts_are_in_memory_and_a_row_computes_with_its_own() -> None:
    model = KNOWN_MODELS["qwen3-30b-a3b"]
    costs, layers = costs_of(model), range(model.num_hidden_layers)
    assert costs.weight_bytes(layers, True, True) == 2 * model.parameters
    time = costs.pass_time(GPU, layers, True)
    active = time.row_ms * GPU.peak_flops("bfloat16") / 2000
    assert active == pytest.approx(3.35e9 - model.vocab_size * model.hidden_size, rel=0.02), "A3B, of which a pass embeds little"
    (experts,) = time.experts
    byte_ms = 1 / (GPU.bandwidth_gb_per_s * 1e6)
    assert experts.all_ms == pytest.approx(48 * 128 * 3 * 768 * 2048 * 2 * byte_ms)
    assert time.read_ms + experts.all_ms == pytest.approx(2 * (model.parameters - model.vocab_size * model.hidden_size) * byte_ms)


def test_an_expert_tensor_of_three_dimensions_is_a_matrix_in_its_format() -> None:
    model = KNOWN_MODELS["gpt-oss-120b"]
    assert costs_of(model).weight_bytes(range(36), True, True) == pytest.approx(65.2e9, rel=0.01)
    plain = replace(costs_of(model), formats=costs_of(KNOWN_MODELS["qwen3-8b"]).model.formats)
    assert plain.weight_bytes(range(36), True, True) == 2 * model.parameters


def test_rows_read_the_distinct_experts_among_theirs() -> None:
    alone, alike = (ExpertReads(100.0, 0.0, 128, 8, overlap) for overlap in (0.0, 0.25))
    assert [round(alone.distinct(rows)) for rows in (1, 4, 16, 64)] == [8, 29, 82, 126]
    assert alike.distinct(1) == pytest.approx(8) and alike.distinct(2) == pytest.approx(8 + 0.75 * 8, rel=0.03)
    for reads in (alone, alike):
        times = [reads.ms(rows) for rows in range(1, 200)]
        added = [after - before for before, after in pairwise(times)]
        assert times[0] == pytest.approx(100 / 16) and added == sorted(added, reverse=True) and 0 < times[-1] <= 100
    assert all(alike.ms(rows) < alone.ms(rows) for rows in range(2, 65))
    assert reads.ms(0) == reads.ms(1)


def test_a_kernel_reads_an_expert_again_for_every_64_of_its_rows() -> None:
    reads = ExpertReads(100.0, 100.0, 8, 2, 0.0)
    assert reads.ms(250) == pytest.approx(100) and reads.ms(260) == pytest.approx(200) and reads.ms(520) == pytest.approx(300)


def test_experts_of_equal_layers_are_read_together() -> None:
    shapes = (ExpertsShape(8, 2), ExpertsShape(8, 2), ExpertsShape(4, 1))
    parts = [as_experts(shape, HeldWeights(8000, 16_000)) for shape in shapes]
    whole = together([HeldWeights(1000, 2000), *parts])
    assert (whole.num_bytes, whole.dense.num_bytes, whole.dense.experts) == (50_000, 2000, ())
    time = pass_time(GPU, whole, "bfloat16", 3)
    assert [(one.num_experts, one.all_ms) for one in time.experts] == [
        (8, pytest.approx(32_000 / 936e6)), (4, pytest.approx(16_000 / 936e6))
    ]  # fmt: skip
    assert time.row_ms == pytest.approx(2000 * (1000 + 16_000 / 4 + 8000 / 4) / GPU.peak_flops("bfloat16"))
    for rows in (1, 16, 64):
        assert time.slowed(3.0).ms(rows, 5) == pytest.approx(3 * time.ms(rows, 5))


def test_a_row_costs_time_from_the_first_on_but_there_is_room_for_many() -> None:
    costs = costs_of(KNOWN_MODELS["qwen3-30b-a3b"])
    time = costs.pass_time(GPU, range(24), False)
    assert time.knee_rows == 1 and time.ms(2) > 1.2 * time.ms(1)
    assert room_of([(GPU, time)]) == time.room_rows == CAPTURED_ROWS, "where prompts take the least time"
    assert time.room_rows / time.ms(CAPTURED_ROWS) > 10 / time.ms(1)
    independent = replace(costs, row_overlap=0.0).pass_time(GPU, range(24), False)
    assert independent.ms(1) == time.ms(1) and independent.ms(16) > 1.1 * time.ms(16)


def test_a_plan_weighs_the_rows_of_a_mixture(tmp_path: Path) -> None:
    config = cluster(tmp_path, "qwen3-235b-a22b:awq", 8)
    made, independent = plan(config), plan(config, measured=Measured(row_overlap=0.0))
    assert not made.problems and made.knee == 1 and made.has_experts
    assert made.timestep_with(1) < made.timestep_with(4) < made.timestep_with(16) < independent.timestep_with(16)
    assert sum(stage.weight_bytes for stage in made.stages) == pytest.approx(126.7e9, rel=0.01)
    text = shown(made)
    assert f"timestep by rows     1: {made.timestep_with(1):.1f}, 4: " in text and "every further row reads more experts" in text
    forward_ms, estimates = 1.0, list[float]()
    for rows in (1, made.room):
        timestep_ms = made.timestep_drafting(forward_ms, rows)
        estimates.append(timesteps_per_token(0.7, 1, made.passage, rows) * timestep_ms)
    assert made.speculating_ms(0.7, forward_ms) <= min(estimates)
    one, two = (made.ttft_ms(chunks * made.room) for chunks in (1, 2))
    assert one == pytest.approx(made.passage * made.timestep_with(made.room), rel=0.05), "a chunk fills the room"
    assert two / one == pytest.approx((made.passage + 1) / made.passage, rel=0.05)
    assert Emulation.of_plan(made).room == made.room


def test_experts_that_do_not_fit_are_a_problem(tmp_path: Path) -> None:
    assert not plan(cluster(tmp_path, "gpt-oss-120b", 4)).problems
    assert plan(cluster(tmp_path, "gpt-oss-120b", 2)).problems[0] == "the 2 stages have room for 23 layers, the target has 36"


def test_a_tree_of_few_rows_loses_more_of_a_miss() -> None:
    needed = [timesteps_per_token(0.7, 2, 8, rows) for rows in (1, 2, 8, 16, 64)]
    assert needed == sorted(needed, reverse=True) and needed[-1] == timesteps_per_token(0.7, 2, 8) < needed[0] / 2
