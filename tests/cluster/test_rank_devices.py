"""Which rank computes on which GPU, and when stages ask for NCCL. There are no GPUs here: torch is told how many to see."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from tiny_pair import Pair

from pipedec.cluster import rank as rank_module
from pipedec.cluster.rank import RankPlace
from pipedec.core import UserError
from pipedec.engine.spec import PipelineSpec
from pipedec.transport.torch_distributed import Rendezvous

SeeGpus = Callable[[int], None]


@pytest.fixture
def see_gpus(monkeypatch: pytest.MonkeyPatch) -> SeeGpus:
    def see(count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)

    return see


def spec(pair: Pair, has_draft: bool, stages: int = 3) -> PipelineSpec:
    return replace(pair.spec(stages, draft=None if has_draft else "none"), device="auto")


def test_rank_0_without_a_draft_needs_no_gpu(pair: Pair, see_gpus: SeeGpus) -> None:
    without = replace(spec(pair, has_draft=False), device="cuda")
    see_gpus(0)
    assert without.rank_device(0, 0) == torch.device("cpu")
    with pytest.raises(UserError, match="torch sees no GPU here"):
        without.rank_device(1, 0)
    see_gpus(4)
    assert without.rank_device(0, 0) == torch.device("cpu")
    assert spec(pair, has_draft=True).rank_device(0, 0) == torch.device("cuda", 0)


@pytest.mark.parametrize("gpus", [3, 4, 8])
def test_stages_beside_rank_0_without_a_draft_have_a_gpu_each(pair: Pair, see_gpus: SeeGpus, gpus: int) -> None:
    see_gpus(gpus)
    devices = {spec(pair, has_draft=False).rank_device(stage, stage) for stage in (1, 2, 3)}
    assert len(devices) == 3
    assert {device.type for device in devices} == {"cuda"}


@pytest.mark.parametrize(
    ("has_draft", "gpus", "ranks", "backend"),
    [
        (False, 3, range(4), "nccl"),
        (False, 2, range(4), "gloo"),
        (True, 4, range(4), "nccl"),
        (True, 3, range(4), "gloo"),
        (False, 2, range(2, 4), "nccl"),  # a host without rank 0: all of its ranks are stages
        (False, 1, range(2, 4), "gloo"),
        (False, 0, range(2, 4), "gloo"),
    ],
)
def test_all_stages_of_a_host_choose_the_same_transport(
    pair: Pair, see_gpus: SeeGpus, monkeypatch: pytest.MonkeyPatch, has_draft: bool, gpus: int, ranks: range, backend: str
) -> None:
    chosen = {}

    def note(backend: str, rendezvous: Rendezvous, *rest: object) -> None:
        chosen[rendezvous.rank] = backend

    monkeypatch.setattr(rank_module, "TorchTransport", note)
    see_gpus(gpus)
    made = spec(pair, has_draft)
    for local_rank, rank in enumerate(ranks):
        place = RankPlace(rank, 4, local_rank, len(ranks), "file:///nowhere/meeting")
        rank_module._meet(place, made, made.rank_device(rank, local_rank))
    assert {chosen[rank] for rank in ranks if rank > 0} == {backend}
