"""The first answer of processes that have just started, within the time after which a rank counts as stuck."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.methods import METHOD_NAMES


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_a_cold_cluster_answers_without_a_restart(
    pair: Pair, device: str, record_property: Callable[[str, object], None]
) -> None:
    """The stall limit is the default one. Kernels are loaded, and graphs captured, at the latest by the first answers."""
    spec = pair.spec(3).replaced(device=device, max_restarts=0)
    began = time.monotonic()
    with LocalCluster(spec) as cluster:
        assert cluster.scheduler is not None
        record_property("start, s", round(time.monotonic() - began, 2))
        client = Client(cluster.scheduler, cluster.check, silence_seconds=60)
        for name, method in [*(("cold", method) for method in METHOD_NAMES), ("warm", "pp")]:
            request = PromptRequest(SENTENCES[1], True, method, SamplingParams(max_tokens=8, ignore_eos=True), trace=True)
            reply = client.follow(request)
            tasks = [event for event in reply.trace if event.rank >= 0 and "W" not in event.label]
            longest = max(tasks, key=lambda event: event.end_us - event.start_us)
            milliseconds = (longest.end_us - longest.start_us) / 1e3
            record_property(f"{method}, {name}: longest task", f"{milliseconds:.1f} ms, {longest.label} of rank {longest.rank}")
            ttft = reply.completed().metrics.ttft_seconds
            record_property(f"{method}, {name}: time to first token", "" if ttft is None else f"{1000 * ttft:.1f} ms")
        assert not cluster.scheduler.status().recoveries
        record_property("stall limit, s", spec.settings.cluster.stall_timeout or "of the plan")
