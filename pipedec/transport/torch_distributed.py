"""Steps between processes over torch.distributed: gloo on CPU, NCCL on CUDA.

Owns the process group and its deadlines. A CUDA rank without NCCL (one GPU for several ranks) sends through host memory.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipedec.core import RankLost, Step, UserError
from pipedec.transport.base import HEADER_BYTES, HEADER_VALUES, Envelope, message_bytes, pack, pack_header, unpack, unpack_header

BACKENDS = ("gloo", "nccl")
_MAX_UNDER_WAY = 16  # messages sent and not yet taken: a receiver that is behind holds its sender up only then
_HEADER_TAG = 1  # headers of envelopes are awaited ahead of time and must not be taken for steps
_INLINE_ROWS = 128  # larger steps follow the header of their envelope in a message of their own


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
        # gloo carries the rows of a step behind the header of its envelope, NCCL in a message between devices.
        self._inline_rows = 0 if backend == "nccl" else _INLINE_ROWS
        self._under_way: deque[tuple[Any, Tensor]] = deque()  # what is being sent, with its buffers
        self._awaited: dict[int, tuple[Any, Tensor]] = {}
        try:
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if backend == "nccl" else backend,  # headers travel through host memory
                init_method=rendezvous.init_method,
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                timeout=timedelta(seconds=rendezvous.timeout_seconds),
                device_id=device if backend == "nccl" else None,
            )
            # Once per timestep and rank: the checks that isend and irecv make before this call cost as much as the call.
            assert dist.group.WORLD is not None
            self._group = dist.group.WORLD
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise RankLost(f"rank {rendezvous.rank} could not meet the other {rendezvous.world_size - 1}: {error}") from error

    def send(self, step: Step, dst: int) -> None:
        message = self._packed(step)
        try:
            dist.send(message, dst)
        except RuntimeError as error:
            raise self._lost(dst, "send to", error) from error

    def _packed(self, step: Step) -> Tensor:
        hidden_size = 0 if step.hidden is None else self._hidden_size
        size = message_bytes(step.num_rows, hidden_size, self._dtype)
        message = torch.empty(size, dtype=torch.uint8, device=self._wire)
        pack(step, message)
        return message

    def receive(self, num_rows: int, src: int) -> Step:
        size = message_bytes(num_rows, self._hidden_size_from(src), self._dtype)
        message = torch.empty(size, dtype=torch.uint8, device=self._wire)
        try:
            dist.recv(message, src)
        except RuntimeError as error:
            raise self._lost(src, "receive from", error) from error
        return self._unpacked(message, num_rows, src)

    def _unpacked(self, message: Tensor, num_rows: int, src: int) -> Step:
        hidden_size = self._hidden_size_from(src)
        step = unpack(message[: message_bytes(num_rows, hidden_size, self._dtype)], num_rows, hidden_size, self._dtype)
        if self._wire == self._device:
            return step
        hidden = None if step.hidden is None else step.hidden.to(self._device)
        return Step(step.token_ids.to(self._device), step.parents.to(self._device), hidden)

    def _hidden_size_from(self, src: int) -> int:
        return 0 if src == 0 else self._hidden_size

    def send_envelope(self, envelope: Envelope, dst: int) -> None:
        step = envelope.step
        header = torch.empty(HEADER_VALUES, dtype=torch.int64)
        pack_header(envelope, header)
        message = header.view(torch.uint8)
        if step is not None and step.num_rows <= self._inline_rows:
            message = torch.cat([message, self._packed(step)])
            step = None
        try:
            while len(self._under_way) >= _MAX_UNDER_WAY:
                self._under_way.popleft()[0].wait()
            self._under_way.append((self._group.send([message], dst, _HEADER_TAG), message))
            if step is not None:
                body = self._packed(step)
                self._under_way.append((dist.isend(body, dst), body))
        except RuntimeError as error:
            raise self._lost(dst, "send to", error) from error

    def receive_envelope(self, src: int) -> Envelope:
        try:
            work, message = self._awaited.pop(src) if src in self._awaited else self._await_header(src)
            work.wait()
        except RuntimeError as error:
            raise self._lost(src, "receive from", error) from error
        num_rows, verdict = unpack_header(message[:HEADER_BYTES].view(torch.int64))
        if verdict is None or verdict.finished is None:
            self._awaited[src] = self._await_header(src)
        if num_rows > self._inline_rows:
            return Envelope(self.receive(num_rows, src), verdict)
        return Envelope(self._unpacked(message[HEADER_BYTES:], num_rows, src) if num_rows else None, verdict)

    def _await_header(self, src: int) -> tuple[Any, Tensor]:
        """Post the receive of a header before it is sent, so that it finds its buffer: with room for the rows behind it.

        gloo lets a message be shorter than the buffer it is received into.
        """
        room = message_bytes(self._inline_rows, self._hidden_size_from(src), self._dtype)
        message = torch.empty(HEADER_BYTES + room, dtype=torch.uint8)
        return self._group.recv([message], src, _HEADER_TAG), message

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _lost(self, peer: int, action: str, error: Exception) -> RankLost:
        reason = str(error).split(". ")[0].splitlines()[0][:160]
        return RankLost(f"rank {self._rendezvous.rank} could not {action} rank {peer}: {reason}")
