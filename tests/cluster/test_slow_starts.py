"""Ranks whose first forwards take long warm up before they serve. Nobody takes that for a stall; what hangs later is one."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from support.clusters import client_of, read_all, status_of
from support.obedient_ranks import SLOW_SECONDS, endless_file, obey_slowly
from support.prepared_ranks import PreparedRanks
from support.tiny_pair import SENTENCES, Pair

from pipedec.cluster.local import LocalCluster
from pipedec.core import SamplingParams
from pipedec.messages import PromptRequest

STAGES = 2
REQUEST = PromptRequest(SENTENCES[0], True, "pp", SamplingParams(max_tokens=20, ignore_eos=True))


@pytest.mark.usefixtures("leaves_nothing")
def test_what_is_slow_at_first_is_no_stall_and_what_hangs_later_is(pair: Pair, tmp_path: Path) -> None:
    """At the start, when a forward of answers side by side is captured, and in a rank that replaces another one."""
    reports, settings = list[tuple[int, str, int, int]](), {"stall_timeout": SLOW_SECONDS / 2, "max_model_len": 256}
    prepared = PreparedRanks("auto", obey_slowly, tmp_path)
    cluster = LocalCluster(pair.spec(STAGES).replaced(transport=prepared, **settings))
    cluster.start(lambda *report: reports.append(report))
    try:
        assert len(list(tmp_path.glob("*.was-slow"))) == STAGES + 1, "every rank was slow before it was ready"
        for rank in range(STAGES + 1):
            warming = [(done, total) for other, what, done, total in reports if (other, what) == (rank, "warming")]
            assert warming == [(done, warming[0][1]) for done in range(warming[0][1] + 1)] and len(warming) > 1
        client = client_of(cluster, silence_seconds=120)
        said = client.ask(REQUEST).token_ids
        (tmp_path / "wanted").touch()
        replies = [client.submit(REQUEST) for _ in range(3)]
        read_all(client, *replies)
        assert [reply.completed().token_ids for reply in replies] == [said] * 3
        assert (tmp_path / "captured").exists() and not status_of(cluster).recoveries
        os.kill(cluster.pids[2], signal.SIGKILL)
        assert client.ask(REQUEST).token_ids == said
        assert len(list(tmp_path.glob("*.was-slow"))) == STAGES + 2, "the replacement was slow, too"
        hanging = cluster.pids[1]
        os.kill(hanging, signal.SIGUSR2)
        assert client.ask(REQUEST).token_ids == said and endless_file(tmp_path, hanging).exists()
        killed, hung = (one.reason for one in status_of(cluster).recoveries)
        assert killed == "rank 2 (stage 2) was killed by SIGKILL"
        assert re.fullmatch(r"rank 1 \(stage 1\) computed one timestep for more than \d+ s \(--stall-timeout\)", hung)
    finally:
        cluster.stop()
