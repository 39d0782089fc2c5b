"""Kernels without a GPU: computed in Triton's interpreter, compiled for GPUs that are not there, counted.

Whether kernels are interpreted is decided where Triton defines them, for the whole process, by TRITON_INTERPRET: 1 in processes
that compute, 0 in those that compile (``python -m support.kernels``).
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import native_specialize_impl

from pipedec.model.kernels import language

LARGEST_SHARED = 99 * 1024  # bytes per block of an RTX 3090 (compute capability 8.6)
LARGEST_STACK = 32  # bytes per thread, of numbers for which no register was left
Launch = tuple[Any, tuple[int, ...], tuple[Any, ...], dict[str, Any]]  # kernel, grid, arguments, constants and options


@contextmanager
def interpreted() -> Iterator[None]:
    """Compute with kernels on the CPU."""
    with patch.object(language, "devices", {"cuda", "cpu"}):
        yield


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches instead of computing, as if every device had kernels. Tensors may be of the device ``meta``."""
    launches: list[Launch] = []

    def record(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        launches.append((kernel, grid, arguments, options))

    with patch.object(language, "devices", {"cuda", "cpu", "meta"}), patch.object(language, "launch", record):
        yield launches


@dataclass(frozen=True)
class Compiled:
    """A kernel compiled for a GPU: registers of a thread, bytes of its stack, bytes of a block's shared memory."""

    name: str
    registers: int
    stack: int
    shared: int


def compiled(launches: list[Launch], capability: int) -> list[Compiled]:
    """Compile what ``recorded`` recorded, each variant once, for a compute capability such as 86.

    Raises RuntimeError in a process that interprets.
    """
    if triton.knobs.runtime.interpret:
        raise RuntimeError("kernels of a process that interprets cannot be compiled: unset TRITON_INTERPRET")
    found: dict[tuple[str, str], tuple[ASTSource, dict[str, Any]]] = {}
    for launch in launches:
        source, options = _source(launch)
        found.setdefault((source.hash(), str(options)), (source, options))
    return [_resources(triton.compile(s, target=GPUTarget("cuda", capability, 32), options=o), s.name) for s, o in found.values()]


def _source(launch: Launch) -> tuple[ASTSource, dict[str, Any]]:
    kernel, _, arguments, options = launch
    constants = dict(options)
    build = {"num_warps": constants.pop("num_warps", 4), "num_stages": constants.pop("num_stages", 2), "enable_fp_fusion": True}
    from triton.backends.nvidia.compiler import CUDABackend

    named = dict(zip(kernel.arg_names, arguments, strict=False))
    signature, attributes = dict.fromkeys(kernel.arg_names, "constexpr"), {}
    for index, name in enumerate(kernel.arg_names):
        if name not in named:
            continue
        if kernel.params[index].is_constexpr:
            constants[name] = named[name]
            continue
        signature[name], key = _specialized(CUDABackend, named[name])
        if signature[name] == "constexpr":
            constants[name] = named[name]
        elif key:
            attributes[index,] = CUDABackend.parse_attr(key)
    return ASTSource(kernel, signature, constants, attributes), build


def _specialized(backend: Any, argument: Any) -> tuple[str, str | None]:
    """Type and properties under which Triton would compile for this argument; addresses are multiples of 16, as torch's are."""
    if isinstance(argument, torch.Tensor):
        offset = argument.storage_offset() * argument.itemsize
        return "*" + triton.runtime.jit.mangle_type(argument)[1:], "D" if offset % 16 == 0 else None
    return native_specialize_impl(backend, argument, False, True, True)


def _resources(binary: Any, name: str) -> Compiled:
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    line = next(line for line in text.splitlines() if "REG:" in line)
    usage = {key: int(value) for key, _, value in (part.partition(":") for part in line.split()) if value.isdigit()}
    return Compiled(name, usage["REG"], usage["STACK"] + usage.get("LOCAL", 0), binary.metadata.shared)


def main(capabilities: list[str]) -> int:
    """Compile what the tests of kernels launch at real sizes, and print what each variant takes. 1 if one exceeds a limit."""
    launches = [
        launch
        for file in sorted((Path(__file__).parents[1] / "kernels").glob("test_*.py"))
        if hasattr(module := importlib.import_module(f"kernels.{file.stem}"), "launches")
        for dtype in (torch.bfloat16, torch.float16, torch.float32)
        for launch in module.launches(dtype)
    ]
    status = 0
    for capability in capabilities:
        for name, variants in groupby(sorted(compiled(launches, int(capability)), key=attrgetter("name")), attrgetter("name")):
            found = list(variants)
            registers, stack, shared = (max(map(attrgetter(key), found)) for key in ("registers", "stack", "shared"))
            print(f"sm_{capability} {name}: {len(found)} variants, up to {registers} registers, {shared} bytes shared", end="")
            print(f", {stack} bytes of stack" if stack else "")
            status |= stack > LARGEST_STACK or shared > LARGEST_SHARED
    print("a kernel exceeds the limits" if status else "every kernel is within the limits")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["86", "89", "90"]))
