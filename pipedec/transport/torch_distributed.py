"""Transfers between processes over torch.distributed: gloo between all ranks, NCCL between stages on CUDA.

Owns the process groups and their timeouts. The first messages of envelopes, and all messages from and to rank 0, go through host
memory, so rank 0 needs no GPU. So do the steps of CUDA stages that do not use NCCL (several ranks on one GPU).
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pipedec.core import Envelope, RankLost, Step, UserError
from pipedec.transport.rendezvous import Rendezvous
from pipedec.transport.wire import (
    INLINE_HEAD_BYTES,
    PREFIX_BYTES,
    Bytes,
    Prefix,
    message_bytes,
    pack,
    pack_envelope,
    unpack,
    unpack_envelope,
    unpack_from,
    unpack_prefix,
)

BACKENDS = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",)}  # name: device types that a stage may use
_MAX_PENDING_SENDS = 16  # a sender waits for a slow receiver only when this many messages are pending
_ENVELOPE_TAG = 1  # receives of envelopes are posted early; the tag keeps them from matching steps
_INLINE_ROWS = 128  # of steps in an envelope's first message
_SOURCE_LINE = re.compile(r"\[/\S+:\d+\] ")  # where in gloo's source an error was raised


@dataclass(frozen=True)
class _Link:
    """How messages with steps go to and from a peer.

    Attributes:
        group: the process group of the transfers.
        device: where messages are packed and received.
        inline_rows: the most rows that are sent in an envelope's first message.
        hidden_size: width of the activations that the peer sends; 0 from rank 0.
    """

    group: dist.ProcessGroup
    device: torch.device
    inline_rows: int
    hidden_size: int
    dtype: torch.dtype

    def message_bytes(self, num_rows: int) -> int:
        return message_bytes(num_rows, self.hidden_size, self.dtype)

    @cached_property
    def room(self) -> int:
        """Bytes of the largest first message of an envelope."""
        return PREFIX_BYTES + INLINE_HEAD_BYTES + self.message_bytes(self.inline_rows)


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
        self._device = device
        self._pending_sends: deque[tuple[Any, Tensor]] = deque()  # with the buffers being sent
        self._pending_receives: dict[int, tuple[Any, Bytes]] = {}  # of envelopes, by sender
        self._received: dict[int, Any] = {}  # by sender, the receive of the last envelope
        self.backend = "gloo"  # of the steps between stages
        try:
            dist.init_process_group(
                "gloo",
                store=rendezvous.store,
                rank=rendezvous.rank,
                world_size=rendezvous.world_size,
                timeout=timedelta(seconds=rendezvous.timeout_seconds),
            )
            # Envelopes are sent by the group itself: the checks in dist.isend and dist.irecv cost as much as the transfer.
            assert dist.group.WORLD is not None
            self._group = dist.group.WORLD
            self._draft_link = _Link(self._group, torch.device("cpu"), _INLINE_ROWS, 0, dtype)
            use_nccl = self._all_stages_request_nccl(backend == "nccl") and rendezvous.rank > 0
            self.backend = "nccl" if use_nccl else "gloo"
            stages, place, inline_rows = self._nccl() if use_nccl else (self._group, torch.device("cpu"), _INLINE_ROWS)
            self._stage_link = _Link(stages, place, inline_rows, hidden_size, dtype)
        except (RuntimeError, ValueError, dist.DistError) as error:
            raise RankLost(f"rank {rendezvous.rank} could not join the {rendezvous.world_size} ranks: {error}") from error

    def _all_stages_request_nccl(self, requested: bool) -> bool:
        """Whether every stage requests NCCL: with ``auto``, stages on different hosts may choose differently. Rank 0 abstains."""
        votes = torch.tensor([self._rendezvous.rank == 0 or requested], dtype=torch.uint8)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        return bool(votes.item())

    def _nccl(self) -> tuple[dist.ProcessGroup, torch.device, int]:
        """From device to device, in a group of all stages that rank 0 does not join; no rows inline."""
        group = dist.new_group(
            range(1, self._rendezvous.world_size),
            timeout=timedelta(seconds=self._rendezvous.timeout_seconds),
            backend="nccl",
            use_local_synchronization=True,
            group_desc="stages",
            device_id=self._device,  # connects eagerly; the group of all ranks has none, or torch would try to split it
        )
        return group, self._device, 0

    def _link(self, peer: int) -> _Link:
        return self._stage_link if peer > 0 else self._draft_link

    def send(self, step: Step, dst: int) -> None:
        link = self._link(dst)
        try:
            dist.send(pack(step, link.device), dst, link.group)
        except RuntimeError as error:
            raise self._rank_lost(dst, "send to", error) from error

    def receive(self, num_rows: int, src: int) -> Step:
        link = self._link(src)
        message = torch.empty(link.message_bytes(num_rows), dtype=torch.uint8, device=link.device)
        self._receive_into(message, src, link.group)
        return self._on_device(unpack(message, num_rows, link.hidden_size, link.dtype))

    def _receive_into(self, message: Tensor, src: int, group: dist.ProcessGroup) -> None:
        try:
            dist.recv(message, src, group)
        except RuntimeError as error:
            raise self._rank_lost(src, "receive from", error) from error

    def _on_device(self, step: Step) -> Step:
        if step.token_ids.device == self._device:
            return step
        hidden, threads = (None if tensor is None else tensor.to(self._device) for tensor in (step.hidden, step.threads))
        return Step(step.token_ids.to(self._device), step.parents.to(self._device), hidden, threads)

    def send_envelope(self, envelope: Envelope, dst: int) -> None:
        link = self._link(dst)
        first, head, step = pack_envelope(envelope, link.inline_rows)
        try:
            while len(self._pending_sends) >= _MAX_PENDING_SENDS:
                self._pending_sends.popleft()[0].wait()
            self._pending_sends.append((self._group.send([first], dst, _ENVELOPE_TAG), first))
            if head is not None:
                self._send_behind(head, dst, self._group)
            if step is not None:
                self._send_behind(pack(step, link.device), dst, link.group)
        except RuntimeError as error:
            raise self._rank_lost(dst, "send to", error) from error

    def _send_behind(self, message: Tensor, dst: int, group: dist.ProcessGroup) -> None:
        """Send what did not fit into an envelope's first message."""
        self._pending_sends.append((dist.isend(message, dst, group), message))

    def receive_envelope(self, src: int) -> Envelope:
        link, buffer = self._link(src), self._first_message(src)
        try:
            prefix = unpack_prefix(buffer, link.message_bytes(1))
            if not prefix.ends_session:
                self._pending_receives[src] = self._post_receive(src)
            head = self._head(buffer, prefix, src)
            return unpack_envelope(head, self._rows(buffer, prefix, src), prefix)
        except ValueError as error:
            raise RankLost(f"rank {src} sent a message that is no envelope: {error}") from None

    def _rows(self, buffer: Bytes, prefix: Prefix, src: int) -> Step | None:
        link = self._link(src)
        if prefix.rows > link.inline_rows:
            return self.receive(prefix.rows, src)
        if not prefix.rows:
            return None
        return self._on_device(unpack_from(buffer, prefix.end, prefix.rows, link.hidden_size, link.dtype))

    def _first_message(self, src: int) -> Bytes:
        work, buffer = self._pending_receives.pop(src) if src in self._pending_receives else self._post_receive(src)
        try:
            work.wait()
        except RuntimeError as error:
            raise self._rank_lost(src, "receive from", error) from error
        # gloo's thread may not have let go of the buffer yet, and the end of the work would wait for it, so keep the work.
        self._received[src] = work
        return buffer

    def _post_receive(self, src: int) -> tuple[Any, Bytes]:
        """Post the receive of the next envelope's first message before it is sent.

        gloo allows a message to be shorter than the buffer that receives it.
        """
        message = torch.empty(self._link(src).room, dtype=torch.uint8)
        try:
            return self._group.recv([message], src, _ENVELOPE_TAG), message.numpy()
        except RuntimeError as error:
            raise self._rank_lost(src, "receive from", error) from error

    def _head(self, buffer: Bytes, prefix: Prefix, src: int) -> Bytes:
        if prefix.head_bytes <= INLINE_HEAD_BYTES:
            return buffer[PREFIX_BYTES : prefix.end]
        head = torch.empty(prefix.head_bytes, dtype=torch.uint8)
        self._receive_into(head, src, self._group)
        return head.numpy()

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()

    def _rank_lost(self, peer: int, action: str, error: Exception) -> RankLost:
        reason = _SOURCE_LINE.sub("", str(error)).split(". ")[0].splitlines()[0][:160]
        return RankLost(f"rank {self._rendezvous.rank} could not {action} rank {peer}: {reason}")
