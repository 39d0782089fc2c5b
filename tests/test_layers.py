"""What a program of a client loads. The linters hold who may import what (``pyproject.toml``)."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    "module",
    [
        "pipedec",
        "pipedec.cli.main",
        "pipedec.cli.submit",
        "pipedec.cli.cluster",
        "pipedec.cli.launch",
        "pipedec.cli.plan",
        "pipedec.cli.serve",
        "pipedec.cli.top",
        "pipedec.server.app",
        "pipedec.server.run",
        "pipedec.cluster.launched",
        "pipedec.cluster.node",
        "pipedec.cluster.survey",
        "pipedec.cluster.doctor.comparison",
        "pipedec.methods",
    ],
)
def test_a_client_does_not_load_torch(module: str) -> None:
    program = f"import sys, {module}; print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[]"
