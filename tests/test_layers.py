"""Rules about who may touch what, held by reading the source: no import is missed because it is conditional or local."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import pipedec

PACKAGE = Path(pipedec.__file__).parent
MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
UNSAFE = ("pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "torch.load")


def names_in(source: str) -> set[str]:
    """Everything the source names with dots: imported modules, what is taken from them, and attributes."""
    return set(_names(ast.parse(source)))


def _names(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "this project writes absolute imports"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


@cache
def names_of(module: str) -> set[str]:
    return names_in((PACKAGE / module).read_text(encoding="utf-8"))


def modules_naming(*wanted: str) -> set[str]:
    """Modules that name one of ``wanted`` or something inside it."""
    return {
        module
        for module in MODULES
        if any(name == one or name.startswith(one + ".") for name in names_of(module) for one in wanted)
    }


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed",
        "import torch.distributed as dist",
        "from torch import distributed",
        "from torch.distributed import send",
        "import torch\ntorch.distributed.send",
        "import importlib\nimportlib.import_module('torch.distributed')",
        "def late():\n    import torch.distributed.rpc",
    ],
)
def test_every_form_of_import_is_seen(source: str) -> None:
    assert any(name.startswith("torch.distributed") for name in names_in(source))


def test_only_transport_touches_torch_distributed() -> None:
    users = modules_naming("torch.distributed", "torch._C._distributed_c10d")
    assert "transport/torch_distributed.py" in users
    assert {module.split("/")[0] for module in users} == {"transport"}


def test_only_scheduler_touches_redis() -> None:
    users = modules_naming("redis")
    assert "scheduler/client.py" in users
    assert {module.split("/")[0] for module in users} == {"scheduler"}


def test_nothing_unpickles() -> None:
    assert modules_naming(*UNSAFE) == set()


def reads_environment(source: str) -> bool:
    """Whether the source reads the environment; ``os.environ.setdefault`` only tells a library something."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    told = {id(node.value) for node in nodes if node.attr == "setdefault"}
    read = {ast.unparse(node) for node in nodes if id(node) not in told} | names_in(source) - {
        ast.unparse(node) for node in nodes
    }
    return bool(read & {"os.environ", "os.environb", "os.getenv"})


@pytest.mark.parametrize("source", ["import os\nos.environ['A']", "import os\nos.environ.get('A')", "from os import getenv"])
def test_reading_the_environment_is_seen(source: str) -> None:
    assert reads_environment(source)
    assert not reads_environment("import os\nos.environ.setdefault('A', '1')")


def test_only_config_and_entry_points_read_the_environment() -> None:
    assert {module for module in MODULES if reads_environment((PACKAGE / module).read_text(encoding="utf-8"))} == {
        "config/environment.py",
        "config/redis.py",
        "directories.py",
        "transport/replicas.py",  # RANK and WORLD_SIZE of a training, set by torchrun
        "cluster/torchrun.py",  # RANK, WORLD_SIZE and the like, set by torchrun
        "cluster/node.py",  # SSH_CONNECTION; and it sets what its ranks inherit
    }


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
