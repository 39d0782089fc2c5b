"""Somebody watches while ranks die: the feed goes on in the next epoch, and the answer that it shows is the whole one."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
from support.processes import wait_until
from support.tiny_pair import SENTENCES, Pair

from pipedec.client.client import Client
from pipedec.client.running import Running
from pipedec.cluster.local import LocalCluster
from pipedec.core import SamplingParams
from pipedec.messages import PromptRequest
from pipedec.scheduler import ClientScheduler, connect

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing")]
REQUEST = PromptRequest(SENTENCES[0], True, "pipedec", SamplingParams(max_tokens=120, ignore_eos=True))


class Watching:
    """A reader of a run's feed, in a thread."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.frames: list[dict[str, Any]] = []
        self._ends = False
        address = cluster.address
        self._scheduler = ClientScheduler(connect(address.redis_url), address.run_id, cluster.topology)
        self._feed = Running.of(self._scheduler, address.run_id).client.live()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert wait_until(lambda: self.frames, 60)

    def _read(self) -> None:
        for frame in self._feed:
            self.frames.append(frame)
            if self._ends:
                break

    def end(self) -> None:
        self._ends = True
        self._thread.join(60)
        self._scheduler.client.close()

    @property
    def text(self) -> str:
        """Of the only request, as a viewer has it: an opening tells what was said before."""
        text = ""
        for frame in list(self.frames):
            if frame["k"] == "open":
                text = frame["said"]
            text += "".join(verdict["text"] for verdict in frame.get("out", ()))
        return text


@pytest.mark.parametrize("rank", [0, 2])
def test_the_feed_goes_on_when_a_rank_is_killed(pair: Pair, rank: int) -> None:
    with LocalCluster(pair.spec(2)) as cluster:
        assert cluster.scheduler is not None
        client, watching = Client(cluster.scheduler, cluster.check), Watching(cluster)
        killed = threading.Event()

        def kill(text: str) -> None:
            if not killed.is_set():
                killed.set()
                os.kill(cluster.pids[rank], signal.SIGKILL)

        said = client.ask(REQUEST, kill).text
        assert wait_until(lambda: watching.text.rstrip("\ufffd") == said.rstrip("\ufffd"), 60), (watching.text, said)
        watching.end()
        epochs = [frame["epoch"] for frame in watching.frames if frame["k"] == "run"]
        assert epochs[-1] == 1
        assert [one["lost"] for one in watching.frames[-1].get("recoveries", [])] in ([], [[rank]])
