"""What a program of a client loads. The linters hold who may import what (``pyproject.toml``)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "pipedec"
CLIENTS = [
    "pipedec", *(f"pipedec.cli.{name}" for name in ("main", "answers", "cluster", "env", "launch", "serve", "top")),
    *(f"pipedec.cluster.{name}" for name in ("launched", "node", "torchrun", "distribution", "survey", "doctor.comparison")),
    "pipedec.methods",
    *(f"pipedec.{side}.{path.stem}" for side in ("client", "server") for path in sorted((PACKAGE / side).glob("*.py"))),
]  # fmt: skip
COMMANDS = [
    "", "generate", "chat", "up", "launch", "node", "serve", "submit", "status", "top", "down", "doctor", "env", "plan",
    "verify", "bench", "train", "distribute", "completion",
]  # fmt: skip


def test_a_client_does_not_load_torch() -> None:
    """Each module is imported in one process, one after the other, so that the first one that loads more is named.

    Then the help of commands that may run without a model on this machine, and of both groups of those that need one.
    """
    lines = ["import sys", "LOADED = {'torch', 'transformers', 'numpy'}"]
    lines += [f"import {module}; print('{module}', LOADED & sys.modules.keys())" for module in CLIENTS]
    lines += ["from click.testing import CliRunner", "from pipedec.cli.main import program", "invoke = CliRunner().invoke"]
    for command in COMMANDS:
        lines.append(f"assert invoke(program, {[*command.split(), '--help']}).exit_code == 0")
        lines.append(f"print('{command}', LOADED & sys.modules.keys())")
    ran = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == [f"{name} set()" for name in (*CLIENTS, *COMMANDS)]


def test_the_files_of_the_reading_list_exist() -> None:
    """Of the afternoon with the code in docs/architecture.md."""
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    paths = re.findall(r"^\d+\. `([\w/]+\.(?:py|lua))`[^:\n]*: .", page, re.MULTILINE)
    files = [(PACKAGE.parent if path.startswith("lua/") else PACKAGE) / path for path in paths]
    assert len(files) > 30 and [path for path in files if not path.is_file()] == []
