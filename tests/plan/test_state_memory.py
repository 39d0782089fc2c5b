"""The memory of recurrent layers: how many states and rows there are, and which bytes a plan counts for them."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from support.clusters import clustered

from pipedec.cluster.doctor.needs import host_needs
from pipedec.config import DeviceConfig, ServerConfig, Settings
from pipedec.core.errors import UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.families import KNOWN_MODELS, StateCounts
from pipedec.families.plan_shapes import Qwen35Shape
from pipedec.formats import WeightFormat
from pipedec.hardware import DEVICES
from pipedec.plan.budgets import check_kv_budget, draft_state_counts, kv_budget, kv_slots, rank_needs, state_counts
from pipedec.plan.costs import ModelCosts
from pipedec.plan.kv_memory import TREE_ROWS, UNLIMITED, RankBudget, RankNeeds, tokens_beside
from pipedec.plan.partition import plan
from pipedec.plan.spec import PipelineSpec
from pipedec.plan.state_memory import LEAST_ROWS, MAX_SNAPSHOTS, NO_STATES, counted_states, rows_in_flight
from pipedec.plan.table import plan_table

HYBRID = Qwen35Shape(
    model_type="qwen3_5_text", vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16,
)  # fmt: skip
STATE = 4 * 4 * 16 * 16 + 128 * 3 * 4  # of a layer in float32: four heads, and the last inputs of a convolution of 128 channels
STASH = 4 * (2 * 16 + 4 * 17) + 128 * 4
MIB = 2**20


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(KNOWN_MODELS, "hybrid", HYBRID)
    monkeypatch.setattr("pipedec.plan.spec.model_config", lambda path: KNOWN_MODELS[str(path)])


def spec(target: str = "hybrid", draft: str = "none", layers: tuple[int, ...] = (4, 4), **settings: object) -> PipelineSpec:
    ends = [sum(layers[:stage]) for stage in range(len(layers) + 1)]
    given = {"dtype": "float32", "draft_dtype": "float32", "device": "cpu", "stages": len(layers), **settings}
    made = Settings.of(target=target, draft=draft, bita="none", **given)
    return PipelineSpec(made, tuple(pairwise(ends)))


def test_half_of_the_states_are_for_running_requests() -> None:
    assert counted_states([30, 100, 0], 1000, 64, True, 7) == StateCounts(5, 12, 5)
    assert counted_states([100], 1099, 64, False, 7) == StateCounts(10, 17, 0), "without prefixes all of them"
    assert counted_states([100], 1000, 3, True, 7) == StateCounts(3, 10, 7)
    assert counted_states([100], 100, 64, True, 7) == StateCounts(1, 8, 0)
    assert counted_states([1], 10**6, 64, True, 7) == StateCounts(64, 71, MAX_SNAPSHOTS)
    assert counted_states([0, 0], 1, 64, True, 7) == NO_STATES
    with pytest.raises(
        UserError, match=r"take 2\.0 KiB for the state of one request, but there are 1\.0 KiB: give a larger --st"
    ):
        counted_states([2048], 1024, 64, True, 7)


def test_rows_are_those_of_a_full_pipeline() -> None:
    assert rows_in_flight(128, 4) == 128 * 5 and rows_in_flight(16, 4) == KNEE_ROWS * 5 and rows_in_flight(16, 1) == LEAST_ROWS


def test_all_ranks_count_the_same_by_settings_and_configs() -> None:
    """The stage with the most recurrent layers decides: of every four layers three are recurrent."""
    given = spec(layers=(3, 5), state_memory=10 * 3 * STATE)
    assert state_counts(given) == StateCounts(5, 5 + LEAST_ROWS, 5) and draft_state_counts(given) == NO_STATES
    assert state_counts(spec(layers=(4, 4), state_memory=10 * 3 * STATE, passage=9)).rows == 5 + 64 * 10
    assert state_counts(spec(layers=(4, 4), state_memory=10 * 3 * STATE, prefix_cache=False)) == StateCounts(
        10, LEAST_ROWS + 10, 0
    )
    assert state_counts(spec("qwen3-0.6b", layers=(14, 14))) == NO_STATES
    drafted = spec("qwen3-0.6b", "hybrid", (14, 14), state_memory=4 * 6 * STATE)
    assert state_counts(drafted) == NO_STATES and draft_state_counts(drafted) == StateCounts(4, 4 + TREE_ROWS * 3)
    with pytest.raises(UserError, match="give a larger --state-memory"):
        state_counts(spec(state_memory=1000))


def test_bytes_are_counted_layer_by_layer() -> None:
    counts = StateCounts(5, 40, 7)
    bare = ModelCosts(HYBRID, WeightFormat("float32"), rows=4, max_model_len=64, passage=2)
    costs = replace(bare, states=counts)
    recurrent = 14 * STATE + 42 * STASH  # two of each belong to no request
    assert costs.state_pool_bytes(range(1)) == recurrent and costs.state_pool_bytes(range(3, 4)) == 0
    assert costs.state_pool_bytes(range(2, 6)) == 3 * recurrent and costs.state_bytes(range(8)) == 6 * STATE
    assert costs.token_bytes(range(3)) == costs.kv_bytes(range(3)) == 0, "recurrent layers keep nothing of a token"
    more = [one - without for one, without in zip(costs.layer_bytes(), bare.layer_bytes(), strict=True)]
    assert more == [recurrent - 2 * (STATE + STASH)] * 3 + [0] + [recurrent - 2 * (STATE + STASH)] * 3 + [0]


def test_a_pass_reads_and_writes_the_state_of_a_request() -> None:
    costs = ModelCosts(HYBRID, WeightFormat("float32"), rows=4, max_model_len=64, passage=2)
    device = DEVICES["rtx3090"]
    time = costs.pass_time(device, range(3), False)
    read = costs.weight_bytes(range(3), False, False) + 2 * 3 * STATE
    assert time.read_ms == pytest.approx(read / device.bandwidth_gb_per_s / 1e6) and time.past_ms == 0
    assert costs.layer_ms(device)[0] != costs.layer_ms(device)[3]


def test_a_rank_without_attention_has_room_for_any_number_of_tokens() -> None:
    assert RankBudget(1, 0, 0).tokens == UNLIMITED
    assert tokens_beside(100, [RankNeeds(90, 0)]) == UNLIMITED and tokens_beside(80, [RankNeeds(90, 0)]) < 0
    given = spec(layers=(3, 5), kv_cache_memory=MIB)
    assert [rank.token_bytes for rank in kv_budget(given).ranks] == [0, 2 * 2 * 2 * 16 * 4]
    assert kv_slots(given) == MIB // (2 * 2 * 2 * 16 * 4) // 16 * 16


def test_a_rank_needs_the_memory_of_its_states() -> None:
    few, many = (spec(layers=(3, 5), state_memory=size * 3 * STATE) for size in (2, 10))
    states = state_counts(many).states + state_counts(many).snapshots - state_counts(few).states - state_counts(few).snapshots
    rows = state_counts(many).rows - state_counts(few).rows
    assert rank_needs(many, 2).fixed_bytes - rank_needs(few, 2).fixed_bytes == 3 * (states * STATE + rows * STASH)


def test_a_plan_counts_states_beside_keys_and_values() -> None:
    servers, shared = [ServerConfig("here", {"rtx3090": 2})], DeviceConfig("here", "rtx3090", shared=True)
    partition = {"stages": 2, "draft_device": shared}
    keys = {"target": "qwen3.6-27b:awq", "draft": "qwen3-0.6b"}
    config, larger = (clustered(servers, {"two": partition}, state_memory=size, **keys) for size in ("1GiB", "2GiB"))
    made, more = plan(config), plan(larger)
    assert made.states == StateCounts(5, 261, 6) and more.states == StateCounts(11, 267, 12)
    for stage, other in zip(made.stages, more.stages, strict=True):
        recurrent = sum(layer % 4 != 3 for layer in stage.layers)
        state, stash = 4 * 48 * 128 * 128 + 10240 * 3 * 2, 4 * (16 * 128 + 48 * 129) + 10240 * 2
        assert stage.state_pool_bytes == recurrent * (13 * state + 263 * stash) and stage.fits
        assert stage.total_bytes == stage.fixed_bytes + stage.kv_bytes <= stage.memory_bytes
        assert other.state_pool_bytes > stage.state_pool_bytes
    assert more.kv.tokens < made.kv.tokens and made.draft is not None and made.draft.state_pool_bytes == 0
    (gpu, _), (other_gpu, _) = (host_needs(one, it)["here"].gpus for one, it in ((config, made), (larger, more)))
    assert other_gpu.least_bytes - gpu.least_bytes == more.stages[0].state_pool_bytes - made.stages[0].state_pool_bytes
    text = "\n".join(str(line) for line in plan_table(made).renderables)
    assert "5 of running requests, 6 after prefixes; rows in flight: 261" in text


def test_the_shape_without_files_has_the_tensors_of_transformers(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, Qwen3_5TextConfig

    for shape in (HYBRID, KNOWN_MODELS["qwen3.6-27b"]):
        assert isinstance(shape, Qwen35Shape)
        names = (
            "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
            "head_dim", "linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim",
            "linear_conv_kernel_dim",
        )  # fmt: skip
        stated = Qwen3_5TextConfig(**{name: getattr(shape, name) for name in names})
        assert [kind == "linear_attention" for kind in stated.layer_types] == [
            layer.cached.num_values == 0 for layer in shape.layers
        ]
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(stated)
        own = shape.embedding_tensors() | shape.norm_tensors() | shape.head_tensors()
        for layer in range(shape.num_hidden_layers):
            own |= shape.layer_tensors(layer)
        assert own == {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def test_too_little_memory_for_a_state_is_refused_before_anything_is_measured() -> None:
    tight = replace(spec(state_memory=1000, device="auto"), num_gpus=2)
    assert tight.measures_memory
    with pytest.raises(UserError, match="give a larger --state-memory"):
        check_kv_budget(tight)
    check_kv_budget(replace(spec(device="auto"), num_gpus=2))
