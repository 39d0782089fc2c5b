"""The devices of this machine: which one a rank uses, which data types are fast on it, and how much memory is free.

Nothing is timed, so all but the free memory is the same at every start.
"""

from __future__ import annotations

import torch

from pipedec.config import AUTO, onednn_limit
from pipedec.core import UserError
from pipedec.hardware import DEVICES
from pipedec.plan.dtypes import Arithmetic
from pipedec.plan.kv_memory import GpuMemory
from pipedec.plan.spec import PipelineSpec

_BFLOAT16_CAPABILITY = (8, 0)  # compute capability of the first GPUs that compute it
_LIMITS_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")


def arithmetic_of(device: torch.device) -> Arithmetic:
    """Return which data types are fast on a device; for ``cuda`` without an index, on all GPUs."""
    if device.type != "cuda":
        return Arithmetic(is_gpu=False, has_bfloat16=_processor_has_bfloat16())
    indices = range(torch.cuda.device_count()) if device.index is None else [device.index]
    capabilities = [torch.cuda.get_device_capability(index) for index in indices]
    return Arithmetic(is_gpu=True, has_bfloat16=all(one >= _BFLOAT16_CAPABILITY for one in capabilities))


def _processor_has_bfloat16() -> bool:
    """Whether the processor has AVX512_BF16, as processors with AMX do, and oneDNN, which computes the products, may use it.

    oneDNN itself claims bfloat16 from AVX512 on, and widens it to float32 where there are no instructions.
    """
    is_allowed = torch.backends.mkldnn.is_available() and onednn_limit() not in _LIMITS_WITHOUT_BFLOAT16
    return is_allowed and torch.cpu._is_avx512_bf16_supported()


def num_gpus() -> int:
    """GPUs that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_memory(device: torch.device) -> GpuMemory:
    """The memory of a GPU. Memory that this process keeps for reuse counts as free."""
    torch.cuda.empty_cache()
    return GpuMemory(*torch.cuda.mem_get_info(device))


def gpu_id(device: torch.device) -> str:
    """An identifier of the GPU that is the same in all processes, even if they number it differently; empty for a processor."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def gpu_names() -> list[str]:
    """Names of the GPUs that torch can use here, as their driver reports them."""
    return [torch.cuda.get_device_name(index) for index in range(num_gpus())]


def rank_device(spec: PipelineSpec, rank: int, local_rank: int, gpus: int | None = None) -> torch.device:
    """The device of a rank of a cluster. Rank 0 without a draft computes nothing and uses the CPU.

    Without places, the stages of a host have consecutive local ranks. So each gets a GPU of its own if there are as many GPUs as
    stages, also if a rank 0 that computes nothing is on the host.

    Args:
        gpus: GPUs of this host; None counts them.

    Raises:
        UserError: this host has no such GPU.
    """
    if rank == 0 and spec.draft is None:
        return torch.device("cpu")
    device = spec.settings.cut.device
    if spec.places is None or device != AUTO:
        return chosen_device(device, local_rank, gpus)
    place = spec.places[rank]
    if not DEVICES[place.device].is_gpu:
        return torch.device("cpu")
    found = num_gpus() if gpus is None else gpus
    if place.index >= found:
        raise UserError(
            f"{place.host} has no {place.device} #{place.index}: torch sees {found} GPUs there: run `pipedec doctor`, and "
            "check CUDA_VISIBLE_DEVICES"
        )
    return torch.device("cuda", place.index)


def chosen_device(name: str, local_rank: int = 0, gpus: int | None = None) -> torch.device:
    """Resolve the setting ``device``; ``auto`` prefers CUDA.

    Args:
        gpus: GPUs of this machine; None counts them.

    Raises:
        UserError: CUDA is requested but not available.
    """
    gpus = num_gpus() if gpus is None else gpus
    if name == "cpu" or (name == AUTO and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError("--device cuda, but torch sees no GPU here: install a CUDA build of torch, or use --device cpu")
    return torch.device("cuda", local_rank % gpus)
