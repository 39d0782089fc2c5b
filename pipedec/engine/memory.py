"""Checks that a GPU has memory for the ranks that are about to load there, and for how many tokens of keys and values.

Memory of a killed process may be freed late, so a rank that lacks memory waits before it gives up.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from pipedec.core import UserError
from pipedec.engine.devices import free_memory
from pipedec.hardware import GIGA
from pipedec.plan.costs import CONTEXT_BYTES
from pipedec.plan.kv_memory import GpuMemory, tokens_beside
from pipedec.plan.spec import PipelineSpec

FREED_SECONDS = 10.0  # in which the driver frees the memory of a process that was killed
_POLL_SECONDS = 0.2
logger = logging.getLogger(__name__)

FreeMemory = Callable[[torch.device], GpuMemory]
_Made = TypeVar("_Made")


def measured_tokens(
    spec: PipelineSpec, ranks: Sequence[int], device: torch.device, who: str, slots: int | None = None,
    free: FreeMemory = free_memory, patience_seconds: float = FREED_SECONDS,
) -> int:  # fmt: skip
    """How many tokens each of ``ranks``, which share a GPU, has memory for, before any of them loads its weights.

    Args:
        who: the ranks as a message names them.
        slots: of the KV pools, if already known.
        free: returns the memory of a GPU.

    Raises:
        UserError: it is too little for ``slots``, or for the smallest pool with which the pipeline can work.
    """
    limits = spec.settings.limits
    needed = slots or spec.kv_budget().needed(limits.max_model_len, spec.knee)
    needs = [spec.needs(rank) for rank in ranks]
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
                f"{_shown(memory, limits.gpu_memory_utilization, device, len(ranks))}"
            )
        if not is_waiting:
            is_waiting = True
            logger.warning("waits up to %.0f s for GPU memory: room for %d tokens, needs %d", patience_seconds, tokens, needed)
        time.sleep(_POLL_SECONDS)


def with_measured_memory(spec: PipelineSpec, device: torch.device, free: FreeMemory = free_memory) -> PipelineSpec:
    """A pipeline whose ranks all share ``device``, with as many slots as it has memory for. Unchanged on a processor.

    Raises:
        UserError: it has too little.
    """
    if device.type != "cuda" or not spec.measures_memory:
        return spec
    ranks = range(0 if spec.draft is not None else 1, len(spec.layers) + 1)
    tokens = measured_tokens(spec, ranks, device, "the pipeline", free=free)
    rooms = {rank: tokens * spec.needs(rank).token_bytes for rank in ranks}
    return replace(spec, agreed_slots=spec.agreed_budget(rooms).tokens)


def allocated(load: Callable[[], _Made], who: str, patience_seconds: float = FREED_SECONDS) -> _Made:
    """Return the result of ``load``, which is called again while its GPU has too little memory.

    Raises:
        UserError: it has too little for ``patience_seconds``, counted from the first refusal: loading may take minutes.
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


def _shown(memory: GpuMemory, utilization: float, device: torch.device, num_ranks: int) -> str:
    """A sentence on the memory of a GPU, and how to make room."""
    others = memory.total - memory.free - num_ranks * CONTEXT_BYTES
    held, mend = (f", other processes hold {_gb(others)}", "end them, ") if others > CONTEXT_BYTES else ("", "")
    usable = max(0, memory.usable(utilization))
    return (
        f"GPU #{device.index or 0} has {_gb(memory.free)} free of {_gb(memory.total)}{held}, and of that may be used "
        f"{_gb(usable)} (--gpu-memory-utilization {utilization:g}): {mend}use more stages, quantize, or lower --max-model-len"
    )


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / GIGA:.1f} GB"
