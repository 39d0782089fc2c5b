"""Clusters that are started from a cluster.yaml: nodes, their launcher, what goes wrong on hosts. All without sshd."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
from support.clusters import client_of, clustered
from support.processes import marked_processes, wait_until
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.client.client import Client
from pipedec.cluster.launched import LaunchedCluster
from pipedec.cluster.node import PROTOCOL, Node
from pipedec.cluster.node_link import node_command
from pipedec.cluster.node_run import LaunchedRun, NodeRun
from pipedec.cluster.nodes import Nodes
from pipedec.cluster.place import RankPlace
from pipedec.cluster.state import RunningCluster
from pipedec.config import ClusterConfig, DeviceConfig, RedisConfig, ServerConfig
from pipedec.config.cluster import LaunchConfig, cluster_to_json
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.messages.stats import Recovery
from pipedec.plan.placement import Placement, rank_places
from pipedec.scheduler import connect
from pipedec.verify.reference import Reference

pytestmark = pytest.mark.usefixtures("leaves_nothing")

PROMPT = "Natalia sold 12 clips in April."

# Stands in for ssh: runs the command here. Its hosts reach each other over loopback.
SSH_TO_HERE = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
export SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"
shift
exec sh -c "$1"
"""


def cluster_on(pair: Pair, *servers: ServerConfig, launch: LaunchConfig) -> ClusterConfig:
    """Two stages on processors, the draft on the first host."""
    partition = {"stages": 2, "draft_device": DeviceConfig(servers[0].host, "cpu")}
    models = {"target": pair.target, "draft": pair.draft, "bita": pair.bita}
    return clustered(servers, {"two": partition}, **models, max_model_len=512, launch=launch)


def on_localhost(pair: Pair, **launch: Any) -> ClusterConfig:
    return cluster_on(pair, ServerConfig("localhost", {"cpu": 3}), launch=LaunchConfig(**launch))


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes a program."""

    def write(name: str, text: str) -> Path:
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
        return tmp_path / name

    return write


@contextmanager
def node() -> Iterator[subprocess.Popen[bytes]]:
    """A node as the launcher starts it."""
    command = node_command(ServerConfig("localhost", {"cpu": 1}), LaunchConfig())
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None and process.stdout is not None
    with process.stdin, process.stdout:
        yield process
        process.kill()
        process.wait()


def order(process: subprocess.Popen[bytes], name: str, **contents: Any) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps({"order": name} | contents).encode() + b"\n")
    process.stdin.flush()


def news(process: subprocess.Popen[bytes]) -> dict[str, Any]:
    assert process.stdout is not None
    return json.loads(process.stdout.readline())  # type: ignore[no-any-return]


def test_a_command_for_a_host_is_quoted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIPEDEC_SSH", "ssh -F 'my config'")
    server = ServerConfig("server-1", {"cpu": 1}, ssh="me@10.0.0.1")
    *options, destination, script = node_command(server, LaunchConfig("/a 'python'", "/a dir"))
    assert options[:3] == ["ssh", "-F", "my config"] and "BatchMode=yes" in options and destination == "me@10.0.0.1"
    assert script == """cd '/a dir' || exit 101; exec '/a '"'"'python'"'"'' -m pipedec.cluster.node"""


def test_a_node_says_hello_before_it_has_orders_and_ends_with_its_input() -> None:
    """It takes along the Redis that it has started."""
    with node() as process:
        hello = news(process)
        assert (hello["news"], hello["protocol"], hello["pid"]) == ("hello", PROTOCOL, process.pid)
        assert hello["hostname"] == socket.gethostname() and hello["torch"] is not None
        order(process, "redis", port=None, password="it's secret", towards=[], interface=None)
        started = news(process)
        assert started["address"] == "127.0.0.1"
        url = RedisConfig(f"redis://127.0.0.1:{started['port']}/0", "it's secret").connection_url
        assert url is not None
        with connect(url) as client:
            pid = client.info("server")["process_id"]  # type: ignore[index]
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(10) == 0
        assert wait_until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie", 5)


def test_a_node_whose_host_lacks_a_part_says_so_before_any_rank_is_started(pair: Pair, tmp_path: Path) -> None:
    """Also where the host has only a spare."""
    target = Path(shutil.copytree(pair.target, tmp_path / "target"))
    (target / "model.safetensors").unlink()
    pair = replace(pair, target=target)
    servers = [ServerConfig("localhost", {"cpu": 3}), ServerConfig("spare", {"cpu": 1})]
    for host, num_spares in (("localhost", 0), ("spare", 1)):
        said: list[tuple[str, Any]] = []
        orders, sender = multiprocessing.Pipe(duplex=False)
        config = cluster_to_json(cluster_on(pair, *servers, launch=LaunchConfig()))
        run = LaunchedRun(config, "redis://127.0.0.1:1/0", "lost", None, num_spares)
        sender.send_bytes(json.dumps({"order": "join", "run": asdict(run), "host": host}).encode())
        sender.close()
        Node(orders, lambda news, said=said, **contents: said.append((news, contents)), threading.Event()).run()
        assert [news for news, _ in said] == ["hello", "failed"] and said[1][1]["is_mistake"]
        lacks = f"this host lacks model.safetensors of {target}: copy what is missing with `pipedec distribute`"
        assert said[1][1]["message"] == lacks


def test_ranks_that_start_later_are_told_the_weights_with_which_the_run_began(pair: Pair) -> None:
    class Processes:
        pids: ClassVar[dict[int, int]] = {1: 1, 2: 2}
        started: ClassVar[list[RankPlace]] = []

        def start(self, rank: int, serve: Any, run: LaunchedRun, place: RankPlace, placed: Placement) -> None:
            self.started.append(place)

    run = LaunchedRun(cluster_to_json(on_localhost(pair)), "redis://127.0.0.1:1/0", "told", None, 0)
    node = NodeRun(run, "localhost", Processes(), lambda news, **contents: None)  # type: ignore[arg-type]
    node.start_rank(1)
    node.digests = {"target": {"model.norm.weight": "f" * 64}}
    node.start_rank(2)
    assert [started.digests for started in Processes.started] == [{}, node.digests]


def test_a_node_without_a_launcher_ends_after_its_ranks(pair: Pair) -> None:
    """The connection to a launcher whose machine has vanished does not end by itself."""
    said: list[tuple[str, Any]] = []
    orders, sender = multiprocessing.Pipe(duplex=False)
    run = LaunchedRun(cluster_to_json(on_localhost(pair)), "redis://127.0.0.1:1/0", "lost", None, 0)
    for order in ({"order": "join", "run": asdict(run), "host": "localhost"}, {"order": "start", "rank": 0}):
        sender.send_bytes(json.dumps(order).encode())
    Node(orders, lambda news, **contents: said.append((news, contents)), threading.Event(), idle_seconds=0.1).run()
    assert [news for news, _ in said] == ["hello", "joined", "started", "ended"] and said[-1][1] == {"rank": 0, "status": 1}


def request(max_tokens: int, method: str = "pipedec") -> PromptRequest:
    return PromptRequest(PROMPT, True, method, SamplingParams(max_tokens=max_tokens, ignore_eos=True))


def check_answer(cluster: LaunchedCluster, reference: Reference, tokenizer: PreTrainedTokenizerBase) -> None:
    expected = reference.generate(tokenizer(PROMPT)["input_ids"], 16, ignore_eos=True)
    assert client_of(cluster).ask(request(16)).token_ids == expected


@pytest.mark.slow
def test_a_launched_cluster_says_what_transformers_says(
    pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    log, reports = tmp_path / "hosts.log", set()
    cluster = LaunchedCluster(on_localhost(pair, environment={"PIPEDEC_SEEN": "yes"}), log=log)
    cluster.start(lambda rank, what, done, total: reports.add((rank, what)))
    check_answer(cluster, reference, tokenizer)
    assert {(rank, "loading") for rank in range(3)} <= reports
    assert [(rank.rank, rank.host, rank.device) for rank in cluster.description().ranks] == [
        (rank, "localhost", "cpu") for rank in range(3)
    ]
    pids = cluster.pids
    assert sorted(pids) == [0, 1, 2]
    for pid in pids.values():
        assert {"PIPEDEC_SEEN": "yes", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}.items() <= psutil.Process(pid).environ().items()
    password = cluster.address.redis_url.partition("redis://:")[2].partition("@")[0]
    command_lines = [Path(f"/proc/{pid}/cmdline").read_text() for pid in marked_processes()]
    assert password and not any(password in line for line in command_lines)
    cluster.stop()
    assert not any(psutil.pid_exists(pid) for pid in pids.values()) and password not in log.read_text()


@pytest.mark.slow
def test_a_spare_takes_over_the_rank_of_a_host_that_is_lost(
    pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase, script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its node is killed, and its ranks with it, while they answer; afterwards a rank of the spare's host, which is replaced."""
    monkeypatch.setenv("PIPEDEC_SSH", str(script("ssh", SSH_TO_HERE)))
    counts = {"one": 2, "two": 1, "three": 1}
    servers = [ServerConfig(host, {"cpu": count}, hostname=socket.gethostname()) for host, count in counts.items()]
    expected = reference.generate(tokenizer(PROMPT)["input_ids"], 600, ignore_eos=True)
    recovered: list[Recovery] = []
    config = cluster_on(pair, *servers, launch=LaunchConfig()).for_partition(given={"max_model_len": 4096})
    with LaunchedCluster(config, spares=1) as cluster:
        cluster.on_recovery = recovered.append
        assert [place.host for place in cluster.places] == ["one", "one", "two"]
        assert cluster.scheduler is not None and cluster.nodes.hosts == ["one", "two", "three"]
        victims = [psutil.Process(cluster.pids[2]).parent().parent().pid]  # type: ignore[union-attr]
        assert "pipedec.cluster.node" in psutil.Process(victims[0]).cmdline()

        def kill(text: str) -> None:
            if victims:
                os.kill(victims.pop(), signal.SIGKILL)

        assert client_of(cluster).ask(request(600, "pp"), kill).token_ids == expected
        assert cluster.scheduler.places()[2] == "three" and not cluster.scheduler.nodes()["two"]
        assert wait_until(lambda: not cluster.check() and "two stopped answering" in [one.reason for one in recovered], 30)
        victims.append(cluster.pids[2])
        assert client_of(cluster).ask(request(600, "pp"), kill).token_ids == expected
        assert cluster.scheduler.places()[2] == "three"


@pytest.mark.slow
def test_a_node_that_is_killed_takes_its_ranks_along_and_is_named(pair: Pair) -> None:
    with LaunchedCluster(on_localhost(pair)) as cluster:
        pids = cluster.pids.values()
        node_pid = next(pid for pid in marked_processes() if "pipedec.cluster.node" in psutil.Process(pid).cmdline())
        os.kill(node_pid, signal.SIGKILL)
        assert wait_until(lambda: not set(pids) & marked_processes(), 5)
        with pytest.raises(PipedecError, match="localhost: the node ended with exit status -9"):
            cluster.wait()
        cluster.kill()


LAUNCHER = """
import sys
from pathlib import Path
from pipedec.cluster.launched import LaunchedCluster
from pipedec.config.cluster import cluster_from_json
cluster = LaunchedCluster(cluster_from_json(sys.stdin.readline()), run_id="without")
if sys.argv[1] == "up":
    cluster.start()
else:
    cluster.nodes.connect(None)
print("torch" in sys.modules, flush=True)
print(cluster.address.redis_url if sys.argv[1] == "up" else "", flush=True)
sys.stdin.readline()
"""


def launched_by_another(pair: Pair, moment: str) -> tuple[subprocess.Popen[bytes], str]:
    """A process that has got that far with launching a cluster, and the URL of its Redis if that is up."""
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, moment], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert launcher.stdin is not None and launcher.stdout is not None
    launcher.stdin.write(cluster_to_json(on_localhost(pair)).encode() + b"\n")
    launcher.stdin.flush()
    assert launcher.stdout.readline() == b"False\n"
    return launcher, launcher.stdout.readline().decode().strip()


def test_a_launcher_that_is_killed_before_the_cluster_is_up_leaves_nothing(pair: Pair) -> None:
    before = marked_processes()
    launcher, _ = launched_by_another(pair, "importing")
    assert wait_until(lambda: len(marked_processes() - before) > 2)
    launcher.kill()
    launcher.communicate()
    assert wait_until(lambda: not marked_processes() - before, 5)


@pytest.mark.slow
def test_a_cluster_goes_on_without_its_launcher(pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase) -> None:
    """Also its ranks are still replaced, and it ends with its run."""
    before = marked_processes()
    launcher, url = launched_by_another(pair, "up")
    launcher.kill()
    launcher.communicate()
    scheduler = RunningCluster(url, "without").connect()
    expected = reference.generate(tokenizer(PROMPT)["input_ids"], 16, ignore_eos=True)
    assert Client(scheduler, silence_seconds=60).ask(request(16)).token_ids == expected
    ranks = {pid for pid in marked_processes() - before if "spawn_main" not in psutil.Process(pid).cmdline()}
    assert ranks
    scheduler.stop()
    scheduler.client.close()
    assert wait_until(lambda: not marked_processes() - before, 20)


def refusal(config: ClusterConfig) -> str:
    """The one line with which a cluster does not start."""
    with pytest.raises(PipedecError) as refused:
        LaunchedCluster(config).start()
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_host_without_what_is_needed_is_named(pair: Pair, script: Any) -> None:
    assert refusal(on_localhost(pair, python="/no/python")) == (
        "localhost: there is no interpreter /no/python: set python: of this server, or of launch, in the file"
    )
    assert refusal(on_localhost(pair, directory="/no/directory")) == (
        "localhost: there is no directory /no/directory: create it, or correct launch.directory in the file"
    )
    bare = script("bare", f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    assert f"localhost: {bare} has no pipedec: install it there" in refusal(on_localhost(pair, python=str(bare)))
    hello = json.dumps({"news": "hello", "protocol": 0, "pipedec": "0.0.1", "torch": "2"})
    old = script("old", f"#!/bin/sh\necho Welcome\necho '{hello}'\nread order\n")
    assert f"localhost: {old} has pipedec 0.0.1 (protocol 0), but here it is" in refusal(on_localhost(pair, python=str(old)))
    broken = script("broken", "#!/bin/sh\necho it is broken >&2\nexit 7\n")
    assert refusal(on_localhost(pair, python=str(broken))) == "localhost: the node ended with exit status 7: it is broken"


def test_a_host_that_ssh_does_not_reach_is_named(pair: Pair, script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config = cluster_on(pair, ServerConfig("here", {"cpu": 3}, ssh="me@here"), launch=LaunchConfig())
    failing = script("ssh", "#!/bin/sh\necho 'ssh: connect to host here port 22: Connection refused' >&2\nexit 255\n")
    monkeypatch.setenv("PIPEDEC_SSH", str(failing))
    assert refusal(config) == (
        "here: ssh failed: connect to host here port 22: Connection refused: see that `ssh me@here` works by itself"
    )
    monkeypatch.setenv("PIPEDEC_SSH", "/no/ssh")
    assert refusal(config).startswith("cannot run /no/ssh (No such file or directory): install the client of OpenSSH")
    monkeypatch.setenv("PIPEDEC_SSH", str(script("ssh", "#!/bin/sh\nread order\nread end\n")))
    nodes = Nodes(config, rank_places(config))
    with pytest.raises(PipedecError, match=r"^here did not answer within 0 s: see `pipedec doctor`$"):
        nodes.connect(None, seconds=0.3)
    nodes.kill()


def test_redis_that_cannot_start_or_is_another_on_each_host_is_named(pair: Pair) -> None:
    config = on_localhost(pair)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        said = refusal(config.for_partition(given={"redis": {"host": "localhost", "port": port}}))
        assert said.startswith(f"localhost: port {port} is in use: choose another port")
    two = cluster_on(pair, *(ServerConfig(host, {"cpu": 2}) for host in ("one", "two")), launch=LaunchConfig())
    for url in ("redis://localhost:6379/0", "unix:///run/redis.sock"):
        said = refusal(two.for_partition(given={"redis": {"url": url}}))
        assert said == f"redis: {url} is another server on each host: give an address that all hosts reach"


def test_the_file_is_preferred_to_the_launching_shell(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_DEBUG": "INFO", "TORCH_NCCL_DESYNC_DEBUG": "1", "OTHER": "1"}
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    plain = ServerConfig("one", {"cpu": 2}, environment={"NCCL_DEBUG": "WARN", "B": "own"})
    config = cluster_on(
        pair, plain, ServerConfig("two", {"cpu": 1}, interface="eth0"), launch=LaunchConfig(environment={"B": "all's"})
    )
    nodes = Nodes(config, rank_places(config))
    assert nodes.environment("one") == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "GLOO_SOCKET_IFNAME": "eth7", "NCCL_DEBUG": "WARN", "TORCH_NCCL_DESYNC_DEBUG": "1",
        "B": "own",
    }  # fmt: skip
    assert nodes.environment("two") == {
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "NCCL_DEBUG": "INFO", "TORCH_NCCL_DESYNC_DEBUG": "1", "B": "all's",
    }  # fmt: skip


def test_ranks_in_messages_are_named_with_their_hosts(pair: Pair) -> None:
    cluster = LaunchedCluster(on_localhost(pair))
    assert cluster.with_hosts("rank 0: rank 2 (stage 2) stopped answering") == (
        "rank 0 on localhost: rank 2 (stage 2) on localhost stopped answering"
    )
    for message in ("rank 1 (stage 1) on localhost fails", "rank 12 is unknown", "rank 1 on localhost", "no rank"):
        assert cluster.with_hosts(message) == message


def test_a_shape_without_weights_is_refused_before_anything_starts(pair: Pair) -> None:
    with pytest.raises(UserError, match=r"draft: llama-3\.2-1b is a shape for planning and has no weights"):
        LaunchedCluster(on_localhost(pair), given={"draft": "llama-3.2-1b"}).start()
