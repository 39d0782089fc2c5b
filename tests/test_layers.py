"""What a program of a client loads. The linters hold who may import what (``pyproject.toml``)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.afternoon import listed

PACKAGE = Path(__file__).parents[1] / "pipedec"
CLIENTS = [
    "pipedec",
    "pipedec.cli.main",
    "pipedec.cli.answers",
    "pipedec.cli.cluster",
    "pipedec.cli.launch",
    "pipedec.cli.serve",
    "pipedec.cli.top",
    "pipedec.cluster.launched",
    "pipedec.cluster.node",
    "pipedec.cluster.torchrun",
    "pipedec.cluster.inbox",
    "pipedec.cluster.survey",
    "pipedec.cluster.doctor.comparison",
    "pipedec.methods",
    *(
        f"pipedec.{path.parent.name}.{path.stem}"
        for side in ("client", "server")
        for path in sorted((PACKAGE / side).glob("*.py"))
    ),
]

COMMANDS = [
    "", "generate", "chat", "up", "launch", "node", "serve", "submit", "status", "top", "down", "doctor", "plan", "verify",
    "bench", "train", "distribute",
]  # fmt: skip


def test_a_client_does_not_load_torch() -> None:
    """Each module is imported in one process, one after the other, so that the first one that loads more is named."""
    program = "\n".join(f"import {module}; print('{module}', LOADED & sys.modules.keys())" for module in CLIENTS)
    assert loaded(program) == [f"{module} set()" for module in CLIENTS]


def test_help_does_not_load_torch() -> None:
    """Commands that may run without a model on this machine, one after the other, and both groups of those that need one."""
    program = "from click.testing import CliRunner\nfrom pipedec.cli.main import program\n" + "\n".join(
        f"assert CliRunner().invoke(program, {[*command.split(), '--help']}).exit_code == 0; "
        f"print('{command}', LOADED & sys.modules.keys())"
        for command in COMMANDS
    )
    assert loaded(program) == [f"{command} set()" for command in COMMANDS]


def loaded(program: str) -> list[str]:
    """What a program prints that names heavy modules which are ``LOADED``."""
    program = f"import sys; LOADED = {{'torch', 'transformers', 'numpy'}}\n{program}"
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.splitlines()


def test_the_files_of_the_reading_list_exist() -> None:
    files = [path for path, _ in listed()]
    assert len(files) > 30
    assert [path for path in files if not path.is_file()] == []
