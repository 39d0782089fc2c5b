"""Which rank computes on which GPU, and when stages ask for NCCL, by the number of GPUs of a host."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.tiny_pair import Pair

from pipedec.cluster.place import RankPlace
from pipedec.cluster.rank import chosen_backend
from pipedec.core.errors import UserError
from pipedec.engine.devices import rank_device
from pipedec.messages.run import Choice
from pipedec.plan.placement import Placement
from pipedec.plan.spec import PipelineSpec


def spec(pair: Pair, has_draft: bool, stages: int = 3) -> PipelineSpec:
    return pair.spec(stages, draft=None if has_draft else "none").replaced(device="auto")


def test_rank_0_without_a_draft_needs_no_gpu(pair: Pair) -> None:
    without = spec(pair, has_draft=False).replaced(device="cuda")
    assert rank_device(without, 0, 0, gpus=0) == torch.device("cpu")
    with pytest.raises(UserError, match="torch sees no GPU here"):
        rank_device(without, 1, 0, gpus=0)
    assert rank_device(without, 0, 0, gpus=4) == torch.device("cpu")
    assert rank_device(spec(pair, has_draft=True), 0, 0, gpus=4) == torch.device("cuda", 0)


def test_a_pipeline_on_the_cpu_uses_no_gpu(pair: Pair) -> None:
    on_cpu = spec(pair, has_draft=True).replaced(device="cpu")
    assert {rank_device(on_cpu, rank, rank, gpus=4) for rank in range(4)} == {torch.device("cpu")}
    assert chosen_backend(RankPlace(1, 4, 1, 4), on_cpu, gpus=4) == Choice("gloo", "NCCL needs GPUs")


def test_stages_beside_rank_0_without_a_draft_have_a_gpu_each(pair: Pair) -> None:
    for gpus in (3, 4, 8):
        devices = {rank_device(spec(pair, has_draft=False), stage, stage, gpus) for stage in (1, 2, 3)}
        assert len(devices) == 3 and {device.type for device in devices} == {"cuda"}


@pytest.mark.parametrize(
    ("has_draft", "gpus", "ranks", "backend"),
    [
        (False, 3, range(4), "nccl"),
        (False, 2, range(4), "gloo"),
        (True, 4, range(4), "nccl"),
        (True, 3, range(4), "nccl"),  # rank 0 and stage 3 share a GPU
        (True, 2, range(4), "gloo"),
        (False, 2, range(2, 4), "nccl"),  # a host without rank 0: all of its ranks are stages
        (False, 1, range(2, 4), "gloo"),
        (False, 0, range(2, 4), "gloo"),
        (True, 1, range(2, 3), "nccl"),  # a rank that sees only its own GPU, as in an actor of Ray
    ],
)
def test_all_stages_of_a_host_choose_the_same_transport(
    pair: Pair, has_draft: bool, gpus: int, ranks: range, backend: str
) -> None:
    made = spec(pair, has_draft)
    places = [RankPlace(rank, 4, local_rank, len(ranks)) for local_rank, rank in enumerate(ranks)]
    assert {chosen_backend(place, made, gpus).name for place in places if place.rank > 0} == {backend}


def test_stages_keep_nccl_where_rank_0_shares_the_device_of_one(pair: Pair) -> None:
    """Two hosts of two GPUs: rank 0 computes on that of stage 4. What it sends goes through host memory anyway."""
    places = tuple(Placement(host, "rtx3090", index) for host in ("a", "b") for index in (0, 1))
    planned = replace(spec(pair, has_draft=True, stages=4), places=(places[-1], *places))
    on_b = [RankPlace(rank, 5, local_rank, 3, host="b") for local_rank, rank in enumerate((0, 3, 4))]
    assert [rank_device(planned, place.rank, place.local_rank, gpus=2).index for place in on_b] == [1, 0, 1]
    assert {chosen_backend(place, planned, gpus=2) for place in on_b[1:]} == {Choice("nccl", "every stage has a GPU of its own")}
