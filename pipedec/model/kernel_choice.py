"""Whether kernels compute on a device: if users want them, and if a small one computes what torch does."""

from __future__ import annotations

import logging

import torch

from pipedec.families import LayerShape
from pipedec.model.attention import LaneAttention, LayersShape, TableAttention
from pipedec.model.cache import KVCache, KVPool
from pipedec.model.kernels import language, matmul
from pipedec.model.row_tables import RowTables
from pipedec.model.rows import LaneRows

logger = logging.getLogger(__name__)

_tried = set[tuple[str, torch.dtype]]()  # types of devices and of numbers for which kernels compute as torch does
_failures: dict[str, str] = {}  # reasons why torch computes on devices of a type


def choose_kernels(given: str, device: torch.device, dtype: torch.dtype) -> str:
    """Choose what computes from now on, in this process, on devices of this type: kernels, or torch alone.

    Args:
        given: the setting ``kernels``.
        dtype: of activations.

    Returns:
        The reason of the choice, for users.
    """
    if given == "torch":
        language.devices.discard(device.type)
        return "as given"
    if why := _failures.get(device.type):
        return why
    if not language.has_kernels(device):
        return "kernels need CUDA" if device.type != "cuda" else "the package triton is not installed"
    if not language.has_kernels(device, dtype):
        return "float64 is left to torch"
    if (device.type, dtype) not in _tried:
        if why := _failure(device, dtype):
            _failures[device.type] = why
            language.devices.discard(device.type)
            logger.warning("kernels are not used: %s", why)
            return why
        _tried.add((device.type, dtype))
    return "first kernels computed what torch does"


def _failure(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why a first attention and a first product do not compute on the device; None if they compute as their references."""
    try:
        pairs = _attended(device, dtype), _multiplied(device, dtype)
    except Exception as error:  # of Triton, which reports what a host lacks in many types of errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"Triton does not work here ({reason})"
    difference = max((found - expected).abs().max().item() for found, expected in pairs)
    largest = 1e-4 if dtype == torch.float32 else 5e-2  # of numbers around 1
    return None if difference < largest else f"Triton computes something else here (a difference of {difference:.2g})"


def _attended(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of a request that follow 50 others, by the kernel and by torch."""
    shape = LayersShape({0: LayerShape(num_heads=4, num_kv_heads=2, key_dim=64, value_dim=64)}, 256, dtype)
    pool = KVPool([shape.layers[0].cached], shape.dtype, 64, device=device)
    generator = torch.Generator().manual_seed(0)
    for plane in pool.planes:
        plane.copy_(torch.randn(plane.shape, generator=generator))
    cache = KVCache(pool, ((0, 64),))
    cache.append(50, to_past=True)
    lanes = [LaneRows(torch.arange(50, 54, device=device), cache, prefill_length=54)]
    queries_RHD = torch.randn(4, 4, 64, generator=generator).to(device, dtype)
    tables = RowTables.of(lanes, shape.tile_tokens, shape.has_reach)
    by_kernel = TableAttention(tables, lanes[0].positions, pool, shape).attend(queries_RHD, 0)
    return by_kernel, LaneAttention(lanes, shape).attend(queries_RHD, 0)


def _multiplied(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows by a matrix, by the kernel and by torch."""
    generator = torch.Generator().manual_seed(0)
    rows_PK = torch.randn(4, 128, generator=generator).to(device, dtype)
    weight_NK = (torch.randn(64, 128, generator=generator) / 128**0.5).to(device, dtype)
    return matmul.matmul(rows_PK, matmul.plain_weights(weight_NK)), matmul.reference(rows_PK, weight_NK)
