"""Whether kernels compute on a device: if users want them, and if a small one computes what torch does."""

from __future__ import annotations

import logging
from functools import cache

import torch

from pipedec.families import LayerShape
from pipedec.model.attention import LaneAttention, LayersShape, TableAttention
from pipedec.model.cache import KVCache, KVPool
from pipedec.model.kernels import language
from pipedec.model.row_tables import RowTables
from pipedec.model.rows import LaneRows

logger = logging.getLogger(__name__)


@cache
def choose_kernels(given: str, device: torch.device) -> str:
    """Choose what computes from now on, in this process, on devices of this type: kernels, or torch alone.

    Args:
        given: the setting ``kernels``.

    Returns:
        The reason of the choice, for users.
    """
    if given == "torch":
        language.devices.discard(device.type)
        return "as given"
    if not language.has_kernels(device):
        return "kernels need CUDA" if device.type != "cuda" else "the package triton is not installed"
    if why := _failure(device):
        language.devices.discard(device.type)
        logger.warning("kernels are not used: %s", why)
        return why
    return "a first kernel computed what torch does"


def _failure(device: torch.device) -> str | None:
    """Why a first attention does not compute on the device; None if it computes as its reference."""
    try:
        found, expected = _attended(device)
    except Exception as error:  # of Triton, which reports what a host lacks in many types of errors
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        return f"Triton does not work here ({reason})"
    difference = (found - expected).abs().max().item()
    return None if difference < 1e-4 else f"Triton computes something else here (a difference of {difference:.2g})"


def _attended(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Four rows of a request that follow 50 others, by the kernel and by torch."""
    shape = LayersShape({0: LayerShape(num_heads=4, num_kv_heads=2, key_dim=64, value_dim=64)}, 256, torch.float32)
    pool = KVPool([shape.layers[0].cached], shape.dtype, 64, device=device)
    generator = torch.Generator().manual_seed(0)
    for plane in pool.planes:
        plane.copy_(torch.randn(plane.shape, generator=generator))
    cache = KVCache(pool, ((0, 64),))
    cache.append(50, to_past=True)
    lanes = [LaneRows(torch.arange(50, 54, device=device), cache, prefill_length=54)]
    queries_RHD = torch.randn(4, 4, 64, generator=generator).to(device)
    tables = RowTables.of(lanes, shape.tile_tokens, shape.has_reach)
    by_kernel = TableAttention(tables, lanes[0].positions, pool, shape).attend(queries_RHD, 0)
    return by_kernel, LaneAttention(lanes, shape).attend(queries_RHD, 0)
