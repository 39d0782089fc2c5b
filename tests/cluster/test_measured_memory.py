"""Ranks in real processes that measure the memory of GPUs, which a test makes up."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from support.clusters import client_of, status_of
from support.prepared_ranks import PreparedRanks
from support.pretended_gpus import TOTAL_BYTES, free_file, pretend
from support.processes import wait_until
from support.tiny_pair import SENTENCES, Pair

from pipedec.cluster.local import LocalCluster
from pipedec.core import SamplingParams
from pipedec.messages import PromptRequest

REQUEST = PromptRequest(SENTENCES[0], True, "pp", SamplingParams(max_tokens=12, ignore_eos=True))
ROOM = 8_000_000  # bytes for keys and values of the rank with the largest weights


@pytest.mark.usefixtures("leaves_nothing")
def test_the_slots_of_the_first_epoch_are_those_of_a_replaced_rank(pair: Pair, tmp_path: Path) -> None:
    """Though its GPU could hold more by then."""
    spec = replace(pair.spec(2), num_gpus=2).replaced(device="auto", max_num_seqs=65_536)
    spec = spec.replaced(transport=PreparedRanks("gloo", pretend, tmp_path), max_restarts=3)
    largest = max(spec.needs(rank).fixed_bytes for rank in range(3))
    free_file(tmp_path).write_text(str(TOTAL_BYTES // 10 + largest + ROOM))
    with LocalCluster(spec) as cluster:
        slots = cluster.description().kv_slots
        assert slots == ROOM // 512 // 256 * 256 and len(list(tmp_path.glob("*.asked"))) == 3
        first = client_of(cluster).ask(REQUEST).token_ids
        free_file(tmp_path).write_text(str(TOTAL_BYTES))
        pids = cluster.pids
        os.kill(pids[1], signal.SIGKILL)
        assert wait_until(lambda: cluster.pids[1] != pids[1], 60)
        assert client_of(cluster).ask(REQUEST).token_ids == first
        assert cluster.description().kv_slots == slots
        assert wait_until(lambda: (stats := status_of(cluster).stats) is not None and stats.kv.capacity == slots)
        asked = {int(file.stem) for file in tmp_path.glob("*.asked")}
        assert asked == {*pids.values(), cluster.pids[1]}, "those that are left have loaded, and do not ask again"
