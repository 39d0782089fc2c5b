"""Ranks started by torchrun: two agents that meet on one machine as two hosts would, and the flags of the rank module."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
import redis
from support.hub_server import running_hub
from support.processes import wait_until
from support.tiny_pair import CONTEXT, TARGET_LAYERS, Pair
from transformers import PreTrainedTokenizerBase

from pipedec.client.client import Client
from pipedec.cluster.place import RankPlace, RunAddress
from pipedec.cluster.state import RunningCluster
from pipedec.cluster.torchrun import TorchrunJob
from pipedec.config import load_cluster
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.sampling import SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.methods import LayerTreeOptions
from pipedec.plan.partition import plan
from pipedec.plan.spec import PipelineSpec
from pipedec.scheduler import EmbeddedRedis, connect
from pipedec.verify.reference import Reference

pytestmark = pytest.mark.usefixtures("leaves_nothing")

START_SECONDS = 90.0


@dataclass
class Agents:
    """Two torchrun agents of two ranks each, and the Redis between them."""

    server: EmbeddedRedis
    client: redis.Redis
    logs: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, *flags: str, run: str = "two-hosts", restarts: int = 0) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "PIPEDEC_REDIS_URL": self.server.url,
        }  # fmt: skip
        for node in (0, 1):
            command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
            command += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port)]
            command += ["--max-restarts", str(restarts), "-m", "--", "pipedec.cluster.torchrun", "--run", run, *flags]
            with (self.logs / f"{node}.log").open("wb") as log:
                self.processes.append(
                    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
                )

    def wait_until_up(self, run: str = "two-hosts") -> RunningCluster:
        running = RunningCluster(self.server.url, run)

        def is_up() -> bool:
            assert all(process.poll() is None for process in self.processes), self.output()
            return self.client.hget(f"pipedec:{{{run}}}:run", "state") == b"up"

        assert wait_until(is_up, START_SECONDS), self.output()
        return running

    def statuses(self, seconds: float) -> list[int]:
        return [process.wait(seconds) for process in self.processes]

    def kill(self) -> None:
        """Kill the agents, with which their ranks die."""
        for process in self.processes:
            process.kill()
            process.wait(10)
        self.processes.clear()

    def output(self) -> str:
        return "".join((self.logs / f"{node}.log").read_text() for node in range(len(self.processes)))

    def rank_pid(self, rank: int) -> int:
        """torchrun gives the ranks 2·node and 2·node + 1 to its node."""
        children = psutil.Process(self.processes[rank // 2].pid).children()
        ranks = {int(child.environ()["RANK"]): child.pid for child in children if "RANK" in child.environ()}
        return ranks[rank]

    def killing(self, rank: int) -> Callable[[str], None]:
        """Kills a rank when the first text comes."""
        killed: list[int] = []

        def kill(text: str) -> None:
            if not killed:
                killed.append(self.rank_pid(rank))
                os.kill(killed[0], signal.SIGKILL)

        return kill


@pytest.fixture
def agents(tmp_path: Path, state_directory: Path) -> Iterator[Agents]:
    with EmbeddedRedis() as server, connect(server.url) as client:
        made = Agents(server, client, tmp_path)
        yield made
        made.kill()


def run_cli(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipedec.cli", *arguments], capture_output=True, text=True, timeout=60, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.failure_case("M12")
def test_an_answer_goes_on_after_torchrun_has_started_all_ranks_again(
    agents: Agents, pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase, rank: int
) -> None:
    agents.start("--stages", "3", *pair.flags, restarts=2)
    scheduler = agents.wait_until_up().connect()
    request = PromptRequest("Hello", True, "pp", SamplingParams(max_tokens=600, ignore_eos=True))
    answered = Client(scheduler, silence_seconds=90).ask(request, agents.killing(rank))
    assert answered.token_ids == reference.generate(tokenizer("Hello")["input_ids"], 600, ignore_eos=True)
    assert scheduler.status().num_recoveries > 0
    scheduler.stop()
    assert agents.statuses(60) == [0, 0], agents.output()


@pytest.mark.slow
@pytest.mark.in_turn(4)
@pytest.mark.parametrize("has_file", [False, True])
def test_ranks_download_their_parts_from_a_hub(
    agents: Agents, pair: Pair, tmp_path: Path, reference: Reference, tokenizer: PreTrainedTokenizerBase, has_file: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    for name in ("target", "draft"):
        shutil.copytree(getattr(pair, name), tmp_path / "hub" / "acme" / name)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    with running_hub(tmp_path / "hub") as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        flags = ["--stages", "3", "--target", "acme/target", "--draft", "acme/draft"]
        if has_file:
            config = write_config(tmp_path / "cluster.yaml", "acme/target", "acme/draft", agents.server.url, "float32")
            flags = ["--config", str(config), "--partition", "trio"]
        agents.start(*flags, "--device", "cpu")
        scheduler = agents.wait_until_up().connect()
        answered = Client(scheduler).ask(PromptRequest("Hello", True, None, SamplingParams(max_tokens=20, ignore_eos=True)))
    assert answered.token_ids == reference.generate(tokenizer("Hello")["input_ids"], 20, ignore_eos=True)
    assert len(hub.served) == 2  # once each, though three stages read the target
    scheduler.stop()
    assert agents.statuses(60) == [0, 0], agents.output()


@pytest.mark.failure_case("M12")
def test_a_job_that_was_killed_goes_on_when_it_is_started_again_with_the_same_settings(agents: Agents, pair: Pair) -> None:
    same, other = ("--stages", "3", *pair.flags), ("--stages", "3", *pair.flags, "--max-model-len", "50")
    for flags, num_recoveries in ((same, 0), (same, 1), (other, 0)):
        agents.start(*flags, restarts=2)
        assert wait_until(lambda: "the cluster takes requests" in agents.output(), START_SECONDS), agents.output()
        scheduler = RunningCluster(agents.server.url, "two-hosts").connect()
        assert scheduler.status().num_recoveries == num_recoveries
        agents.kill()


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.failure_case("M12")
def test_a_killed_rank_ends_both_agents_and_is_named_to_the_client(agents: Agents, pair: Pair) -> None:
    agents.start("--stages", "3", *pair.flags)
    running = agents.wait_until_up()
    request = PromptRequest("Hello", True, "pipedec", SamplingParams(max_tokens=2000, ignore_eos=True))
    with pytest.raises(PipedecError, match="rank 3"):
        Client(running.connect(), silence_seconds=30).ask(request, agents.killing(3))
    assert all(status != 0 for status in agents.statuses(60)), agents.output()


@pytest.mark.slow
@pytest.mark.in_turn(2)
@pytest.mark.failure_case("M9")
def test_a_wrong_world_size_is_answered_with_torchruns_numbers(agents: Agents, pair: Pair) -> None:
    agents.start("--stages", "5", *pair.flags)
    assert all(status != 0 for status in agents.statuses(START_SECONDS))
    assert "4 processes, but 5 stages and the draft rank make 6: let --nnodes × --nproc-per-node be 6" in agents.output()
    assert agents.client.keys("*") == []


@pytest.fixture
def torchrun_environment(monkeypatch: pytest.MonkeyPatch, state_directory: Path) -> Callable[[int], None]:
    def set_world(size: int) -> None:
        for name, value in {"RANK": 1, "WORLD_SIZE": size, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))

    return set_world


@pytest.mark.slow
@pytest.mark.in_turn(2)
def test_two_agents_obey_the_config_and_end_in_order(
    agents: Agents, pair: Pair, tmp_path: Path, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = write_config(tmp_path / "cluster.yaml", str(pair.target), str(pair.draft), agents.server.url, "auto", 40)
    agents.start("--config", str(config), "--partition", "trio", "--device", "cpu")
    agents.wait_until_up()
    assert re.search(r"rank 0 \(draft\) on \S+: cpu, b?float\d\d \(this processor has (no )?bfloat16 ins", agents.output())
    assert re.search(r"rank 3 \(stage 3\) on \S+: cpu, float32 \(the target runs on a CPU: .*\); gloo over ", agents.output())
    submit = ("submit", "--redis", agents.server.url, "--run", "two-hosts", "--raw-prompt", "--prompt")
    refused = run_cli(*submit, "Hello", "--max-tokens", "40")
    assert refused.returncode == 2 and "but the cluster's context is 40: shorten the prompt or lower" in refused.stderr
    for method in ("stpp", "pipedec"):
        asked = (*submit, "Natalia sold", "--max-tokens", "20", "--ignore-eos", "--json", "--method", method)
        own, same, wide = (
            json.loads(run_cli(*asked, *flags).stdout)
            for flags in ((), ("--width", "2", "--children", "1"), ("--width", "32", "--children", "16"))
        )
        assert (own["hits"], own["timesteps"]) == (same["hits"], same["timesteps"]) != (wide["hits"], wide["timesteps"])
        expected = reference.generate(tokenizer("Natalia sold")["input_ids"], 20, ignore_eos=True)
        assert own["token_ids"] == wide["token_ids"] == expected
    limits_of_its_own = run_cli(*submit, "Hello", "--max-tokens", "20", "--ignore-eos", "--json")
    assert json.loads(limits_of_its_own.stdout)["output_tokens"] == 20
    ended = run_cli("down", "--redis", agents.server.url, "--run", "two-hosts")
    assert ended.returncode == 0 and "Cluster two-hosts is down" in ended.stderr
    assert agents.client.keys("*") == []
    assert agents.statuses(30) == [0, 0], agents.output()
    assert agents.server.url.split("@")[0].removeprefix("redis://:") not in agents.output()


def write_config(
    path: Path, target: str, draft: str, redis_url: str = "redis://:secret@somewhere:7000/1", dtype: str = "bfloat16",
    max_model_len: int = CONTEXT,
) -> Path:  # fmt: skip
    path.write_text(
        f"target: {target}\ndraft: {draft}\ndtype: {dtype}\nmax_model_len: {max_model_len}\ntree: {{width: 2, children: 1}}\n"
        f"redis: {{url: '{redis_url}'}}\n"
        "servers: [{host: localhost, devices: {rtx3090: 5}}]\n"
        "partition: uneven\n"
        "partitions:\n"
        f"  uneven: {{stages: 4, groups: 2, layers: [1, 2, 2, {TARGET_LAYERS - 5}], "
        "draft_device: {host: localhost, device: rtx3090}}\n"
        "  trio: {stages: 3, layers: [3, 3, 2], draft_device: {host: localhost, device: rtx3090}}\n"
        "  pair: {stages: 2, draft_device: {host: localhost, device: rtx3090}}\n"
    )
    return path


def parse_arguments(arguments: list[str]) -> tuple[RankPlace, PipelineSpec, RunAddress]:
    job = TorchrunJob.of(arguments)
    spec = job.spec()
    assert spec.topology == job.topology
    return job.place, spec, job.address


def test_a_partition_of_the_config_says_what_the_flags_do_not(
    pair: Pair, tmp_path: Path, torchrun_environment: Callable[[int], None]
) -> None:
    config = str(write_config(tmp_path / "cluster.yaml", str(pair.target), str(pair.draft)))
    torchrun_environment(5)
    place, spec, address = parse_arguments(["--config", config, "--run", "mine"])
    assert (place.rank, place.world_size) == (1, 5)
    assert spec.layers == ((0, 1), (1, 3), (3, 5), (5, 8))
    assert spec.topology.groups == ((1, 2), (3, 4))
    assert (spec.target, spec.draft, spec.dtype) == (pair.target, pair.draft, "bfloat16")
    assert (address.redis_url, address.run_id) == ("redis://:secret@somewhere:7000/1", "mine")
    assert (spec.settings.limits.max_model_len, spec.settings.limits.tree) == (CONTEXT, LayerTreeOptions(2, 1))

    torchrun_environment(3)
    _, spec, _ = parse_arguments(["--config", config, "--partition", "pair", "--stages", "2"])
    planned = plan(load_cluster(config), "pair").stages
    assert spec.layers == tuple((stage.layers.start, stage.layers.stop) for stage in planned)
    assert len(spec.layers) == spec.topology.num_groups == 2


def test_flags_go_before_the_config(pair: Pair, tmp_path: Path, torchrun_environment: Callable[[int], None]) -> None:
    config = str(write_config(tmp_path / "cluster.yaml", "llama-3.1-70b", "llama-3.2-1b"))
    torchrun_environment(5)
    models = ["--target", str(pair.target), "--draft", "none", "--redis", "redis://elsewhere:1/0", "--config", config]
    flags = "--dtype float32 --max-model-len 50 --max-num-seqs 3 --max-waiting 0 --groups 4 --layers 2,2,2,2"
    _, spec, address = parse_arguments([*models, *flags.split()])
    assert (spec.target, spec.draft, spec.dtype, spec.settings.limits.max_model_len) == (pair.target, None, "float32", 50)
    assert (spec.settings.limits.max_num_seqs, spec.settings.limits.max_waiting) == (3, 0)
    assert spec.topology.num_groups == 4 and spec.layers[1] == (2, 4)
    assert address.redis_url == "redis://elsewhere:1/0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config", "CONFIG"], "target: llama-3.1-70b is a shape for planning and has no weights"),
        (["--config", "CONFIG", "--target", "TARGET"], "draft: llama-3.2-1b is a shape for planning"),
        (["--config", "CONFIG", "--partition", "pear"], "pear.*pair"),
        (
            ["--config", "CONFIG", "--target", "TARGET", "--draft", "none", "--stages", "3"],
            "layers: 4 entries for 3 stages: give one number per stage, or auto",
        ),
        (["--config", "missing.yaml"], "missing.yaml: no such file"),
        (["--partition", "pair"], "give --config"),
        (["--target", "TARGET", "--draft", "none"], "give --redis URL or set PIPEDEC_REDIS_URL"),
        (
            ["--redis", "redis://a", "--target", "TARGET", "--draft", "none", "--layers", "2;6"],
            r"--layers': \[0\]: must be an integer \(1 to 100000\), not '2;6'",
        ),
        (["--redis", "redis://a", "--target", "TARGET", "--draft", "none", "--stages", "2"], "5 processes, but 2 stages"),
    ],
)
def test_wrong_flags_are_refused_in_one_line(
    arguments: list[str], message: str, pair: Pair, tmp_path: Path, torchrun_environment: Callable[[int], None]
) -> None:
    config = write_config(tmp_path / "cluster.yaml", "llama-3.1-70b", "llama-3.2-1b")
    torchrun_environment(5)
    places = {"CONFIG": str(config), "TARGET": str(pair.target)}
    with pytest.raises(UserError, match=message) as refused:
        parse_arguments([places.get(argument, argument) for argument in arguments])
    assert "\n" not in str(refused.value)


def test_without_torchrun_the_module_says_so(pair: Pair, state_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(UserError, match="start this module with torchrun"):
        parse_arguments(["--redis", "redis://a", "--stages", "2", *pair.flags])
