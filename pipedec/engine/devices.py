"""The devices of this machine: which one a rank uses, which data types are fast on it, and for how many tokens it has memory.

Nothing is timed, so all but the free memory is the same at every start. Memory of a killed process may be freed late, so a rank
that lacks memory waits before it gives up.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from pipedec.config import AUTO
from pipedec.config.environment import onednn_limit, usable_cpus, usable_memory
from pipedec.core.errors import UserError
from pipedec.families import ModelConfig
from pipedec.formats import ALL_PLAIN, DTYPE_BYTES
from pipedec.hardware import DEVICES, GIGA
from pipedec.messages.run import Choice
from pipedec.model.formats import Widens, as_stored
from pipedec.plan.budgets import agreed_budget, kv_budget, rank_needs
from pipedec.plan.costs import CONTEXT_BYTES
from pipedec.plan.dtypes import GIVEN, Arithmetic
from pipedec.plan.kv_memory import GpuMemory, tokens_beside
from pipedec.plan.spec import PipelineSpec

FREED_SECONDS = 10.0  # in which the driver frees the memory of a process that was killed
_POLL_SECONDS = 0.2
_BFLOAT16_CAPABILITY = (8, 0)  # compute capability of the first GPUs that compute it
_LIMITS_WITHOUT_BFLOAT16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2", "AVX512_CORE", "AVX512_CORE_VNNI")
logger = logging.getLogger(__name__)
FreeMemory = Callable[[torch.device], GpuMemory]
_Made = TypeVar("_Made")


def arithmetic_of(device: torch.device) -> Arithmetic:
    """The data types that are fast on a device; for ``cuda`` without an index, on all GPUs."""
    if device.type != "cuda":
        # The processor needs AVX512_BF16, and oneDNN, which computes the products, must be allowed to use it. oneDNN itself
        # reports bfloat16 from AVX512 on, but widens it to float32 where there are no instructions for it.
        is_allowed = torch.backends.mkldnn.is_available() and onednn_limit() not in _LIMITS_WITHOUT_BFLOAT16
        return Arithmetic(is_gpu=False, has_bfloat16=is_allowed and torch.cpu._is_avx512_bf16_supported())
    indices = range(torch.cuda.device_count()) if device.index is None else [device.index]
    capabilities = [torch.cuda.get_device_capability(index) for index in indices]
    return Arithmetic(is_gpu=True, has_bfloat16=all(one >= _BFLOAT16_CAPABILITY for one in capabilities))


def limit_threads(processes: int = 1) -> None:
    """Let torch compute on this process's share of the CPUs that ``processes`` share, or on fewer, as OMP_NUM_THREADS says."""
    torch.set_num_threads(max(1, min(usable_cpus() // processes, torch.get_num_threads())))


def widened_weights(config: ModelConfig, dtype: str, device: torch.device, given: str) -> tuple[Widens, Choice | None]:
    """Which of the matrices that a checkpoint stores in fewer bits are widened to ``dtype`` as they are read, and how users read
    it; None where nothing is stored so.

    Args:
        given: the setting ``dequantize``. For ``auto``, a GPU keeps all as stored. A CPU widens those for which it has no kernel
            if the whole model then takes half of the machine's memory at the most: it would else widen them in every forward.
            torch's kernels widen weights again for every few rows: with them answers come twice as fast, also by speculation,
            but prompts take up to three times as long as on a CPU with instructions for bfloat16 (SmolLM2-135M).
    """
    stored = config.formats.title
    if config.formats is ALL_PLAIN:
        return as_stored, None
    if given == "always":
        return lambda format: True, Choice(f"{stored}, widened", GIVEN)
    if given == "never" or device.type != "cpu":
        return as_stored, Choice(f"{stored}, as stored", GIVEN if given == "never" else "on a GPU")
    wide, memory = config.parameters * DTYPE_BYTES[dtype], usable_memory()
    if wide > memory // 2:
        return as_stored, Choice(f"{stored}, as stored", f"widened they take {_gb(wide)}, more than half of {_gb(memory)} here")
    has_kernels = torch.backends.cpu.get_cpu_capability() != "DEFAULT"
    return (
        lambda format: not (has_kernels and format.has_kernel(dtype)),
        Choice(f"{stored}, widened where torch has no kernel", "that is faster, and fits into memory"),
    )


def num_gpus() -> int:
    """GPUs that torch can use here."""
    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def free_memory(device: torch.device) -> GpuMemory:
    """The memory of a GPU; what this process keeps for reuse counts as free."""
    torch.cuda.empty_cache()
    return GpuMemory(*torch.cuda.mem_get_info(device))


def gpu_id(device: torch.device) -> str:
    """An identifier of the GPU that is the same in all processes, even if they number it differently; empty for a CPU."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def gpu_names() -> list[str]:
    """Names of the GPUs that torch can use here, as their driver reports them."""
    return [torch.cuda.get_device_name(index) for index in range(num_gpus())]


def rank_device(spec: PipelineSpec, rank: int, local_rank: int, gpus: int | None = None) -> torch.device:
    """The device of a rank of a cluster. Rank 0 without a draft computes nothing and uses the CPU. Raises UserError if this
    host, which has ``gpus`` GPUs (None counts them), has no such GPU.

    Without places, the stages of a host have consecutive local ranks. So each gets a GPU of its own if there are as many GPUs
    as stages, also if a rank 0 that computes nothing is on the host.
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
    """Resolve the setting ``device``; ``auto`` prefers CUDA. Raises UserError if CUDA is requested but not available."""
    gpus = num_gpus() if gpus is None else gpus
    if name == "cpu" or (name == AUTO and not gpus):
        return torch.device("cpu")
    if not gpus:
        raise UserError("--device cuda, but torch sees no GPU here: install a CUDA build of torch, or use --device cpu")
    return torch.device("cuda", local_rank % gpus)


def measured_tokens(
    spec: PipelineSpec, ranks: Sequence[int], device: torch.device, who: str, slots: int | None = None,
    free: FreeMemory = free_memory, patience_seconds: float = FREED_SECONDS,
) -> int:  # fmt: skip
    """How many tokens each of ``ranks``, which share a GPU, has memory for, before any of them loads its weights.

    Raises:
        UserError: after ``patience_seconds`` that is still too little for ``slots``, or for the smallest pool with which the
            pipeline can work. It names the ranks as ``who``.
    """
    limits = spec.settings.limits
    needed = slots or kv_budget(spec).needed(limits.max_model_len, spec.knee)
    needs = [rank_needs(spec, rank) for rank in ranks]
    deadline, is_waiting = time.monotonic() + patience_seconds, False
    while True:
        memory = free(device)
        tokens = tokens_beside(memory.usable(limits.gpu_memory_utilization), needs)
        if tokens >= needed:
            logger.info("%s free of %s on the GPU: room for %d tokens of %s", _gb(memory.free), _gb(memory.total), tokens, who)
            return tokens
        if time.monotonic() >= deadline:
            needed_bytes = sum(one.fixed_bytes + needed * one.token_bytes for one in needs)
            raise UserError(
                f"{who} cannot load: weights, workspace, and keys and values of {needed:,} tokens need {_gb(needed_bytes)}, but "
                f"{_memory_and_remedy(memory, limits.gpu_memory_utilization, device, len(ranks))}"
            )
        if not is_waiting:
            is_waiting = True
            logger.warning("waits up to %.0f s for GPU memory: room for %d tokens, needs %d", patience_seconds, tokens, needed)
        time.sleep(_POLL_SECONDS)


def with_measured_memory(spec: PipelineSpec, device: torch.device, free: FreeMemory = free_memory) -> PipelineSpec:
    """The pipeline with as many slots as ``device``, if a GPU, has memory for. Raises UserError if these are too few."""
    if device.type != "cuda" or not spec.measures_memory:
        return spec
    ranks = range(0 if spec.draft is not None else 1, len(spec.layers) + 1)
    tokens = measured_tokens(spec, ranks, device, "the pipeline", free=free)
    rooms = {rank: tokens * rank_needs(spec, rank).token_bytes for rank in ranks}
    return replace(spec, agreed_slots=agreed_budget(spec, rooms).tokens)


def allocated(load: Callable[[], _Made], who: str, patience_seconds: float = FREED_SECONDS) -> _Made:
    """The result of ``load``, called again while its GPU has too little memory. Raises UserError, which names the rank as
    ``who``, ``patience_seconds`` after the first failure.
    """
    deadline: float | None = None
    while True:
        try:
            return load()
        except torch.OutOfMemoryError as error:
            reason = str(error).partition("\n")[0]
        if deadline is None:
            deadline = time.monotonic() + patience_seconds
            logger.warning("waits up to %.0f s for GPU memory: %s", patience_seconds, reason)
        gc.collect()  # frees the parts that were loaded, now that the frames of the error are gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if time.monotonic() >= deadline:
            raise UserError(
                f"{who} cannot load ({reason}): end other processes on its GPU, lower --gpu-memory-utilization or "
                "--kv-cache-memory, or use more stages"
            )
        time.sleep(_POLL_SECONDS)


def _memory_and_remedy(memory: GpuMemory, utilization: float, device: torch.device, num_ranks: int) -> str:
    """The end of a message: the memory of a GPU, and how to make room."""
    others = memory.total - memory.free - num_ranks * CONTEXT_BYTES
    held, remedy = (f", other processes hold {_gb(others)}", "end them, ") if others > CONTEXT_BYTES else ("", "")
    usable = max(0, memory.usable(utilization))
    return (
        f"GPU #{device.index or 0} has {_gb(memory.free)} free of {_gb(memory.total)}{held}, and of that may be used "
        f"{_gb(usable)} (--gpu-memory-utilization {utilization:g}): {remedy}use more stages, quantize, or lower --max-model-len"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GIGA:.1f} GB"
