"""Steps between processes over torch.distributed: gloo on CPU, NCCL on CUDA.

Owns the process group and its deadlines. A CUDA rank without NCCL (one GPU for several ranks) sends through host memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from pipedec.core import RankLost, Step, UserError
from pipedec.transport.base import message_bytes, pack, unpack

BACKENDS = ("gloo", "nccl")


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of a run meet. ``init_method`` is torch's URL form (``env://`` under torchrun, ``file://…``)."""

    rank: int
    world_size: int
    init_method: str
    timeout_seconds: float


class TorchTransport:
    """One rank's end of the process group. Rank 0 sends steps without activations (it has no stage before it)."""

    def __init__(self, backend: str, rendezvous: Rendezvous, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        if backend not in BACKENDS:
            raise UserError(f"unknown transport {backend!r}: choose one of {', '.join(BACKENDS)}")
        if backend == "nccl" and device.type != "cuda":
            raise UserError("transport nccl needs --device cuda; use gloo on a CPU")
        self._rendezvous = rendezvous
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._wire = device if backend == "nccl" else torch.device("cpu")
        try:
            dist.init_process_group(
                backend,
                init_method=rendezvous.init_method,
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                timeout=timedelta(seconds=rendezvous.timeout_seconds),
                device_id=device if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise RankLost(f"rank {rendezvous.rank} could not meet the other {rendezvous.world_size - 1}: {error}") from error

    def send(self, step: Step, dst: int) -> None:
        hidden_size = 0 if step.hidden is None else self._hidden_size
        size = message_bytes(step.num_rows, hidden_size, self._dtype)
        message = torch.empty(size, dtype=torch.uint8, device=self._wire)
        pack(step, message)
        try:
            dist.send(message, dst)
        except RuntimeError as error:
            raise self._lost(dst, "send to", error) from error

    def receive(self, num_rows: int, src: int) -> Step:
        hidden_size = 0 if src == 0 else self._hidden_size
        size = message_bytes(num_rows, hidden_size, self._dtype)
        message = torch.empty(size, dtype=torch.uint8, device=self._wire)
        try:
            dist.recv(message, src)
        except RuntimeError as error:
            raise self._lost(src, "receive from", error) from error
        step = unpack(message, num_rows, hidden_size, self._dtype)
        if self._wire == self._device:
            return step
        hidden = None if step.hidden is None else step.hidden.to(self._device)
        return Step(step.token_ids.to(self._device), step.parents.to(self._device), hidden)

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _lost(self, peer: int, action: str, error: Exception) -> RankLost:
        reason = str(error).split(". ")[0].splitlines()[0][:160]
        return RankLost(f"rank {self._rendezvous.rank} could not {action} rank {peer}: {reason}")
