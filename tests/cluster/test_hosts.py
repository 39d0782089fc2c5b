"""Clusters on three hosts that call themselves 127.0.1.1, with whole checkpoints or their parts, and what failures look like."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from support import hub_server
from support.hosts import Hosts
from support.processes import wait_until
from support.slow_links import Link
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

import pipedec
from pipedec.verify.reference import Reference

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("leaves_nothing")]

START_SECONDS = 90.0
PROMPT, LONG = "Natalia sold 12 clips.", 800
PORT = 7000  # of Redis
LINK = Link(delay_ms=20)  # of the slow hosts


@dataclass
class Cluster:
    """Five ranks on three hosts: the draft and stage 1 on the first, stages 2 and 3 on the second, stage 4 on the third.

    Attributes:
        password: of Redis, which runs on the second host.
        patience: how long a command may take.
        ended: the exit status of ``pipedec down``.
    """

    hosts: Hosts
    pair: Pair
    folder: Path
    counts: tuple[int, ...] = (2, 2, 1)
    hub: str | None = None  # the address of one that has the pair as acme/target and acme/draft
    password: str = field(default_factory=lambda: secrets.token_hex(12))
    patience: float = START_SECONDS
    ended: int | None = None

    @property
    def url(self) -> str:
        return f"redis://{self.hosts.address(1)}:{PORT}/0"

    @property
    def environment(self) -> dict[str, str]:
        hub = {} if self.hub is None else {"HF_ENDPOINT": self.hub, "HF_HOME": str(self.hosts.directory(0) / "hub")}
        return {"OMP_NUM_THREADS": "1", "PIPEDEC_REDIS_PASSWORD": self.password, **hub}

    def file(self, redis: str = f"redis: {{host: host-2, port: {PORT}}}") -> Path:
        target, draft = (self.pair.target, self.pair.draft) if self.hub is None else ("acme/target", "acme/draft")
        lines = [f"target: {target}", f"draft: {draft}", redis, "servers:"]
        for index, count in enumerate(self.counts):
            own = "" if self.hub is None else f", environment: {{HF_HOME: {self.hosts.directory(index) / 'hub'}}}"
            lines.append(f"  - {{host: host-{index + 1}, devices: {{cpu: {count}}}{own}}}")
        stages = 4 if self.counts == (2, 2, 1) else 3
        lines.append(f"partitions: {{all: {{stages: {stages}, draft_device: {{host: host-1, device: cpu}}}}}}")
        path = self.folder / "cluster.yaml"
        path.write_text("\n".join(lines) + "\n")
        return path

    def cli(self, index: int, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """``pipedec`` on a host."""
        command = (sys.executable, "-m", "pipedec.cli", *arguments)
        return self.hosts.run(index, *command, environment=self.environment, timeout=self.patience)

    @contextmanager
    def up(self, *options: str, redis_host: int = 2) -> Iterator[None]:
        """While it runs, launched from the first host."""
        file = self.file(f"redis: {{host: host-{redis_host}, port: {PORT}}}")
        started = self.cli(0, "launch", file, "--run", "three", "--detach", *options)
        assert started.returncode == 0, started.stderr
        try:
            yield
        finally:
            self.ended = self.cli(0, "down").returncode

    @contextmanager
    def asking(self, num_tokens: int) -> Iterator[subprocess.Popen[bytes]]:
        """A client on the first host that has begun to say so many tokens, all but the first character to be read."""
        asked = ("submit", "--raw-prompt", "--prompt", PROMPT, "--max-tokens", str(num_tokens), "--ignore-eos")
        client = self.hosts.popen(
            0, sys.executable, "-m", "pipedec.cli", *asked, environment=self.environment,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
        )  # fmt: skip
        with client:
            assert client.stdout.read(1)  # type: ignore[union-attr]
            yield client

    def refused(self) -> str:
        """The line with which ``pipedec launch`` ends, after those in which ranks say what they have done."""
        ended = self.cli(0, "launch", self.file())
        lines = [line for line in ended.stderr.splitlines() if not line.endswith(": done")]
        assert ended.returncode != 0 and ended.stdout == "" and len(lines) <= 3, (ended.returncode, ended.stdout, ended.stderr)
        assert lines[-1].startswith("pipedec: ")
        return lines[-1]


@pytest.fixture
def cluster(hosts3: Hosts, pair: Pair, tmp_path: Path) -> Cluster:
    return Cluster(hosts3, pair, tmp_path)


@pytest.fixture(scope="module")
def long_answer(reference: Reference, tokenizer: PreTrainedTokenizerBase) -> str:
    """LONG tokens of transformers."""
    token_ids = reference.generate(tokenizer(PROMPT)["input_ids"], LONG, ignore_eos=True)
    return tokenizer.decode(token_ids, skip_special_tokens=True)


@pytest.fixture
def answers(reference: Reference, tokenizer: PreTrainedTokenizerBase) -> Callable[[Cluster, int], None]:
    """Asks from a host, with two methods, and compares with transformers."""
    expected = reference.generate(tokenizer(PROMPT)["input_ids"], 12, ignore_eos=True)

    def ask(cluster: Cluster, index: int) -> None:
        for method in ("pp", "pipedec-bestfirst"):
            place = ("--redis", cluster.url, "--run", "three", "--method", method)
            asked = ("submit", *place, "--raw-prompt", "--prompt", PROMPT, "--max-tokens", "12", "--ignore-eos", "--json")
            answered = cluster.cli(index, *asked)
            assert answered.returncode == 0, answered.stderr
            assert json.loads(answered.stdout)["token_ids"] == expected

    return ask


def test_a_launched_cluster_answers_every_host_as_one_process_does(
    cluster: Cluster, answers: Callable[[Cluster, int], None]
) -> None:
    with cluster.up():
        assert not any(cluster.password in line for line in cluster.hosts.command_lines())
        answers(cluster, 0)
        answers(cluster, 2)
        assert "Links: rank 0 to rank 1: " in cluster.cli(2, "status", "--redis", cluster.url, "--run", "three").stderr
        wrong = Cluster(cluster.hosts, cluster.pair, cluster.folder)
        refused = wrong.cli(2, "submit", "--redis", cluster.url, "--run", "three", "--prompt", PROMPT)
        assert refused.returncode == 1 and "wrong Redis password" in refused.stderr
    assert cluster.ended == 0
    logs = "".join(path.read_text() for path in (cluster.hosts.directory(0) / "state").glob("*.log"))
    assert cluster.password not in logs and "Traceback" not in logs


@pytest.mark.in_turn(2)
def test_every_host_downloads_what_its_ranks_read(
    cluster: Cluster, answers: Callable[[Cluster, int], None], tmp_path: Path
) -> None:
    """From a hub on the third host; each asks from an address of its own."""
    root, log = tmp_path / "hub" / "acme", tmp_path / "served.jsonl"
    by_layer = sharded(cluster.pair.target, root / "target")
    shutil.copytree(cluster.pair.draft, root / "draft")
    serving = (sys.executable, hub_server.__file__, root.parent, "--host", cluster.hosts.address(2), "--log", log)
    with cluster.hosts.popen(2, *serving, stdout=subprocess.PIPE) as hub:
        try:
            cluster.hub = hub.stdout.readline().decode().strip()  # type: ignore[union-attr]
            with cluster.up():
                answers(cluster, 1)
        finally:
            hub.kill()
    assert cluster.ended == 0
    served = [json.loads(line) for line in log.read_text().splitlines()]
    draft = sum(sent for _, name, _, sent in served if name == "model.safetensors")
    for index, layers in enumerate(((0, 1), (2, 3, 4, 5), (6, 7))):
        needed = [by_layer[layer] for layer in layers] + [by_layer["first"]] * (index == 0) + [by_layer["last"]] * (index == 2)
        received = sum(sent for address, _, _, sent in served if address == cluster.hosts.address(index))
        assert received == sum(needed) + draft * (index == 0)


def sharded(source: Path, target: Path) -> dict[int | str, int]:
    """Write a checkpoint anew with one file for each layer, and one for what is before and after them. Returns their sizes."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors"))
    files: dict[int | str, dict[str, Any]] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        layer = re.search(r"layers\.(\d+)\.", name)
        files.setdefault(int(layer[1]) if layer else "first" if "embed" in name else "last", {})[name] = tensor
    for part, tensors in files.items():
        save_file(tensors, target / f"model-{part}.safetensors", {"format": "pt"})
    weight_map = {name: f"model-{part}.safetensors" for part, tensors in files.items() for name in tensors}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return {part: (target / f"model-{part}.safetensors").stat().st_size for part in files}


@pytest.mark.in_turn(2)
def test_ranks_measure_how_far_apart_their_hosts_are(slow_hosts3: Hosts, pair: Pair, tmp_path: Path) -> None:
    cluster = Cluster(slow_hosts3, pair, tmp_path)
    slow_hosts3.link(0, 1, delay_ms=60)
    slow_hosts3.link(0, 2, delay_ms=30)
    try:
        with cluster.up():
            shown = cluster.cli(0, "status").stderr
    finally:
        slow_hosts3.link(0, 1, delay_ms=0)
        slow_hosts3.link(0, 2, delay_ms=0)
    found = re.findall(r"rank \d to rank \d: ([\d.]+) ms, at least [\d,]+ Mbit/s", shown)
    first, second, third, fourth, last = map(float, found)
    assert second >= 60 > last >= 30 > max(first, third, fourth), shown


@pytest.mark.failure_case("M7")
def test_a_foreign_checkpoint_on_one_host_is_named(cluster: Cluster, tmp_path: Path) -> None:
    other = Path(shutil.copytree(cluster.pair.target, tmp_path / "other"))
    path = other / "model.safetensors"
    save_file({name: 1.01 * tensor for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    cluster.hosts.bind(1, other, cluster.pair.target)
    try:
        assert "host-2 has other weights of the target than this machine (model." in cluster.refused()
    finally:
        cluster.hosts.unbind(1, cluster.pair.target)


def test_a_firewall_between_hosts_is_named(cluster: Cluster) -> None:
    cluster.hosts.block_ports(2)
    try:
        line = cluster.refused()
        assert "cannot connect to rank 4" in line and "host-3 at 10.77.0.3" in line and "open all TCP ports" in line
    finally:
        cluster.hosts.unblock(2)


# What happens to a host, and what undoes it. The spare is on the third host, so the second one is done without in every case.
FAULTS: dict[str, tuple[Callable[[Hosts], None], Callable[[Hosts], None]]] = {
    "unplugged": (lambda hosts: hosts.unplug(1), lambda hosts: hosts.plug(1)),
    "killed": (lambda hosts: hosts.kill_python(1), lambda hosts: None),
    "not heard by the next rank": (lambda hosts: hosts.deafen(2, 1), lambda hosts: hosts.unblock(2)),
    "not heard by Redis": (lambda hosts: hosts.deafen(0, 1), lambda hosts: hosts.unblock(0)),
    "deaf to Redis": (lambda hosts: hosts.deafen(1, 0), lambda hosts: hosts.unblock(1)),
}


@pytest.mark.in_turn(5)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.failure_case("S8")
def test_an_answer_goes_on_when_a_host_is_lost(cluster: Cluster, fault: str, long_answer: str) -> None:
    """Two stages with the draft on the first host, one on the second; the third has one, and the only spare."""
    cluster.counts = (2, 1, 2)
    happen, undo = FAULTS[fault]
    with cluster.up("--spares", "1", redis_host=1):
        try:
            with cluster.asking(LONG) as client:
                happen(cluster.hosts)
                rest, errors = client.communicate()
            assert client.returncode == 0, errors
            assert rest == f"{long_answer}\n".encode()[1:]
            shown = cluster.cli(0, "status").stderr
            assert re.search(r"host-3 \(ranks 2, 3\)", shown) and "host-2 " in shown, shown
        finally:
            undo(cluster.hosts)
    assert cluster.ended == 0


@pytest.fixture(scope="module")
def slow_cluster(slow_hosts3: Hosts, pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Over links of 20 ms: Redis, draft and a stage on the first host, a stage on each other one, and a spare on the third."""
    for ends in combinations(range(3), 2):
        slow_hosts3.link(*ends, **vars(LINK))
    cluster = Cluster(slow_hosts3, pair, tmp_path_factory.mktemp("slow"), counts=(2, 1, 2))
    with cluster.up("--spares", "1", "--shared-suffixes", "off", redis_host=1):  # no answer is drafted from the one before
        yield cluster


# What happens to the link between two hosts, and for how many seconds; 0: until the answer has ended. Where a link has lost
# everything for three seconds, TCP may hold everything back for six.
TROUBLE: dict[str, tuple[tuple[int, int], dict[str, Any], float]] = {
    "its latency triples": ((0, 1), {"delay_ms": 60}, 0),
    "it loses one of a hundred packets": ((0, 1), {"loss": 0.01}, 0),
    "it loses more, and is narrow": ((0, 1), {"loss": 0.03, "rate_mbit": 10}, 0),
    "it loses everything": ((0, 1), {"loss": 1.0}, 3),
    "it holds everything back, also from Redis": ((0, 1), {"stalled": True}, 6),
    "it holds everything back": ((1, 2), {"stalled": True}, 6),
}


@pytest.mark.in_turn(3)
@pytest.mark.parametrize("trouble", TROUBLE)
@pytest.mark.failure_case("S10")
def test_over_a_link_in_trouble_an_answer_only_comes_later(
    slow_cluster: Cluster, trouble: str, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Nobody is given up, though there is a spare."""
    hosts, changes, seconds = TROUBLE[trouble]
    link_between = partial(slow_cluster.hosts.link, *hosts)
    token_ids = reference.generate(tokenizer(PROMPT)["input_ids"], 30, ignore_eos=True)
    try:
        with slow_cluster.asking(len(token_ids)) as client:
            link_between(**changes)
            if seconds:
                with pytest.raises(subprocess.TimeoutExpired):
                    client.wait(seconds)
                link_between(**vars(LINK))
            rest, errors = client.communicate()
    finally:
        link_between(**vars(LINK))
    assert rest == f"{tokenizer.decode(token_ids, skip_special_tokens=True)}\n".encode()[1:], errors
    assert "epoch 0" in slow_cluster.cli(0, "status").stderr


@pytest.mark.in_turn(2)
@pytest.mark.failure_case("S8")
def test_without_spares_a_host_that_loses_its_cable_is_named_to_the_client_and_by_launch(cluster: Cluster) -> None:
    with cluster.up(redis_host=1):
        with cluster.asking(2000) as client:
            cluster.hosts.unplug(1)
            try:
                said, lost = client.communicate()[1], rb"host-2 stopped answering; no spare is left for rank 2 \(stage 2\)"
                assert re.search(rb"pipedec: .*" + lost, said) and client.returncode == 1, said
            finally:
                cluster.hosts.plug(1)
        logs = (cluster.hosts.directory(0) / "state").glob("logs/*/cluster.log")
        log = max(logs, key=lambda path: path.stat().st_mtime)
        named = re.compile(r"\npipedec: .*host-2 stopped answering; .* rank 3 \(stage 3\) on host-2: start with --spares 2")
        assert wait_until(lambda: named.search(log.read_text()), 60), log.read_text()


@pytest.mark.in_turn(2)
def test_without_spares_hosts_that_no_longer_hear_each_other_are_named(cluster: Cluster) -> None:
    """The third host does not hear the second one any more. Both try to reach the other for a while."""
    cluster.counts = (2, 1, 1)
    with cluster.up(redis_host=1), cluster.asking(2000) as client:
        cluster.hosts.deafen(2, 1)
        try:
            said = client.communicate()[1].decode()
            named = r"pipedec: .*rank [23] .* cannot connect to rank [23] .* could not meet again for 20 s"
            assert re.search(named, said) and client.returncode == 1, said
        finally:
            cluster.hosts.unblock(2)


# Stands for Slurm's: runs a command on every node, with this environment, and fails if it fails on one of them.
SRUN = """#!{python}
import os, shlex, subprocess, sys
command = sys.argv[sys.argv.index("bash"):]
passed_on = ("PIPEDEC_REDIS", "TORCH_", "OMP_", "PATH")
kept = [f"{{name}}={{value}}" for name, value in os.environ.items() if name.startswith(passed_on)]
nodes = [
    subprocess.Popen([*{ssh}, f"host-{{node + 1}}", shlex.join(["env", f"SLURM_NODEID={{node}}", *kept, *command])])
    for node in range(int(os.environ["SLURM_NNODES"]))
]
sys.exit(max([node.wait() for node in nodes]))
"""


@pytest.mark.in_turn(2)
def test_the_slurm_script_starts_a_run_on_its_nodes(
    cluster: Cluster, tmp_path: Path, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    tools = {"srun": SRUN.format(python=sys.executable, ssh=["ssh", "-F", str(cluster.hosts.ssh_config)])}
    tools["scontrol"] = "#!/bin/sh\nprintf 'host-1\\nhost-2\\n'\n"
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_GPUS_ON_NODE": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "host-[1-2]"}
    slurm |= {"SLURM_CPUS_PER_TASK": "1", "OMP_NUM_THREADS": "1"}
    path = f"{tmp_path}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    script = Path(pipedec.__file__).parent.parent / "launch" / "slurm.sbatch"
    log = tmp_path / "job.log"
    with log.open("wb") as output:
        job = cluster.hosts.popen(
            0, "env", "-C", tmp_path, "bash", script, *cluster.pair.flags, environment={**slurm, "PATH": path},
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        assert wait_until(lambda: "pipedec: the cluster takes requests" in log.read_text(), START_SECONDS), log.read_text()
        named = f'. {tmp_path}/pipedec-17.env; {sys.executable} -m pipedec.cli $0 --run slurm-17 "$@"'
        asked = ("--raw-prompt", "--prompt", PROMPT, "--max-tokens", "12", "--ignore-eos", "--json")
        answered = cluster.hosts.run(2, "sh", "-c", named, "submit", *asked)
        assert answered.returncode == 0, answered.stderr
        assert json.loads(answered.stdout)["token_ids"] == reference.generate(tokenizer(PROMPT)["input_ids"], 12, ignore_eos=True)
        assert cluster.hosts.run(2, "sh", "-c", named, "down").returncode == 0
        assert job.wait(30) == 0, log.read_text()
        assert not (tmp_path / "pipedec-17.env").exists()
    finally:
        job.kill()
        job.wait(10)


LIMIT_SECONDS = 400.0  # for a command: no more than a guard against a hang
may_take_long = pytest.mark.seconds(2 * LIMIT_SECONDS)


@pytest.fixture
def site(cluster: Cluster) -> Iterator[Cluster]:
    """The target in a shard for each layer. The other hosts have directories of their own instead, empty at first."""
    if shutil.which("rsync") is None:
        pytest.skip("needs rsync")
    pair, models = cluster.pair, cluster.folder / "models"
    shutil.copytree(pair.draft, models / "draft")
    shutil.copytree(pair.target, models / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    shard(pair.target / "model.safetensors", models / "target")
    cluster.pair, cluster.patience = replace(pair, target=models / "target", draft=models / "draft"), LIMIT_SECONDS
    for index in (1, 2):
        own(cluster, index).mkdir()
        cluster.hosts.bind(index, own(cluster, index), models)
    yield cluster
    for index in (1, 2):
        cluster.hosts.unbind(index, models)


def own(site: Cluster, index: int) -> Path:
    """What a host has instead of the first one's checkpoints."""
    return site.folder / f"of-host-{index + 1}"


def shard(weights: Path, directory: Path) -> None:
    """One file for each layer, and one for what is in none."""
    tensors, files, weight_map = load_file(weights), {}, {}
    for name, tensor in tensors.items():
        layer = name.split(".")[2] if name.startswith("model.layers.") else "rest"
        files.setdefault(f"model-{layer}.safetensors", {})[name] = tensor
        weight_map[name] = f"model-{layer}.safetensors"
    for name, content in files.items():
        save_file(content, directory / name, {"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.in_turn(2)
@may_take_long
def test_hosts_get_their_parts_and_answer_as_one_process_does(
    site: Cluster, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    refused = site.cli(0, "launch", site.file())
    assert refused.returncode == 2, refused.stderr
    last = refused.stderr.splitlines()[-1]
    assert "host-2: this host lacks config.json" in last or "host-3: this host lacks config.json" in last, last
    assert last.endswith("copy what is missing with `pipedec distribute`")
    sent = site.cli(0, "distribute", site.file())
    assert sent.returncode == 0 and "host-1: nothing is missing" in sent.stderr, sent.stderr
    shards = {index: {file.name for file in own(site, index).rglob("*.safetensors")} for index in (1, 2)}
    assert shards[1] == {f"model-{layer}.safetensors" for layer in (2, 3, 4, 5)}
    assert shards[2] == {f"model-{layer}.safetensors" for layer in (6, 7, "rest")}
    assert site.cli(0, "distribute", site.file()).stderr.count("nothing is missing") == 3
    started = site.cli(0, "launch", site.file(), "--detach")
    assert started.returncode == 0, started.stderr
    try:
        asked = ("submit", "--raw-prompt", "--prompt", PROMPT, "--max-tokens", "12", "--ignore-eos", "--json")
        answered = site.cli(0, *asked)
        assert answered.returncode == 0, answered.stderr
        expected = reference.generate(tokenizer(PROMPT)["input_ids"], 12, ignore_eos=True)
        assert json.loads(answered.stdout)["token_ids"] == expected
    finally:
        assert site.cli(0, "down").returncode == 0
    (own(site, 2) / "target" / "model-7.safetensors").unlink()
    lacking = site.cli(0, "launch", site.file()).stderr.splitlines()[-1]
    assert "host-3: this host lacks model-7.safetensors of " in lacking and "`pipedec distribute`" in lacking
