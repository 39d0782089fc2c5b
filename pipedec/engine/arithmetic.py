"""Ask the devices of this machine what they compute fast. Nothing is timed, so the answer is the same at every start."""

from __future__ import annotations

import torch

from pipedec.config import onednn_limit
from pipedec.plan.dtypes import Arithmetic

_BFLOAT16_CAPABILITY = (8, 0)  # compute capability of the first GPUs that compute it
_LIMITS_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


def arithmetic_of(device: torch.device) -> Arithmetic:
    """Return what a device computes fast; for ``cuda`` without an index, what all GPUs have in common."""
    if device.type != "cuda":
        return Arithmetic(is_gpu=False, has_bfloat16=_processor_has_bfloat16())
    indices = range(torch.cuda.device_count()) if device.index is None else [device.index]
    capabilities = [torch.cuda.get_device_capability(index) for index in indices]
    return Arithmetic(is_gpu=True, has_bfloat16=all(one >= _BFLOAT16_CAPABILITY for one in capabilities))


def _processor_has_bfloat16() -> bool:
    """AVX512_BF16, which processors with AMX have too, unless oneDNN, which computes the products, may not use it.

    oneDNN itself claims bfloat16 from AVX512 on, and widens it to float32 where there are no instructions.
    """
    is_allowed = torch.backends.mkldnn.is_available() and onednn_limit() not in _LIMITS_WITHOUT_BFLOAT16
    return is_allowed and torch.cpu._is_avx512_bf16_supported()
