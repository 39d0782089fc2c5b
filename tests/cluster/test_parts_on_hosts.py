"""Checkpoints by the part on three hosts: each has only what its ranks read, a spare all, and all of it is of one checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from support.hosts import Hosts
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.verify.reference import Reference

pytestmark = [pytest.mark.slow, pytest.mark.processes]

PROMPT = "Natalia sold 12 clips."
SLOW_SECONDS = 100
LIMIT_SECONDS = 400.0  # for a command: no more than a guard against a hang

# A slow disk: the first piece of every file with weights that a process reads to digest it takes its time.
SLOW_DISK = f"""
import os, threading, time
_pread, _slept, _lock = os.pread, set(), threading.Lock()

def pread(file, length, offset):
    with _lock:
        if os.getpid() not in _slept and os.readlink(f"/proc/self/fd/{{file}}").endswith(".safetensors"):
            time.sleep({SLOW_SECONDS})
            _slept.add(os.getpid())
    return _pread(file, length, offset)

os.pread = pread
"""


@dataclass
class Site:
    """Five ranks on three hosts: the draft and stage 1 on the first, stages 2 and 3 on the second, stage 4 on the third."""

    hosts: Hosts
    models: Path
    file: Path

    def write(self, extra: str = "") -> None:
        """With ``extra`` keys for the second host."""
        servers = [f"  - {{host: host-{index}, devices: {{cpu: {count}}}}}" for index, count in ((1, 2), (2, 2), (3, 1))]
        servers[1] = servers[1][:-1] + extra + "}"
        models = [f"{name}: {self.models / name}" for name in ("target", "draft")]
        partition = "partitions: {all: {stages: 4, draft_device: {host: host-1, device: cpu}}}"
        redis = "redis: {host: host-1, port: 7000}"
        self.file.write_text("\n".join([*models, redis, "servers:", *servers, partition]) + "\n")

    def cli(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """``pipedec`` on the first host."""
        command = (sys.executable, "-m", "pipedec.cli", *arguments)
        return self.hosts.run(0, *command, environment={"OMP_NUM_THREADS": "1"}, timeout=LIMIT_SECONDS)

    def own(self, index: int) -> Path:
        """What a host has instead of the first one's checkpoints, without their parts at first."""
        return self.file.parent / f"of-host-{index + 1}"


@pytest.fixture
def site(hosts3: Hosts, pair: Pair, tmp_path: Path) -> Iterator[Site]:
    """The target in a shard for each layer. The second and the third host have directories of their own."""
    models = tmp_path / "models"
    shutil.copytree(pair.draft, models / "draft")
    shutil.copytree(pair.target, models / "target", ignore=shutil.ignore_patterns("*.safetensors"))
    shard(pair.target / "model.safetensors", models / "target")
    made = Site(hosts3, models, tmp_path / "cluster.yaml")
    made.write()
    for index in (1, 2):
        made.own(index).mkdir()
        hosts3.bind(index, made.own(index), models)
    yield made
    for index in (1, 2):
        hosts3.unbind(index, models)


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


def test_hosts_get_their_parts_and_answer_as_one_process_does(
    site: Site, reference: Reference, tokenizer: PreTrainedTokenizerBase
) -> None:
    refused = site.cli("launch", site.file)
    assert refused.returncode == 2, refused.stderr
    last = refused.stderr.splitlines()[-1]
    assert "host-2: this host lacks config.json" in last or "host-3: this host lacks config.json" in last, last
    assert last.endswith("copy what is missing with `pipedec distribute`")
    sent = site.cli("distribute", site.file)
    assert sent.returncode == 0 and "host-1: nothing is missing" in sent.stderr, sent.stderr
    shards = {index: {file.name for file in site.own(index).rglob("*.safetensors")} for index in (1, 2)}
    assert shards[1] == {f"model-{layer}.safetensors" for layer in (2, 3, 4, 5)}
    assert shards[2] == {f"model-{layer}.safetensors" for layer in (6, 7, "rest")}
    assert site.cli("distribute", site.file).stderr.count("nothing is missing") == 3
    started = site.cli("launch", site.file, "--detach")
    assert started.returncode == 0, started.stderr
    try:
        asked = ("submit", "--raw-prompt", "--prompt", PROMPT, "--max-tokens", "12", "--ignore-eos", "--json")
        answered = site.cli(*asked)
        assert answered.returncode == 0, answered.stderr
        expected = reference.generate(tokenizer(PROMPT)["input_ids"], 12, ignore_eos=True)
        assert json.loads(answered.stdout)["token_ids"] == expected
    finally:
        assert site.cli("down").returncode == 0
    (site.own(2) / "target" / "model-7.safetensors").unlink()
    lacking = site.cli("launch", site.file).stderr.splitlines()[-1]
    assert "host-3: this host lacks model-7.safetensors of " in lacking and "`pipedec distribute`" in lacking


def test_a_digest_that_takes_long_makes_nobody_impatient(site: Site, tmp_path: Path) -> None:
    assert site.cli("distribute", site.file).returncode == 0
    (tmp_path / "slow").mkdir()
    (tmp_path / "slow" / "sitecustomize.py").write_text(SLOW_DISK)
    path = os.pathsep.join([str(tmp_path / "slow"), *filter(None, [os.environ.get("PYTHONPATH")])])
    state = tmp_path / "nothing-digested-yet"
    site.write(f", environment: {{PYTHONPATH: '{path}', PIPEDEC_STATE_DIR: '{state}'}}")
    started = site.cli("launch", site.file, "--detach")
    try:
        assert started.returncode == 0, started.stderr
        shown = site.cli("status").stderr
        assert "epoch 0" in shown and "Recoveries" not in shown, shown
        assert list((state / "digests").iterdir()), "the digests were computed there"
        asked = ("submit", "--raw-prompt", "--prompt", PROMPT, "--max-tokens", "4", "--ignore-eos", "--json")
        assert site.cli(*asked).returncode == 0
    finally:
        site.cli("down")
