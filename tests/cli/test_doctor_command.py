"""``pipedec doctor`` for this host: table, JSON, exit status."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipedec.scheduler import EmbeddedServer

pytestmark = pytest.mark.usefixtures("leaves_nothing")

Pipedec = Callable[..., Any]


def test_a_host_is_examined(pipedec: Pipedec) -> None:
    shown, told = pipedec("doctor"), pipedec("doctor", "--json")
    assert shown.status == told.status == 0, shown.err
    (host, findings), *others = json.loads(told.out).items()
    assert others == [] and host == socket.gethostname()
    assert {"pipedec", "torch", "GPUs", "Redis", "state directory"} <= {finding["name"] for finding in findings}
    assert all(finding["name"].split()[0] in shown.out for finding in findings)


def test_gpus_that_torch_cannot_use_are_a_problem(pipedec: Pipedec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '570.86.15, NVIDIA L40, 46068\\n570.86.15, NVIDIA L40, 46068\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("torch.version.cuda", None)
    ended = pipedec("doctor", "--json")
    found = {finding["name"]: finding for finding in next(iter(json.loads(ended.out).values()))}
    assert ended.status == 1 and found["GPUs"]["level"] == "problem"
    assert found["GPUs"]["value"] == "2 × NVIDIA L40, 45.0 GiB; torch has no CUDA"
    assert found["NVIDIA driver"]["value"] == "570.86.15, torch for CUDA none"


def test_redis_is_tried(pipedec: Pipedec, monkeypatch: pytest.MonkeyPatch) -> None:
    with EmbeddedServer() as server:
        monkeypatch.setenv("PIPEDEC_REDIS_URL", server.url)
        assert f"at {server.address}, clock" in pipedec("doctor").out
    ended = pipedec("doctor")
    assert ended.status == 1 and f"cannot reach Redis at {server.address}" in ended.out
    assert "Redis: start Redis at" in ended.out and "there are problems on" in ended.err
    assert server.url.split("@")[0].removeprefix("redis://:") not in ended.out + ended.err


def test_a_bad_file_is_refused(pipedec: Pipedec, tmp_path: Path) -> None:
    assert "no such file" in pipedec("doctor", "--cluster", tmp_path / "none.yaml").refused()
