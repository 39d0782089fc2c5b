"""``pipedec env``: what a report of a fault needs, also where torch is broken, and never a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.programs import PROGRAM, Calls

from pipedec import __version__
from pipedec.cluster.doctor.gpus import gpu_facts_apart

pytestmark = pytest.mark.usefixtures("leaves_nothing")

ROOT = Path(__file__).resolve().parents[2]
SECRETS = {
    "HF_TOKEN": "hunter1", "PIPEDEC_API_KEY": "hunter2", "PIPEDEC_REDIS_PASSWORD": "hunter3",
    "PIPEDEC_REDIS_URL": "redis://user:hunter4@localhost:6379/0?password=hunter5", "all_proxy": "socks5://user:hunter6@proxy:1080",
    "SLURM_JWT": "hunter7", "http_proxy": "user:hunter8@proxy:3128", "PIPEDEC_ARGUMENTS": "--stages 2 --api-key hunter9",
    "PIPEDEC_SSH": "sshpass -p hunter10 ssh", "HF_ENDPOINT": "https://user:hun/hunter11@mirror",
}  # fmt: skip


def test_it_shows_versions_machine_directories_and_variables(
    pipedec: Calls, monkeypatch: pytest.MonkeyPatch, state_directory: Path
) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_HOME", "/models")
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", "/models")  # which reads the variable once, and this process has
    shown, printed = pipedec("env"), pipedec("env", "--json")
    assert shown.status == printed.status == 0, shown.err
    assert "hunter" not in shown.out + printed.out
    facts = json.loads(printed.out)
    assert facts["versions"]["pipedec"] == __version__ and torch.__version__.startswith(facts["versions"]["torch"])
    assert facts["machine"]["torch computes with"] == torch.backends.cpu.get_cpu_capability()
    assert facts["directories"]["state"] == str(state_directory) and facts["directories"]["Hugging Face"] == "/models"
    assert facts["models"]["default target"].startswith("reference-pair (")
    assert facts["variables"].keys() >= {*SECRETS, "HF_HOME"}
    assert facts["variables"]["PIPEDEC_REDIS_URL"] == "redis://(hidden)@localhost:6379/0?password=(hidden)"
    for section, rows in facts.items():
        assert f"{section}:\n" in shown.out and all(f"\n  {name} " in shown.out for name in rows)


@pytest.mark.parametrize("body, seconds, reason", [
    ("raise ImportError('libcudart.so: no such file')", 120.0, "libcudart.so: no such file"),
    ("import os; os.abort()", 120.0, "a process that imports torch was killed by SIGABRT"),
    ("import time; time.sleep(600)", 1.0, "torch and the driver have not answered within 1 s"),
])  # fmt: skip
def test_a_torch_that_is_broken_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, seconds: float, reason: str
) -> None:
    (tmp_path / "torch.py").write_text(f"{body}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    assert gpu_facts_apart(seconds).error == reason


@pytest.mark.slow
@pytest.mark.parametrize("command", [("env",), ("doctor",), ("plan", ROOT / "cluster.yaml"), ("completion", "zsh")])
def test_a_user_without_a_home_behind_a_proxy_with_an_ascii_terminal(command: tuple[str, ...], state_directory: Path) -> None:
    """Boxes, arrows and signs are shown as well as the terminal can, and nothing on this machine is reached by the proxy."""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"} | {
        "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii", "HTTP_PROXY": "http://127.0.0.1:9",
        "ALL_PROXY": "socks5://127.0.0.1:9",
    }  # fmt: skip
    ended = subprocess.run([PROGRAM, *command], env=environment, capture_output=True, check=False)
    assert ended.returncode == 0 and ended.stdout.isascii() and ended.stderr.isascii(), ended
    assert ended.stdout and b"Traceback" not in ended.stderr
