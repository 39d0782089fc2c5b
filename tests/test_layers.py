"""What a program of a client loads. The linters hold who may import what (``pyproject.toml``)."""

from __future__ import annotations

import subprocess
import sys

CLIENTS = [
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
]


def test_a_client_does_not_load_torch() -> None:
    """Each module is imported in one process, one after the other, so that the first one that loads more is named."""
    program = "\n".join(f"import {module}; print('{module}', LOADED & sys.modules.keys())" for module in CLIENTS)
    program = f"import sys; LOADED = {{'torch', 'transformers', 'numpy'}}\n{program}"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == [f"{module} set()" for module in CLIENTS]
