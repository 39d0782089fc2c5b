"""Memory for the slices of a matrix that are widened one after another.

On a processor each thread writes them all to the same place: new memory, which the system maps page by page, costs more time than
widening. GPUs have torch's own pool.
"""

from __future__ import annotations

import math
import threading

import torch
from torch import Tensor

from pipedec.formats.base import Shape

_KEPT_VALUES = 1 << 21  # more are not kept


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.by_dtype: dict[torch.dtype, Tensor] = {}


_buffers = _Buffers()


def scratch(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without values, which the next call in this thread may overwrite."""
    size = math.prod(shape)
    if device.type != "cpu" or size > _KEPT_VALUES:
        return torch.empty(shape, dtype=dtype, device=device)
    found = _buffers.by_dtype.get(dtype)
    if found is None or len(found) < size:
        with torch.inference_mode(False):  # can be written to in either mode
            found = _buffers.by_dtype[dtype] = torch.empty(size, dtype=dtype)
    return found[:size].view(shape)
