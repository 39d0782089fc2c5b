"""Transfers between processes over torch.distributed: gloo between all ranks, NCCL between stages on CUDA.

Owns the process groups and their timeouts. Headers, and all messages from and to rank 0, go through host memory, so rank 0
needs no GPU. So do the steps of CUDA stages that do not use NCCL (several ranks on one GPU).
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

BACKENDS = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",)}  # name: device types that a stage may use
_MAX_PENDING_SENDS = 16  # a sender waits for a slow receiver only when this many messages are pending
_HEADER_TAG = 1  # receives of headers are posted early; the tag keeps them from matching steps
_INLINE_ROWS = 128  # steps of more rows are sent in a separate message behind the header


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of a run find each other. ``init_method`` is a torch URL (``env://`` under torchrun, ``file://…``)."""

    rank: int
    world_size: int
    init_method: str
    timeout_seconds: float


@dataclass(frozen=True)
class _Link:
    """How steps reach a peer.

    Attributes:
        group: the process group of the transfers.
        buffer_device: where messages are packed and received.
        inline_rows: the most rows that are sent in the same message as the envelope's header.
    """

    group: dist.ProcessGroup
    buffer_device: torch.device
    inline_rows: int


class TorchTransport:
    """One rank's member of the process groups. Steps from rank 0 have no activations.

    Args:
        backend: for steps between stages, ``gloo`` or ``nccl``; NCCL is used only if every stage requests it.
        rendezvous: how to find the other ranks.
        hidden_size: width of the activations.
        dtype: dtype of the activations.
        device: device of this rank's steps.

    Raises:
        UserError: the backend is unknown or does not work on ``device``.
        RankLost: the other ranks did not join in time.
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
        self._pending_sends: deque[tuple[Any, Tensor]] = deque()  # with the buffers being sent
        self._pending_receives: dict[int, tuple[Any, Tensor]] = {}  # of headers, by sender
        try:
            dist.init_process_group(
                "gloo",
                init_method=rendezvous.init_method,
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                timeout=timedelta(seconds=rendezvous.timeout_seconds),
            )
            # Headers are sent by the group itself: the checks in dist.isend and dist.irecv cost as much as the transfer.
            assert dist.group.WORLD is not None
            self._group = dist.group.WORLD
            self._host_link = _Link(self._group, torch.device("cpu"), _INLINE_ROWS)
            use_nccl = self._all_stages_request_nccl(backend == "nccl") and rendezvous.rank > 0
            self._stage_link = self._nccl_link() if use_nccl else self._host_link
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise RankLost(f"rank {rendezvous.rank} could not join the {rendezvous.world_size} ranks: {error}") from error

    def _all_stages_request_nccl(self, requested: bool) -> bool:
        """Whether every stage requests NCCL: with ``auto``, stages on different hosts may choose differently. Rank 0 abstains."""
        votes = torch.tensor([self._rendezvous.rank == 0 or requested], dtype=torch.uint8)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def _nccl_link(self) -> _Link:
        """From device to device, in a group of all stages that rank 0 does not join."""
        group = dist.new_group(
            range(1, self._rendezvous.world_size),
            timeout=timedelta(seconds=self._rendezvous.timeout_seconds),
            backend="nccl",
            use_local_synchronization=True,
            group_desc="stages",
            device_id=self._device,  # connects eagerly; the group of all ranks has none, or torch would try to split it
        )
        return _Link(group, self._device, inline_rows=0)

    def _link(self, peer: int) -> _Link:
        return self._stage_link if peer > 0 else self._host_link

    def send(self, step: Step, dst: int) -> None:
        link = self._link(dst)
        message = self._pack(step, link.buffer_device)
        try:
            dist.send(message, dst, link.group)
        except RuntimeError as error:
            raise self._rank_lost(dst, "send to", error) from error

    def _pack(self, step: Step, device: torch.device) -> Tensor:
        hidden_size = 0 if step.hidden is None else self._hidden_size
        size = message_bytes(step.num_rows, hidden_size, self._dtype)
        message = torch.empty(size, dtype=torch.uint8, device=device)
        pack(step, message)
        return message

    def receive(self, num_rows: int, src: int) -> Step:
        link = self._link(src)
        size = message_bytes(num_rows, self._hidden_size_from(src), self._dtype)
        message = torch.empty(size, dtype=torch.uint8, device=link.buffer_device)
        try:
            dist.recv(message, src, link.group)
        except RuntimeError as error:
            raise self._rank_lost(src, "receive from", error) from error
        return self._unpack(message, num_rows, src)

    def _unpack(self, message: Tensor, num_rows: int, src: int) -> Step:
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
            message = torch.cat([message, self._pack(step, link.buffer_device)])
            step = None
        try:
            while len(self._pending_sends) >= _MAX_PENDING_SENDS:
                self._pending_sends.popleft()[0].wait()
            self._pending_sends.append((self._group.send([message], dst, _HEADER_TAG), message))
            if step is not None:
                body = self._pack(step, link.buffer_device)
                self._pending_sends.append((dist.isend(body, dst, link.group), body))
        except RuntimeError as error:
            raise self._rank_lost(dst, "send to", error) from error

    def receive_envelope(self, src: int) -> Envelope:
        try:
            work, message = self._pending_receives.pop(src) if src in self._pending_receives else self._post_header_receive(src)
            work.wait()
        except RuntimeError as error:
            raise self._rank_lost(src, "receive from", error) from error
        num_rows, verdict = unpack_header(message[:HEADER_BYTES].view(torch.int64))
        if verdict is None or verdict.finished is None:
            self._pending_receives[src] = self._post_header_receive(src)
        if num_rows > self._link(src).inline_rows:
            return Envelope(self.receive(num_rows, src), verdict)
        return Envelope(self._unpack(message[HEADER_BYTES:], num_rows, src) if num_rows else None, verdict)

    def _post_header_receive(self, src: int) -> tuple[Any, Tensor]:
        """Post the receive of the next header before it is sent. The buffer also has room for inline rows.

        gloo allows a message to be shorter than the buffer that receives it.
        """
        room = message_bytes(self._link(src).inline_rows, self._hidden_size_from(src), self._dtype)
        message = torch.empty(HEADER_BYTES + room, dtype=torch.uint8)
        return self._group.recv([message], src, _HEADER_TAG), message

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _rank_lost(self, peer: int, action: str, error: Exception) -> RankLost:
        reason = str(error).split(". ")[0].splitlines()[0][:160]
        return RankLost(f"rank {self._rendezvous.rank} could not {action} rank {peer}: {reason}")
