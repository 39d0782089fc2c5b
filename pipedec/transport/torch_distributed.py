"""Steps between processes over torch.distributed: gloo between all ranks, NCCL between stages on CUDA.

Owns the process groups and their deadlines. Headers, and whatever rank 0 sends or receives, go through host memory, so rank 0
needs no GPU; so do the steps of CUDA stages without NCCL (one GPU for several ranks).
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

BACKENDS = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",)}  # by name: where a stage may compute
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


@dataclass(frozen=True)
class _Link:
    """How steps reach a peer: in which group, through whose memory, and up to how many rows behind the header."""

    group: dist.ProcessGroup
    wire: torch.device
    inline_rows: int


class TorchTransport:
    """One rank's end of the process groups. Rank 0 sends steps without activations (it has no stage before it).

    ``backend`` is a wish for the steps between stages: NCCL is used if every stage asks for it.
    """

    def __init__(self, backend: str, rendezvous: Rendezvous, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        if backend not in BACKENDS:
            raise UserError(f"unknown transport {backend!r}: choose one of {', '.join(BACKENDS)}")
        if rendezvous.rank > 0 and device.type not in BACKENDS[backend]:
            raise UserError("transport nccl needs --device cuda; use gloo on a CPU")
        self._rendezvous = rendezvous
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._under_way: deque[tuple[Any, Tensor]] = deque()  # what is being sent, with its buffers
        self._awaited: dict[int, tuple[Any, Tensor]] = {}
        try:
            dist.init_process_group(
                "gloo",
                init_method=rendezvous.init_method,
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                timeout=timedelta(seconds=rendezvous.timeout_seconds),
            )
            # Once per timestep and rank: the checks that isend and irecv make before this call cost as much as the call.
            assert dist.group.WORLD is not None
            self._group = dist.group.WORLD
            self._host_link = _Link(self._group, torch.device("cpu"), _INLINE_ROWS)
            use_nccl = self._stages_want(backend == "nccl") and rendezvous.rank > 0
            self._stage_link = self._nccl_link() if use_nccl else self._host_link
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise RankLost(f"rank {rendezvous.rank} could not meet the other {rendezvous.world_size - 1}: {error}") from error

    def _stages_want(self, nccl: bool) -> bool:
        """Whether all stages want NCCL: with ``auto``, hosts with other GPUs may want something else. Rank 0 has no say."""
        wishes = torch.tensor([self._rendezvous.rank == 0 or nccl], dtype=torch.uint8)
        dist.all_reduce(wishes, dist.ReduceOp.MIN)
        return bool(wishes.item())

    def _nccl_link(self) -> _Link:
        """From device to device, in a group of all stages that rank 0 need not know of."""
        group = dist.new_group(
            range(1, self._rendezvous.world_size),
            timeout=timedelta(seconds=self._rendezvous.timeout_seconds),
            backend="nccl",
            use_local_synchronization=True,
            group_desc="stages",
            device_id=self._device,  # connects at once; the group of all ranks must have none, or torch tries to split it
        )
        return _Link(group, self._device, inline_rows=0)

    def _link(self, peer: int) -> _Link:
        return self._stage_link if peer > 0 else self._host_link

    def send(self, step: Step, dst: int) -> None:
        link = self._link(dst)
        message = self._packed(step, link.wire)
        try:
            dist.send(message, dst, link.group)
        except RuntimeError as error:
            raise self._lost(dst, "send to", error) from error

    def _packed(self, step: Step, wire: torch.device) -> Tensor:
        hidden_size = 0 if step.hidden is None else self._hidden_size
        size = message_bytes(step.num_rows, hidden_size, self._dtype)
        message = torch.empty(size, dtype=torch.uint8, device=wire)
        pack(step, message)
        return message

    def receive(self, num_rows: int, src: int) -> Step:
        link = self._link(src)
        size = message_bytes(num_rows, self._hidden_size_from(src), self._dtype)
        message = torch.empty(size, dtype=torch.uint8, device=link.wire)
        try:
            dist.recv(message, src, link.group)
        except RuntimeError as error:
            raise self._lost(src, "receive from", error) from error
        return self._unpacked(message, num_rows, src)

    def _unpacked(self, message: Tensor, num_rows: int, src: int) -> Step:
        hidden_size = self._hidden_size_from(src)
        step = unpack(message[: message_bytes(num_rows, hidden_size, self._dtype)], num_rows, hidden_size, self._dtype)
        if message.device == self._device:
            return step
        hidden = None if step.hidden is None else step.hidden.to(self._device)
        threads = None if step.threads is None else step.threads.to(self._device)
        return Step(step.token_ids.to(self._device), step.parents.to(self._device), hidden, threads)

    def _hidden_size_from(self, src: int) -> int:
        return 0 if src == 0 else self._hidden_size

    def send_envelope(self, envelope: Envelope, dst: int) -> None:
        step, link = envelope.step, self._link(dst)
        header = torch.empty(HEADER_VALUES, dtype=torch.int64)
        pack_header(envelope, header)
        message = header.view(torch.uint8)
        if step is not None and step.num_rows <= link.inline_rows:
            message = torch.cat([message, self._packed(step, link.wire)])
            step = None
        try:
            while len(self._under_way) >= _MAX_UNDER_WAY:
                self._under_way.popleft()[0].wait()
            self._under_way.append((self._group.send([message], dst, _HEADER_TAG), message))
            if step is not None:
                body = self._packed(step, link.wire)
                self._under_way.append((dist.isend(body, dst, link.group), body))
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
        if num_rows > self._link(src).inline_rows:
            return Envelope(self.receive(num_rows, src), verdict)
        return Envelope(self._unpacked(message[HEADER_BYTES:], num_rows, src) if num_rows else None, verdict)

    def _await_header(self, src: int) -> tuple[Any, Tensor]:
        """Post the receive of a header before it is sent, so that it finds its buffer: with room for the rows behind it.

        gloo lets a message be shorter than the buffer it is received into.
        """
        room = message_bytes(self._link(src).inline_rows, self._hidden_size_from(src), self._dtype)
        message = torch.empty(HEADER_BYTES + room, dtype=torch.uint8)
        return self._group.recv([message], src, _HEADER_TAG), message

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _lost(self, peer: int, action: str, error: Exception) -> RankLost:
        reason = str(error).split(". ")[0].splitlines()[0][:160]
        return RankLost(f"rank {self._rendezvous.rank} could not {action} rank {peer}: {reason}")
