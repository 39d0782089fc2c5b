"""``pipedec launch``: what it would run, and the life of a cluster that it starts on this machine."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.processes import wait_until
from support.programs import Calls as Pipedec
from support.programs import Started
from support.tiny_pair import Pair
from transformers import PreTrainedTokenizerBase

from pipedec.cluster.logs import log_directory
from pipedec.cluster.state import running_here
from pipedec.verify.reference import Reference

pytestmark = pytest.mark.usefixtures("leaves_nothing")

START_SECONDS = 120.0
PROMPT = "Natalia sold 12 clips in April."
HOSTS = """
target: {pair.target}
draft: {pair.draft}
bita: none
max_model_len: 512
servers:
{servers}
launch: {{environment: {{HF_TOKEN: hush}}}}
partitions:
  two: {{stages: {stages}, draft_device: {{host: {first}, device: cpu}}}}
"""


def written(folder: Path, pair: Pair, *servers: str, stages: int = 2) -> Path:
    """A cluster.yaml with these entries of ``servers``."""
    entries = "\n".join(f"  - {{{server}}}" for server in servers)
    first = servers[0].partition(",")[0].removeprefix("host: ")
    (folder / "cluster.yaml").write_text(HOSTS.format(pair=pair, servers=entries, first=first, stages=stages))
    return folder / "cluster.yaml"


def on_localhost(folder: Path, pair: Pair) -> Path:
    return written(folder, pair, "host: localhost, devices: {cpu: 2}", stages=1)


def test_a_dry_run_says_what_would_run_where(
    pipedec: Pipedec, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    monkeypatch.setenv("PIPEDEC_REDIS_PASSWORD", "hush hush")
    first = "host: one, devices: {cpu: 2}, ssh: me@10.0.0.1, python: /opt/python"
    file = written(tmp_path, pair, first, "host: two, devices: {cpu: 1}")
    planned = pipedec("launch", file, "--dry-run", "--run", "try")
    assert planned.status == 0 and planned.err == ""
    lines = planned.out.splitlines()
    assert lines[0] == "Partition two: 3 ranks, run try"
    assert "  rank 0 (draft) on cpu #1" in lines and "  rank 1 (stage 1) on cpu #0, layers 0-3" in lines
    two = lines.index(next(line for line in lines if line.startswith("two: ")))
    assert lines[two + 1] == "  rank 2 (stage 2) on cpu #0, layers 4-7"
    assert next(line for line in lines if line.startswith("one: ")).endswith(
        " me@10.0.0.1 'exec /opt/python -m pipedec.cluster.node'"
    )
    assert {"  NCCL_DEBUG=WARN", "  CUDA_DEVICE_ORDER=PCI_BUS_ID", "  HF_TOKEN='(hidden)'"} <= set(lines)
    assert lines[-1] == "Redis: to be started on one, a free port, the configured password"
    assert "hush" not in planned.out
    monkeypatch.setenv("PIPEDEC_REDIS_URL", "redis://far:1/0")
    assert "Redis: redis://far:1/0 with a password" in pipedec("launch", file, "--dry-run").out


def test_launch_status_submit_down(
    started: Started, pipedec: Pipedec, pair: Pair, reference: Reference, tokenizer: PreTrainedTokenizerBase,
    state_directory: Path, tmp_path: Path,
) -> None:  # fmt: skip
    file = on_localhost(tmp_path, pair)
    starter = started("launch", file, "--detach")
    _, err = starter.communicate(timeout=START_SECONDS)
    assert starter.returncode == 0 and b"is up (process " in err, err
    (state,) = running_here()
    assert "is already running here" in pipedec("launch", file, "--run", state.run_id).refused()
    asked = ("--raw-prompt", "--prompt", PROMPT, "--max-tokens", "16", "--ignore-eos", "--json")
    expected = reference.generate(tokenizer(PROMPT)["input_ids"], 16, ignore_eos=True)
    assert json.loads(pipedec("submit", *asked).out)["token_ids"] == expected
    assert "localhost" in pipedec("status").err
    assert pipedec("down").err == f"Cluster {state.run_id} is down.\n"
    assert not state.is_alive() and running_here() == []
    lines = (log_directory(state.run_id) / "cluster.log").read_text().splitlines()
    assert lines[0].startswith("Starting 2 ranks on localhost; ") and lines[-1] == "Cluster stopped."
    over_gloo = [line.split(":")[0] for line in lines if "; gloo over lo" in line]
    assert over_gloo == [f"rank {name} on localhost" for name in ("0 (draft)", "1 (stage 1)")]


@pytest.mark.slow
def test_ctrl_c_ends_all_that_launch_has_started(started: Started, pair: Pair, tmp_path: Path) -> None:
    process = started("launch", on_localhost(tmp_path, pair))
    assert wait_until(lambda: process.poll() is not None or running_here(), START_SECONDS)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=START_SECONDS)
    assert process.returncode == 0 and err.decode().splitlines()[-1] == "Stopping the cluster.", err.decode()


def test_a_host_that_cannot_be_reached_takes_three_lines_at_most(
    pipedec: Pipedec, pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIPEDEC_SSH", "sh -c 'echo no route to host >&2; exit 255'")
    file = written(tmp_path, pair, "host: far, devices: {cpu: 3}")
    for flags in ((), ("--detach",)):
        ended = pipedec("launch", file, *flags)
        lines = ended.err.splitlines()
        assert ended.status in (1, 2) and len(lines) <= 3
        assert lines[-1] == "pipedec: far: ssh failed: no route to host: see that `ssh far` works by itself"
        assert running_here() == []


def test_a_partition_that_is_not_there_is_refused(pipedec: Pipedec, pair: Pair, tmp_path: Path) -> None:
    file = on_localhost(tmp_path, pair)
    assert "unknown partition 'three'" in pipedec("launch", file, "--partition", "three").refused()
    assert "nowhere.yaml" in pipedec("launch", tmp_path / "nowhere.yaml").refused()
