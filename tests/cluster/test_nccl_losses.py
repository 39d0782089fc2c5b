"""Stages that are lost where they transfer over NCCL, for which groups stand that hang or abort their process as it may."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.nccl_stand_in import aborts_on_loss, hangs_on_loss
from support.prepared_ranks import PreparedRanks
from support.processes import wait_until
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core import RankLost, SamplingParams
from pipedec.messages import PromptRequest
from pipedec.transport.rendezvous import MEETING_SECONDS

pytestmark = pytest.mark.usefixtures("leaves_nothing")

STAGES, VICTIM = 3, 2
REQUEST = PromptRequest(SENTENCES[0], True, "pipedec", SamplingParams(max_tokens=40, ignore_eos=True))


@pytest.mark.fast_cases("hangs")
@pytest.mark.parametrize("prepare", [hangs_on_loss, aborts_on_loss], ids=["hangs", "aborts"])
@pytest.mark.failure_case("S3a")
def test_a_lost_stage_costs_one_restart_and_nobody_hangs(pair: Pair, tmp_path: Path, prepare: Callable[[Path], None]) -> None:
    """Although the next stage waits for activations that never come, over a group that must not be aborted."""
    ranks = PreparedRanks("nccl", prepare, tmp_path)
    with LocalCluster(pair.spec(STAGES).replaced(transport=ranks, max_restarts=1, restart_window=600)) as cluster:
        assert cluster.scheduler is not None
        assert [rank.transport.name for rank in cluster.description().ranks] == ["gloo", *["nccl"] * STAGES]
        client, pids = Client(cluster.scheduler, cluster.check), cluster.pids
        alone = client.ask(REQUEST)
        os.kill(pids[VICTIM], signal.SIGUSR1)
        completion = client.ask(REQUEST)
        assert (completion.token_ids, completion.text) == (alone.token_ids, alone.text)
        assert completion.metrics.recoveries <= 1, "the stage may be lost before the request begins"
        status = cluster.scheduler.status()
        (recovery,) = status.recoveries
        assert VICTIM in recovery.lost and recovery.reason == f"rank {VICTIM} (stage {VICTIM}) was killed by SIGKILL"
        assert recovery.seconds is not None and recovery.seconds < MEETING_SECONDS / 4
        assert [rank for rank, pid in cluster.pids.items() if pid == pids[rank]] == [0], "rank 0 uses gloo"
        assert not list(tmp_path.glob("*.aborts"))
        os.kill(cluster.pids[1], signal.SIGKILL)
        with pytest.raises(RankLost, match=r"1 rank had been replaced within 600 s \(--max-restarts 1\)"):
            wait_until(cluster.check, 30)
