"""What a GPU's memory suffices for, and what happens if it does not: with a GPU that a test makes up."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.checkpoints import save_tiny
from support.clock import Clock
from support.tiny_pair import Pair

from pipedec.config import Settings
from pipedec.core.errors import UserError
from pipedec.engine.devices import allocated, measured_tokens, with_measured_memory
from pipedec.families import model_by_name
from pipedec.model import StageModel
from pipedec.plan.budgets import check_kv_budget, kv_budget, kv_slots, rank_needs
from pipedec.plan.costs import CONTEXT_BYTES, ModelCosts
from pipedec.plan.kv_memory import GpuMemory, RankNeeds, tokens_beside
from pipedec.plan.spec import PipelineSpec

GPU = torch.device("cuda", 1)
GB = 10**9
TOTAL = 4 * GB


def on_gpus(pair: Pair, **settings: object) -> PipelineSpec:
    """A spec as on a machine with GPUs."""
    return replace(pair.spec(2), num_gpus=2).replaced(device="auto", **settings)


def gpu(*free: int) -> Callable[[torch.device], GpuMemory]:
    """A GPU of 4 GB of which so much is free, one time after the other."""
    left: Iterator[int] = iter(free)

    def ask(device: torch.device) -> GpuMemory:
        assert device == GPU
        return GpuMemory(next(left), TOTAL)

    return ask


def test_ranks_on_one_gpu_have_the_same_tokens_of_what_others_leave() -> None:
    assert [GpuMemory(free, 1000).usable(0.9) for free in (1000, 400, 50)] == [900, 300, -50]
    one, other = RankNeeds(300, 2), RankNeeds(100, 6)
    assert tokens_beside(1000, [one]) == 350
    assert tokens_beside(1000, [one, other]) == 75
    assert tokens_beside(300, [one, other]) < 0


def test_tokens_are_what_weights_and_workspace_leave(pair: Pair) -> None:
    spec = on_gpus(pair, gpu_memory_utilization=0.8)
    needs = [rank_needs(spec, rank) for rank in (0, 1, 2)]
    token_bytes = 2 * 2 * 8 * 4
    assert [one.token_bytes for one in needs] == [2 * token_bytes, 4 * token_bytes, 4 * token_bytes]
    taken = 500_000_000
    found = measured_tokens(spec, [1], GPU, "it", free=gpu(TOTAL - taken))
    assert found == (8 * TOTAL // 10 - taken - needs[1].fixed_bytes) // needs[1].token_bytes
    beside = measured_tokens(spec, [0, 1], GPU, "they", free=gpu(TOTAL - taken))
    assert beside == (8 * TOTAL // 10 - taken - needs[0].fixed_bytes - needs[1].fixed_bytes) // (6 * token_bytes)


@pytest.mark.parametrize(
    ("family", "is_tied", "quantize"), [("llama", True, None), ("qwen3", False, "int8"), ("qwen2", False, "int4")]
)
def test_weights_are_counted_as_a_rank_loads_them(tmp_path: Path, family: str, is_tied: bool, quantize: str | None) -> None:
    save_tiny(family, tmp_path, hidden=256, head_dim=16, vocab=512, tie_word_embeddings=is_tied)
    layers = ((0, 3), (3, 4))
    spec = PipelineSpec(Settings.of(target=str(tmp_path), draft="none", stages=2, quantize=quantize, dtype="float32"), layers)
    costs = ModelCosts(model_by_name(str(tmp_path)), spec.weights, spec.knee, 0, 2)
    for rank, (start, stop) in enumerate(layers, start=1):
        needs = rank_needs(spec, rank)
        loaded = StageModel.load(tmp_path, range(start, stop), torch.float32, "cpu", quantize=quantize).stack.num_bytes
        counted = needs.fixed_bytes - costs.rank_bytes - spec.kv_block * needs.token_bytes
        assert counted == pytest.approx(loaded, rel=0.03 if quantize else 0.001)


def test_too_little_memory_is_told_before_anything_is_loaded(pair: Pair) -> None:
    spec = on_gpus(pair)
    with pytest.raises(UserError) as refused:
        measured_tokens(spec, [1], GPU, "rank 1 (stage 1) on here", free=gpu(GB // 2), patience_seconds=0)
    message = str(refused.value)
    assert message.startswith("rank 1 (stage 1) on here cannot load: weights, workspace, and keys and values of 256 tokens need ")
    assert message.endswith(
        "but GPU #1 has 0.5 GB free of 4.0 GB, other processes hold 3.1 GB, and of that may be used 0.1 GB "
        "(--gpu-memory-utilization 0.9): end them, use more stages, quantize, or lower --max-model-len"
    )
    free = TOTAL - CONTEXT_BYTES
    with pytest.raises(UserError, match=r"has 3\.6 GB free of 4\.0 GB, and of that may be used 3\.2 GB .*: use more stages"):
        measured_tokens(spec, [1], GPU, "it", slots=10**9, free=gpu(free), patience_seconds=0)


def test_memory_that_is_freed_late_is_waited_for(pair: Pair) -> None:
    spec = on_gpus(pair)
    assert measured_tokens(spec, [1], GPU, "it", free=gpu(0, GB // 2, TOTAL)) > 256
    assert measured_tokens(spec, [1], GPU, "it", slots=300, free=gpu(0, TOTAL)) > 300


def test_a_pipeline_in_one_process_measures_its_device(pair: Pair) -> None:
    spec = on_gpus(pair, max_model_len=200, max_num_seqs=1024)
    measured = with_measured_memory(spec, GPU, free=gpu(TOTAL))
    needs = [rank_needs(spec, rank) for rank in (0, 1, 2)]
    room = 9 * TOTAL // 10 - sum(one.fixed_bytes for one in needs)
    expected = min(room // sum(one.token_bytes for one in needs), kv_budget(spec).usable) // 256 * 256
    assert kv_slots(measured) == expected
    assert with_measured_memory(spec, torch.device("cpu"), free=gpu()) is spec
    given = spec.replaced(kv_cache_memory="1MiB")
    assert with_measured_memory(given, GPU, free=gpu()) is given, "somebody has said how much"


def test_without_a_plan_nothing_is_refused_that_will_be_measured(pair: Pair) -> None:
    """The default for processors holds no such request."""
    long = on_gpus(pair, max_model_len=10**7)
    check_kv_budget(long)
    with pytest.raises(UserError, match="give a larger --kv-cache-memory"):
        check_kv_budget(long.replaced(device="cpu"))


class Loads:
    """Fails as torch does where a GPU's memory is full, so many times, with something half loaded."""

    def __init__(self, failures: int) -> None:
        self.failures, self.calls = failures, 0
        self.half_loaded: Sequence[weakref.ref[torch.Tensor]] = []

    def __call__(self) -> str:
        assert all(one() is None for one in self.half_loaded), "what was loaded before is freed"
        self.calls += 1
        weights = torch.ones(10)
        self.half_loaded = [*self.half_loaded, weakref.ref(weights)]
        if self.calls <= self.failures:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.\nGPU 0 has a total capacity …")
        return "loaded"


def test_an_allocation_is_tried_again_while_a_killed_rank_still_holds_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it fails after minutes of loading."""
    clock, loads = Clock(monkeypatch), Loads(1)

    def load() -> str:
        clock.advance(300)
        return loads()

    assert allocated(load, "rank 1 (stage 1) on here") == "loaded" and loads.calls == 2


def test_an_allocation_that_fails_for_long_is_told_in_one_line() -> None:
    with pytest.raises(UserError) as refused:
        allocated(Loads(10**9), "rank 1 (stage 1) on here", patience_seconds=0.3)
    assert str(refused.value) == (
        "rank 1 (stage 1) on here cannot load (CUDA out of memory. Tried to allocate 1.00 GiB.): end other processes on its GPU, "
        "lower --gpu-memory-utilization or --kv-cache-memory, or use more stages"
    )
