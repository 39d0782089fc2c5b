"""Triton, where torch is built for CUDA, and the one place from which kernels are launched.

Elsewhere kernels are defined, but cannot be launched, unless the environment has TRITON_INTERPRET: 1 computes them on tensors of
the CPU, in Triton's interpreter; 0 loads Triton as for a GPU, so that they can be compiled without one.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from typing import Any

import torch

from pipedec.config.environment import triton_interpret

HAS_TRITON = importlib.util.find_spec("triton") is not None and (torch.version.cuda or triton_interpret()) is not None
IS_INTERPRETED = HAS_TRITON and triton_interpret() == "1"

tl: Any = importlib.import_module("triton.language") if HAS_TRITON else None


def jit(kernel: Any) -> Any:
    """``triton.jit``; without Triton the function as it is. No kernel is compiled anew for another number of rows."""
    if not HAS_TRITON:
        return kernel
    varying = [name for name in inspect.signature(kernel).parameters if name == "num_rows"]
    return importlib.import_module("triton").jit(kernel, do_not_specialize=varying)


devices = {"cuda"} if HAS_TRITON else set[str]()  # types of devices on which kernels compute; elsewhere torch does


def has_kernels(device: torch.device, dtype: torch.dtype = torch.float32) -> bool:
    """Whether kernels are launched for tensors of a device. Those with sums or products say of which type these are."""
    return device.type in devices and dtype != torch.float64  # sums are of 32 bits


def launch(
    kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int = 4, num_stages: int = 2, **constants: Any
) -> None:
    """Launch a kernel. All launches pass here, by ``language.launch``, so that they can be counted, or compiled without a GPU.

    Args:
        grid: number of programs in each dimension.
        arguments: tensors and numbers.
        constants: the kernel's parameters that are known when it is compiled.
    """
    kernel[grid](*arguments, **constants, num_warps=num_warps, num_stages=num_stages, enable_fp_fusion=True)


def power_of_two(number: int) -> int:
    """The smallest power of two that is not below ``number``, and at least 16, as products of tiles need."""
    return max(16, 1 << (number - 1).bit_length())


def wide(dtype: torch.dtype) -> Any:
    """The type in which kernels compute with numbers of ``dtype`` that lie in memory: float32 or wider."""
    return tl.float64 if dtype == torch.float64 else tl.float32
