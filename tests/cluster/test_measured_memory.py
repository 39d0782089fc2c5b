"""Ranks in real processes that measure the memory of GPUs, which a test makes up."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from support.prepared_ranks import PreparedRanks
from support.pretended_gpus import TOTAL_BYTES, free_file, pretend
from support.processes import wait_until
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import RankLost, SamplingParams
from pipedec.messages import PromptRequest
from pipedec.plan.spec import PipelineSpec

REQUEST = PromptRequest(SENTENCES[0], True, "pp", SamplingParams(max_tokens=12, ignore_eos=True))
ROOM = 8_000_000  # bytes for keys and values of the rank with the largest weights


@pytest.fixture
def spec(pair: Pair, tmp_path: Path) -> PipelineSpec:
    made = replace(pair.spec(2), num_gpus=2).replaced(device="auto", max_num_seqs=65_536)
    return made.replaced(transport=PreparedRanks("gloo", pretend, tmp_path), max_restarts=3)


@pytest.fixture
def cluster(spec: PipelineSpec, tmp_path: Path) -> Iterator[LocalCluster]:
    free_file(tmp_path).write_text(str(TOTAL_BYTES // 10 + largest_needs(spec) + ROOM))
    with LocalCluster(spec) as running:
        yield running


def largest_needs(spec: PipelineSpec) -> int:
    return max(spec.needs(rank).fixed_bytes for rank in range(3))


def answer(cluster: LocalCluster) -> tuple[int, ...]:
    assert cluster.scheduler is not None
    return tuple(Client(cluster.scheduler, cluster.check).ask(REQUEST).token_ids)


@pytest.mark.usefixtures("leaves_nothing")
def test_the_slots_of_the_first_epoch_are_those_of_a_replaced_rank(
    cluster: LocalCluster, spec: PipelineSpec, tmp_path: Path
) -> None:
    """Though its GPU could hold more by then."""
    assert cluster.scheduler is not None
    slots = cluster.description().kv_slots
    assert slots == ROOM // 512 // 256 * 256 and len(list(tmp_path.glob("*.asked"))) == 3
    first = answer(cluster)
    free_file(tmp_path).write_text(str(TOTAL_BYTES))
    pids = cluster.pids
    os.kill(pids[1], signal.SIGKILL)
    assert wait_until(lambda: cluster.pids[1] != pids[1], 60)
    assert answer(cluster) == first
    assert cluster.description().kv_slots == slots
    assert wait_until(lambda: (stats := cluster.scheduler.status().stats) is not None and stats.kv.capacity == slots)
    asked = {int(file.stem) for file in tmp_path.glob("*.asked")}
    assert asked == {*pids.values(), cluster.pids[1]}, "those that are left have loaded, and do not ask again"


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_ranks_without_memory_do_not_load(spec: PipelineSpec, tmp_path: Path) -> None:
    free_file(tmp_path).write_text(str(TOTAL_BYTES // 2))
    huge = spec.replaced(kv_cache_memory="3GB")
    with (
        pytest.raises(RankLost, match=r"on \S+ cannot load: .* other processes hold 1\.[67] GB, .*: end them, "),
        LocalCluster(huge),
    ):
        pass
