"""Ranks in actors of Ray: nodes that are processes of one machine, and the script that starts a run on them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.processes import marked_processes, wait_until
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.client.client import Client
from pipedec.cluster.state import RunningCluster, read_state
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.scheduler import ClientScheduler
from pipedec.verify.reference import Reference

pytestmark = [pytest.mark.usefixtures("leaves_nothing"), pytest.mark.seconds(300)]

ROOT = Path(__file__).resolve().parents[2]
LENGTH = 200
OBJECT_STORE_BYTES = 80 * 2**20  # about the smallest that Ray allows
KILL_ACTOR = "import ray, sys; ray.init(sys.argv[1], namespace='pipedec'); ray.kill(ray.get_actor(sys.argv[2]))"


class Nodes:
    """A Ray cluster with nodes of so many CPUs; the first one is its head."""

    def __init__(self, cluster: Any, folder: Path) -> None:
        self._cluster, self._log = cluster, folder / "ray.log"
        self.scripts: list[subprocess.Popen[bytes]] = []

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add(self, cpus: int) -> Any:
        return self._cluster.add_node(num_cpus=cpus, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False)

    def remove(self, node: Any) -> None:
        self._cluster.remove_node(node, allow_graceful=False)

    def start(self, *flags: str | Path) -> subprocess.Popen[bytes]:
        """The script, as launch/README.md says to run it."""
        command = [sys.executable, "launch/ray.py", "--ray-address", self.address, "--run", "on-ray", *map(str, flags)]
        with self._log.open("wb") as log:
            self.scripts.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT))
        return self.scripts[-1]

    def run(self, *flags: str | Path) -> ClientScheduler:
        """Start a run, and wait until it takes requests."""
        script, found = self.start(*flags), list[RunningCluster]()

        def is_up() -> bool:
            assert script.poll() is None, self.output()
            found.extend(state for state in [read_state("on-ray")] if state is not None)
            return bool(found)

        assert wait_until(is_up, 120), self.output()
        return found[0].connect()

    def output(self) -> str:
        return self._log.read_text(errors="replace")


@pytest.fixture
def nodes(leaves_nothing: None, state_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    made = Nodes(cluster := cluster_utils.Cluster(shutdown_at_exit=False), tmp_path)
    try:
        yield made
    finally:
        for script in made.scripts:
            script.kill()
            script.wait(10)
        cluster.shutdown()


@pytest.fixture
def expected(reference: Reference, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The answer of the target alone to the request of ``ask``."""
    return reference.generate(tokenizer("Hello")["input_ids"], LENGTH, ignore_eos=True)


def ask(scheduler: ClientScheduler, disturb: Callable[[], None]) -> tuple[int, ...] | list[int]:
    """The tokens of an answer in whose course ``disturb`` is called."""
    waiting = [disturb]

    def on_text(text: str) -> None:
        if waiting:
            waiting.pop()()

    request = PromptRequest("Hello", True, "pp", SamplingParams(max_tokens=LENGTH, ignore_eos=True))
    return Client(scheduler, silence_seconds=120).ask(request, on_text).token_ids


def kill_an_actor() -> None:
    """Kill the process that Ray has started last for a rank."""
    psutil.Process(max(pid for pid in marked_processes() if "ray::RankActor" in psutil.Process(pid).cmdline()[0])).kill()


def test_an_answer_goes_on_when_an_actor_is_killed_and_too_few_cpus_are_named(
    nodes: Nodes, pair: Pair, expected: list[int]
) -> None:
    nodes.add(1)
    nodes.add(2)
    refused = nodes.start(*pair.flags, "--placement-timeout", "1")
    assert refused.wait(120) == 2
    assert nodes.output() == (
        "pipedec: Ray found no place for 5 ranks of 1 CPU each (PACK) within 1 s: the cluster has 3 CPUs, 3 of them free: "
        "add nodes, or lower --stages\n"
    )
    scheduler = nodes.run(*pair.flags, "--stages", "2")
    assert ask(scheduler, kill_an_actor) == expected
    (recovery,) = scheduler.status().recoveries
    assert "was lost with its actor on " in recovery.reason and recovery.seconds is not None
    state = read_state("on-ray")
    scheduler.stop()
    assert nodes.scripts[-1].wait(60) == 0
    assert "Cluster on-ray is up. Next: pipedec submit" in nodes.output() and "Cluster stopped." in nodes.output()
    assert state is not None and state.redis_url.partition("@")[0].rpartition(":")[2] not in nodes.output()


@pytest.mark.slow
def test_answers_are_the_targets_when_ray_kills_actors_and_nodes_leave(nodes: Nodes, pair: Pair, expected: list[int]) -> None:
    """Four stages on three nodes. A node that comes takes the place of the one that is lost."""
    nodes.add(1)
    lost = nodes.add(2)
    nodes.add(2)

    def kill_by_ray() -> None:
        subprocess.run([sys.executable, "-c", KILL_ACTOR, nodes.address, "on-ray rank 3 (stage 3) #4"], check=True, timeout=60)

    def exchange_nodes() -> None:
        nodes.remove(lost)
        nodes.add(2)

    scheduler = nodes.run(*pair.flags, "--stages", "4")
    assert ask(scheduler, lambda: None) == expected
    assert ask(scheduler, kill_by_ray) == expected
    assert ask(scheduler, exchange_nodes) == expected
    assert len(scheduler.status().recoveries) >= 2
    nodes.scripts[-1].terminate()
    assert nodes.scripts[-1].wait(60) == 0
