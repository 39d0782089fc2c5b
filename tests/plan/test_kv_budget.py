"""The KV budget: what is reserved on every rank, and what is refused before anything is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import save_tiny_llama
from support.clusters import clustered
from support.tiny_pair import CONTEXT, DRAFT_LAYERS, Pair

from pipedec.config import ClusterConfig, DeviceConfig, ServerConfig, Settings
from pipedec.core.errors import UserError
from pipedec.engine.build import load_drafter, load_stage, resolve, resolve_partition
from pipedec.plan.budgets import kv_budget, kv_slots
from pipedec.plan.emulation import Emulation
from pipedec.plan.kv_memory import DEFAULT_BYTES, TREE_ROWS, KVBudget, RankBudget
from pipedec.plan.partition import plan
from pipedec.plan.spec import PipelineSpec

MIB = 2**20


def spec(pair: Pair, stages: int = 2, dtype: str = "float32", dispatch: str = "windows", **limits: object) -> PipelineSpec:
    return resolve(_settings(pair, stages=stages, dtype=dtype, dispatch=dispatch, **limits))


def _settings(pair: Pair, draft_dtype: str = "bfloat16", **others: object) -> Settings:
    return Settings.of(target=pair.target, draft=pair.draft, bita=pair.bita, draft_dtype=draft_dtype, device="cpu", **others)


def cluster(pair: Pair, device: str = "cpu", **settings: object) -> ClusterConfig:
    partition = {"stages": 2, "draft_device": DeviceConfig("here", device)}
    return clustered([ServerConfig("here", {device: 3})], {"two": partition}, target=pair.target, draft=pair.draft, **settings)


def test_the_rank_with_the_least_room_decides() -> None:
    budget = KVBudget([RankBudget(0, 10_000, 10), RankBudget(1, 10_000, 16), RankBudget(2, 9_000, 16)], 4096, 64, 2)
    assert (budget.scarcest.rank, budget.tokens) == (2, 560), "562 tokens in whole blocks of 16"
    assert replace(budget, block=256).tokens == 512
    ample = KVBudget([RankBudget(1, 2**60, 1)], 100, 3, 4)
    assert ample.tokens == 3 * 128 + 5 * TREE_ROWS, (
        "no more than requests can use: a context and a block each, and rows in flight"
    )
    assert budget.requests(100) == 560 // 112, "with its rows in flight a request takes seven blocks"


def test_bytes_are_counted_by_the_layers_and_the_dtype_of_every_rank(pair: Pair) -> None:
    """Eight layers on two stages, two in the draft, in 16 bits; two key-value heads of eight elements, keys and values."""
    assert kv_slots(spec(pair, kv_cache_memory=MIB)) == MIB // (4 * 2 * 2 * 8 * 4) // 16 * 16
    assert kv_slots(spec(pair, dtype="float64", kv_cache_memory=MIB)) == MIB // (4 * 2 * 2 * 8 * 8) // 16 * 16
    in_float64 = spec(pair, stages=8, dtype="float64", kv_cache_memory=MIB)
    assert kv_slots(in_float64) == MIB // (2 * 2 * 8 * 8) // 16 * 16, "the stages are scarcest, with a layer each"
    assert kv_slots(spec(pair, stages=8, kv_cache_memory=MIB)) == MIB // (DRAFT_LAYERS * 2 * 2 * 8 * 2) // 16 * 16
    undecided = resolve(_settings(pair, "auto", stages=8, kv_cache_memory=MIB))
    assert kv_slots(undecided) == MIB // (DRAFT_LAYERS * 2 * 2 * 8 * 4) // 16 * 16, "float32: only rank 0 knows its processor"


def test_rank_0_manages_what_every_pool_has(pair: Pair) -> None:
    small = spec(pair, kv_cache_memory=MIB)
    assert small.kv_block == 16, "on a processor"
    assert kv_slots(spec(pair, max_num_seqs=3)) == 3 * (CONTEXT + 16) + 3 * TREE_ROWS, "by default enough for all requests"
    assert small.replaced(device="cuda").kv_block == 256, "also on a host that has no GPU"


def test_prefixes_are_shared_unless_somebody_objects(pair: Pair, tmp_path: Path) -> None:
    assert spec(pair).shares_prefixes
    assert not spec(pair, prefix_cache=False).shares_prefixes
    assert spec(pair, dispatch="tasks").shares_prefixes
    for kind, settings in (("dynamic", {"factor": 2.0}), ("llama3", _LLAMA3)):
        rope = {"rope_type": kind, "rope_theta": 10000.0, **settings}
        save_tiny_llama(tmp_path / kind, rope_parameters=rope)
        made = resolve(Settings.of(target=tmp_path / kind, draft="none", stages=2, device="cpu"))
        assert made.shares_prefixes == (kind == "llama3"), "keys depend on the length of the whole prompt"


_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (
            {"kv_cache_memory": 65_536},
            r"^rank 1 \(stage 1\) has 64\.0 KiB for keys and values, 128 tokens of 512 bytes, but a few hundred tokens need "
            r"128\.0 KiB: give a larger --kv-cache-memory$",
        ),
        (
            {"kv_cache_memory": 2**18, "max_model_len": 1000},
            r"^rank 1 \(stage 1\) has 256\.0 KiB for keys and values, 512 tokens of 512 bytes, but one request of 1,000 tokens "
            r"needs 536\.0 KiB: give a larger --kv-cache-memory, or a smaller --max-model-len$",
        ),
        ({"kv_cache_memory": 0}, r"^kv_cache_memory: must be a string \(not empty\) or an integer \(at least 1\), not 0$"),
    ],
)
def test_a_budget_that_cannot_work_is_refused_with_the_numbers(pair: Pair, limits: dict[str, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        spec(pair, **limits)


def test_a_cluster_file_gives_each_rank_what_its_device_leaves(pair: Pair) -> None:
    config = cluster(pair, "rtx3090", max_num_seqs=100_000 // 2)
    made = resolve_partition(config.for_partition(given={"device": "cpu"}))
    planned = plan(config)
    assert planned.draft is not None and made.kv_room == (planned.draft.kv_room, *(one.kv_room for one in planned.stages))
    assert kv_slots(made) == min(one.kv_room // one.kv_token_bytes for one in planned.stages) // 16 * 16
    assert resolve_partition(config).kv_block == 256, "a rank may use CUDA"


def test_ranks_that_share_a_device_have_room_for_the_same_tokens(pair: Pair) -> None:
    shared = {"stages": 2, "draft_device": DeviceConfig("here", "rtx3090", shared=True)}
    models = {"target": pair.target, "draft": pair.draft, "dtype": "float32", "draft_dtype": "float32"}
    config = clustered([ServerConfig("here", {"rtx3090": 2})], {"two": shared}, **models, max_num_seqs=65_536, max_model_len=512)
    made, planned = resolve_partition(config), plan(config)
    assert made.places is not None and made.kv_room is not None and made.places[0] == made.places[2] != made.places[1]
    draft, _, last = kv_budget(made).ranks
    assert (draft.token_bytes, last.token_bytes) == (DRAFT_LAYERS * 128, len(planned.stages[1].layers) * 128)
    assert made.kv_room[0] + made.kv_room[2] < made.kv_room[1], "one card less what is fixed twice"
    assert abs(draft.tokens - last.tokens) <= 1 and kv_slots(made) == min(draft.tokens, last.tokens) // 256 * 256


def test_a_cluster_file_names_its_budget(pair: Pair) -> None:
    made = resolve_partition(cluster(pair, max_num_seqs=50_000))
    assert set(made.kv_room or ()) == {DEFAULT_BYTES} and kv_slots(made) == DEFAULT_BYTES // 512, "a processor's is nominal"
    made = resolve_partition(cluster(pair, kv_cache_memory="4MiB", prefix_cache=False))
    assert (kv_slots(made), made.shares_prefixes) == (4 * MIB // 512, False)
    with pytest.raises(UserError, match=r"one request of 4,096 tokens needs 2\.0 MiB: give a larger --kv-cache-memory"):
        resolve_partition(cluster(pair, kv_cache_memory="1MiB"))


def test_a_plan_says_that_its_budget_is_too_large_or_too_small(pair: Pair) -> None:
    huge = plan(cluster(pair, "rtx3090", kv_cache_memory="30GB", max_num_seqs=65_536))
    assert (
        "the draft on here rtx3090 needs 15.5 GB" not in huge.problems[0]
        and "stage 1 on here rtx3090 needs 30." in huge.problems[0]
    )
    small = plan(cluster(pair, "rtx3090", kv_cache_memory="1MiB"))
    assert len(small.problems) == 1 and "one request of 4,096 tokens needs" in small.problems[0]


def test_an_emulation_has_the_memory_of_the_devices_it_emulates(pair: Pair) -> None:
    real = spec(pair)
    timing = plan(cluster(pair)).stages[0].timing
    assert kv_slots(replace(real, emulation=Emulation("test", 1.0, None, (timing, timing), kv_tokens=1000))) == 992
    assert kv_slots(replace(real, emulation=Emulation("test", 1.0, None, (timing, timing)))) == kv_slots(real)


def test_every_rank_gets_the_same_slots(pair: Pair) -> None:
    small, device = spec(pair, kv_cache_memory=MIB), torch.device("cpu")
    ranks = load_drafter(small, device), load_stage(small, 1, device), load_stage(small, 2, device)
    assert [rank.cache_slots for rank in ranks] == [2048] * 3
