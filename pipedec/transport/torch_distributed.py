"""Transfers between processes over torch.distributed: gloo between all ranks, NCCL between stages on CUDA.

Owns the process groups, which are exchanged when the ranks meet again, and their timeouts. The first messages of envelopes, and
all messages from and to rank 0, go through host memory, so rank 0 needs no GPU. So do the steps of CUDA stages that do not use
NCCL (several ranks on one GPU).
"""

from __future__ import annotations

import re
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroupGloo, ReduceOp

from pipedec.core import Envelope, RankLost, Step, UserError
from pipedec.transport.rendezvous import CONNECT_SECONDS, AbortableStore, Rendezvous
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

Group = Any  # a process group; torch's stubs know none of its calls
_Gloo: Any = ProcessGroupGloo

BACKENDS = {"gloo": ("cpu", "cuda"), "nccl": ("cuda",)}  # name: device types that a stage may use
_MAX_PENDING_SENDS = 16  # a sender waits for a slow receiver only when this many messages are pending
_STEP_TAG = 0
_ENVELOPE_TAG = 1  # receives of envelopes are posted early; the tag keeps them from matching steps
_ABORT_TAG = 2  # nothing is ever sent with it
_AT_ONCE = timedelta(milliseconds=1)
_INLINE_ROWS = 128  # of steps in an envelope's first message
_SOURCE_LINE = re.compile(r"\[/\S+:\d+\] ")  # where in gloo's source an error was raised


@dataclass(frozen=True)
class _Link:
    """How messages with steps go to and from a peer.

    Attributes:
        group: the process group of the transfers.
        offset: how much greater a rank of the run is than in the group.
        device: where messages are packed and received.
        inline_rows: the most rows that are sent in an envelope's first message.
        hidden_size: width of the activations that the peer sends; 0 from rank 0.
    """

    group: Group
    offset: int
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


class _Groups:
    """The process groups of one meeting, from their creation to their abortion."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        self._rendezvous = rendezvous
        self._store = AbortableStore(rendezvous.store, rendezvous.timeout_seconds)
        self._all: Group = None
        self.is_aborted = False

    def connect(self) -> Group:
        """Connect to all ranks. Raises RuntimeError if one does not answer, or on ``abort``."""
        options = _Gloo._Options()
        options._timeout = timedelta(seconds=CONNECT_SECONDS)
        options._devices = [_Gloo.create_device(interface=self._rendezvous.interface)]
        place = self._rendezvous.rank, self._rendezvous.world_size
        self._all = _Gloo(PrefixStore("all", self._store), *place, options)
        if self.is_aborted:  # before there was anything to abort
            raise RuntimeError("the transfers were aborted")
        return self._all

    def connect_stages(self, device: torch.device) -> Group:
        """An NCCL group of all stages, from ``device`` to device, that rank 0 does not join."""
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self._rendezvous.timeout_seconds)
        place = self._rendezvous.rank - 1, self._rendezvous.world_size - 1
        group = ProcessGroupNCCL(PrefixStore("stages", self._rendezvous.store), *place, options)
        group.eager_connect_single_device(device)
        return group

    def abort(self) -> None:
        """Close all connections, from any thread: whoever waits for a transfer, here or at the other end, gets an error.

        gloo does so when a receive times out. From a peer that is gone no receive can be posted, so all are tried.
        """
        self.is_aborted = True
        self._store.abort()
        group, own = self._all, self._rendezvous.rank
        for peer in range(self._rendezvous.world_size) if group is not None else ():
            with suppress(RuntimeError):
                if peer != own:
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_AT_ONCE)


class TorchTransport:
    """One rank's member of the process groups. Steps from rank 0 have no activations.

    Args:
        backend: for steps between stages, ``gloo`` or ``nccl``; NCCL is used only if every stage requests it.
        rank: this one.
        hidden_size: width of the activations.
        dtype: dtype of the activations.
        device: device of this rank's steps.

    Attributes:
        backend: of the steps between stages, once the ranks have joined.

    Raises:
        UserError: the backend is unknown or does not work on ``device``.
    """

    _all: Group
    _draft_link: _Link
    _stage_link: _Link

    def __init__(self, backend: str, rank: int, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        if backend not in BACKENDS:
            raise UserError(f"unknown transport {backend!r}: choose one of {', '.join(BACKENDS)}")
        if rank > 0 and device.type not in BACKENDS[backend]:
            raise UserError("transport nccl needs --device cuda; use gloo on a CPU")
        self.backend = "gloo"
        self._wanted = backend
        self._rank = rank
        self._hidden_size, self._dtype, self._device = hidden_size, dtype, device
        self._timeout = timedelta()
        self._groups: _Groups | None = None
        self._forget()

    def _forget(self) -> None:
        """Drop the transfers that have not ended."""
        self._pending_sends: deque[tuple[Any, Tensor]] = deque()  # with the buffers being sent
        self._pending_receives: dict[int, tuple[Any, Bytes]] = {}  # of envelopes, by sender
        self._received: dict[int, Any] = {}  # by sender, the receive of the last envelope

    def join(self, rendezvous: Rendezvous) -> None:
        """Connect to the ranks that have met; connections of an earlier meeting are closed.

        Raises:
            RankLost: the other ranks did not join in time.
        """
        self.close()
        self._timeout = timedelta(seconds=rendezvous.timeout_seconds)
        self._groups = groups = _Groups(rendezvous)
        try:
            self._all = groups.connect()
            self._draft_link = _Link(self._all, 0, torch.device("cpu"), _INLINE_ROWS, 0, self._dtype)
            uses_nccl = self._all_stages_request_nccl() and self._rank > 0
            self.backend = "nccl" if uses_nccl else "gloo"
            stages = groups.connect_stages(self._device) if uses_nccl else self._all
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {self._rank} could not join the {rendezvous.world_size} ranks: {_reason(error)}") from None
        place, inline_rows = (self._device, 0) if uses_nccl else (torch.device("cpu"), _INLINE_ROWS)
        self._stage_link = _Link(stages, int(uses_nccl), place, inline_rows, self._hidden_size, self._dtype)

    def _all_stages_request_nccl(self) -> bool:
        """Whether every stage requests NCCL: with ``auto``, stages on different hosts may choose differently. Rank 0 abstains."""
        votes = torch.tensor([self._rank == 0 or self._wanted == "nccl"], dtype=torch.uint8)
        self._all.allreduce(votes, ReduceOp.MIN).wait(self._timeout)
        return bool(votes.item())

    @property
    def all_ranks(self) -> Group:
        """The group of all ranks, for those who measure it."""
        return self._all

    def _link(self, peer: int) -> _Link:
        return self._stage_link if peer > 0 else self._draft_link

    def send(self, step: Step, dst: int) -> None:
        link = self._link(dst)
        try:
            self._wait(link.group.send([pack(step, link.device)], dst - link.offset, _STEP_TAG), link)
        except RuntimeError as error:
            raise self._rank_lost(dst, "send to", error) from error

    def receive(self, num_rows: int, src: int) -> Step:
        link = self._link(src)
        message = torch.empty(link.message_bytes(num_rows), dtype=torch.uint8, device=link.device)
        self._receive_into(message, src, link)
        return self._on_device(unpack(message, num_rows, link.hidden_size, link.dtype))

    def _receive_into(self, message: Tensor, src: int, link: _Link) -> None:
        try:
            self._wait(link.group.recv([message], src - link.offset, _STEP_TAG), link)
        except RuntimeError as error:
            raise self._rank_lost(src, "receive from", error) from error

    def _wait(self, work: Any, link: _Link) -> None:
        """Wait for a transfer; on a GPU, let its stream wait."""
        if link.device.type == "cpu":
            work.wait(self._timeout)
        else:
            work.wait()

    def _on_device(self, step: Step) -> Step:
        """The step with its activations on the device of this rank's model."""
        return step if step.hidden is None else replace(step, hidden=step.hidden.to(self._device))

    def send_envelope(self, envelope: Envelope, dst: int) -> None:
        link = self._link(dst)
        first, head, step = pack_envelope(envelope, link.inline_rows)
        try:
            while len(self._pending_sends) >= _MAX_PENDING_SENDS:
                self._pending_sends.popleft()[0].wait(self._timeout)
            self._pending_sends.append((self._all.send([first], dst, _ENVELOPE_TAG), first))
            if head is not None:
                self._send_behind(head, dst, self._draft_link)
            if step is not None:
                self._send_behind(pack(step, link.device), dst, link)
        except RuntimeError as error:
            raise self._rank_lost(dst, "send to", error) from error

    def _send_behind(self, message: Tensor, dst: int, link: _Link) -> None:
        """Send what did not fit into an envelope's first message."""
        self._pending_sends.append((link.group.send([message], dst - link.offset, _STEP_TAG), message))

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
            work.wait(self._timeout)
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
            return self._all.recv([message], src, _ENVELOPE_TAG), message.numpy()
        except RuntimeError as error:
            raise self._rank_lost(src, "receive from", error) from error

    def _head(self, buffer: Bytes, prefix: Prefix, src: int) -> Bytes:
        if prefix.head_bytes <= INLINE_HEAD_BYTES:
            return buffer[PREFIX_BYTES : prefix.end]
        head = torch.empty(prefix.head_bytes, dtype=torch.uint8)
        self._receive_into(head, src, self._draft_link)
        return head.numpy()

    def abort(self) -> None:
        """Close the connections to all ranks, from any thread: a transfer that waits ends with RankLost, here and there."""
        if (groups := self._groups) is not None:
            groups.abort()

    def close(self) -> None:
        self._forget()
        self._groups = None
        for name in ("_all", "_draft_link", "_stage_link"):
            self.__dict__.pop(name, None)

    def _rank_lost(self, peer: int, action: str, error: Exception) -> RankLost:
        assert self._groups is not None
        reason = "the transfers were aborted" if self._groups.is_aborted else _reason(error)
        return RankLost(f"rank {self._rank} could not {action} rank {peer}: {reason}")


def _reason(error: Exception) -> str:
    """What gloo says, in one line."""
    return _SOURCE_LINE.sub("", str(error)).split(". ")[0].splitlines()[0][:160]
