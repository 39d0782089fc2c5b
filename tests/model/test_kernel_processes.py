"""Kernels without a GPU: computed in Triton's interpreter, and compiled for GPUs. Both take processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).parents[1]
FILES = sorted((TESTS / "kernels").glob("test_*.py"))


def run(interpret: str, *arguments: str | Path, cache: Path) -> str:
    """What a process that loads Triton prints. ``interpret``: 1 to interpret kernels, 0 to compile them."""
    environment = os.environ | {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path()}
    process = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=TESTS.parent)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


def path() -> str:
    return os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem.removeprefix("test_").removesuffix("_kernel"))
def test_kernels_compute_as_their_references(file: Path, tmp_path: Path) -> None:
    printed = run("1", "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", file, cache=tmp_path)
    assert " passed" in printed and "skipped" not in printed


@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.parametrize("capability", ["86", "89", "90"])
def test_kernels_compile_within_the_limits_of_gpus(capability: str, tmp_path: Path) -> None:
    """At the sizes of real models: hardly a register is spilled, and shared memory suffices on an RTX 3090."""
    printed = run("0", "-m", "support.kernels", capability, cache=tmp_path)
    assert "every kernel is within the limits" in printed
