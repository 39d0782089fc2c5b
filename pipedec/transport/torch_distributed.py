"""Transfers between processes over torch.distributed: gloo between all ranks, NCCL between stages on CUDA.

Owns the process groups, which are replaced when the ranks meet again, and their timeouts. Messages go through host memory, so
rank 0 needs no GPU. Between stages that use NCCL their activations follow on the device, and nothing else waits for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from threading import Event
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import ProcessGroupGloo, ReduceOp

from pipedec.core.errors import RankLost, UserError
from pipedec.core.stage_message import StageMessage
from pipedec.device import Device, DeviceEvent, device_of, to_device
from pipedec.messages.run import LinkSpeed
from pipedec.transport import link_speed
from pipedec.transport.links import STEP_TAG, DeviceLink, DeviceTransfer, Group, HostLink, Link, Receiver, Sender
from pipedec.transport.rendezvous import CONNECT_SECONDS, AbortableStore, Rendezvous
from pipedec.transport.wire import (
    PREFIX_BYTES,
    Bytes,
    RowFormat,
    pack_hidden,
    pack_message,
    part_bytes,
    unpack_message,
    unpack_prefix,
)

Result = TypeVar("Result")
_Gloo: Any = ProcessGroupGloo

MESSAGE_TAG = 1  # receives of messages are posted early; the tag keeps them from matching other transfers
_ABORT_TAG = 2  # nothing is ever sent with it
_TRIAL_TAG = 3  # see ``_try_link``
_AT_ONCE = timedelta(milliseconds=1)
_SOURCE_LINE = re.compile(r"\[/\S+:\d+\] ")  # where in gloo's source an error was raised


class ProcessGroups:
    """The process groups of one meeting, from their creation until they are aborted.

    NCCL's groups are never aborted: that may wait for a kernel which waits for a lost peer. They end with the process.

    Attributes:
        nccl_place: the type of device that NCCL needs.
        rendezvous: where the ranks meet.
        is_aborted: nothing is transferred any more.
    """

    nccl_place = "cuda"
    _pairs: ClassVar[list[Group]] = []  # NCCL's, of this process

    def __init__(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        self._store = AbortableStore(rendezvous.store, rendezvous.timeout_seconds)
        self._all: Group = None
        self.is_aborted = False

    def connect(self) -> Group:
        """Connect to all ranks. Raises RuntimeError if one does not answer, or on ``abort``."""
        own = self.rendezvous
        self._all = gloo_group(PrefixStore("all", self._store), own.rank, own.world_size, own.interface)
        if self.is_aborted:  # before there was anything to abort
            raise RuntimeError("the transfers were aborted")
        return self._all

    def connect_neighbours(self, device: torch.device) -> dict[int, Group]:
        """NCCL groups of this stage, on ``device``, with the one before and with the one after it, by the neighbour's rank.

        A stage sends over one and receives over the other, so that neither waits for the other. Every second pair of the chain
        connects first, then the others, so that no stage waits for more than one before its own turn.
        """
        rank, last = self.rendezvous.rank, self.rendezvous.world_size - 1
        senders = [sender for sender in (rank - 1, rank) if 1 <= sender < last]
        groups = {}
        for sender in sorted(senders, key=lambda sender: sender % 2):
            groups[rank + 1 if sender == rank else sender] = pair = self.connect_pair(sender, device)
            self._pairs.append(pair)
        return groups

    def connect_pair(self, sender: int, device: torch.device) -> Group:
        """The NCCL group of stage ``sender``, which has rank 0 there, and the next stage, which has rank 1."""
        from torch.distributed import ProcessGroupNCCL

        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=self.rendezvous.timeout_seconds)
        group = ProcessGroupNCCL(self.pair_store(sender), self.rendezvous.rank - sender, 2, options)
        group.eager_connect_single_device(device)
        return group

    def pair_store(self, sender: int) -> Store:
        """The store in which stage ``sender`` and the next one meet. Either may first have to wait for its other neighbour."""
        store = PrefixStore(f"stages {sender} {sender + 1}", self.rendezvous.store)
        store.set_timeout(timedelta(seconds=self.rendezvous.timeout_seconds))
        return store

    @staticmethod
    def versions() -> dict[str, str]:
        """Versions that must be equal on all stages that use NCCL: PyTorch with the CUDA for which it was built, and NCCL."""
        return {"torch build": str(torch.__version__), "NCCL": ".".join(map(str, torch.cuda.nccl.version()))}

    def abort(self) -> None:
        """Close all connections but NCCL's, from any thread: all waiting transfers, here or at the other end, get an error.

        gloo closes them when a receive times out. A receive from a lost peer cannot be posted, so all peers are tried.

        May never return where a connection was reset: if a thread that posts a transfer is the first to see it, it waits, with
        gloo's lock of that connection, for gloo's own thread, and that may be waiting for the lock. No call ends this; the lease
        is renewed no more, and the process is replaced.
        """
        self.is_aborted = True
        self._store.abort()
        group, own = self._all, self.rendezvous.rank
        for peer in range(self.rendezvous.world_size) if group is not None else ():
            with suppress(RuntimeError):
                if peer != own:
                    group.recv([torch.empty(1, dtype=torch.uint8)], peer, _ABORT_TAG).wait(_AT_ONCE)


def gloo_group(store: Store, rank: int, world_size: int, interface: str) -> Group:
    """A gloo group over a network interface. Raises RuntimeError if a rank does not answer in time."""
    options = _Gloo._Options()
    options._timeout = timedelta(seconds=CONNECT_SECONDS)
    options._devices = [_Gloo.create_device(interface=interface)]
    return _Gloo(store, rank, world_size, options)


def try_pair(rendezvous: Rendezvous, device: torch.device, num_bytes: int) -> None:
    """Send a message from rank 1 to rank 2, which both call this, over a group as stages on ``device`` have it: NCCL's on CUDA,
    else gloo's. Raises RuntimeError if it does not arrive, or not as it was sent.
    """
    groups, rank, timeout = ProcessGroups(rendezvous), rendezvous.rank, timedelta(seconds=rendezvous.timeout_seconds)
    link: Link
    if device.type == groups.nccl_place:
        pair = groups.connect_pair(1, device)
        link = DeviceLink(pair, 2 - rank, timeout, device, device_of(device), lambda: groups.is_aborted)
    else:
        link = HostLink(gloo_group(groups.pair_store(1), rank - 1, 2, rendezvous.interface), 2 - rank, timeout)
    message = (torch.arange(num_bytes, device=device) % 251).to(torch.uint8)
    if rank == 1:
        link.send(message).wait()
        return
    transfer = link.receive(num_bytes)
    transfer.wait()
    if not torch.equal(transfer.message, message):
        raise RuntimeError("a message has not arrived as it was sent")


@dataclass
class _HiddenArrival:
    """The ``Arrival`` of activations over NCCL. ``hidden``: [R, E], to be read after ``wait``."""

    owner: TorchTransport
    source: int
    rows: RowFormat
    hidden: Tensor
    transfer: DeviceTransfer | None  # None when it has been awaited

    def wait(self) -> None:
        if (transfer := self.transfer) is None:
            return
        self.owner._attempt("receive from", self.source, transfer.join)
        if self.rows.wire_dtype is not None:
            self.hidden.copy_(self.rows.decoded(transfer.message, len(self.hidden)))
        self.transfer = None


class TorchTransport:
    """The ``Transport`` of one rank, its member of the process groups. Rows from rank 0 have no activations.

    Args:
        backend: for steps between stages, ``gloo`` or ``nccl``; NCCL is used only if every stage requests it.
        hidden_size, dtype: of the activations.
        place: where the activations of this rank's steps are.
        device: of ``place``; by default as ``device_of`` makes it.
        depth: messages that may be on their way over each link, in each direction. A sender waits for the receiver of the first
            of them before it sends another one.
        wire_dtype: of the activations on their way, int8 or None for ``dtype`` (see ``wire``).

    Attributes:
        backend: of the steps between stages, once the ranks have joined.
        all_ranks: the group of all ranks, for measurements.
        can_rejoin: this process can join other ranks after ``abort``. With an NCCL communicator only a new process can.

    Raises:
        UserError: the backend does not work on ``place``.
    """

    def __init__(
        self, backend: str, rank: int, hidden_size: int, dtype: torch.dtype, place: torch.device, device: Device | None = None,
        new_groups: type[ProcessGroups] = ProcessGroups, depth: int = 1, wire_dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        if rank > 0 and backend == "nccl" and place.type != new_groups.nccl_place:
            raise UserError("transport nccl needs --device cuda; use gloo on a CPU")
        self.backend, self._wanted = "gloo", backend
        self.can_rejoin, self._rank = True, rank
        self._rows, self._bare_rows = RowFormat(hidden_size, dtype, wire_dtype), RowFormat(0, dtype)
        self._depth, self._place = depth, place
        self._device = device_of(place) if device is None else device
        self._timeout, self._new_groups = timedelta(), new_groups
        self._groups: ProcessGroups | None = None
        self.all_ranks: Group = None
        self._forget()

    def _forget(self) -> None:
        """Drop the transfers that have not ended."""
        self._host_links: dict[int, HostLink] = {}  # by peer
        self._device_links: dict[int, DeviceLink] = {}  # for activations, by peer; not if they go through host memory
        self._senders: dict[Link, Sender] = {}
        self._receivers: dict[int, Receiver] = {}  # by peer

    def join(self, rendezvous: Rendezvous) -> None:
        """Connect to the ranks that have met; connections of an earlier meeting are closed. Raises RankLost if the other ranks
        did not join in time.
        """
        self.close()
        self._timeout = timedelta(seconds=rendezvous.timeout_seconds)
        self._groups = groups = self._new_groups(rendezvous)
        try:
            self.all_ranks = groups.connect()
            # With ``auto``, stages may choose differently on their hosts, so NCCL needs all votes. Rank 0's is always yes.
            votes = torch.tensor([self._rank == 0 or self._wanted == "nccl"], dtype=torch.uint8)
            self.all_ranks.allreduce(votes, ReduceOp.MIN).wait(self._timeout)
            uses_nccl = bool(votes.item()) and self._rank > 0
            self.backend = "nccl" if uses_nccl else "gloo"
            self.can_rejoin = not uses_nccl or rendezvous.world_size == 2  # a single stage has no neighbours
            pairs = groups.connect_neighbours(self._place) if uses_nccl else {}
            self._host_links = {peer: HostLink(self.all_ranks, peer, self._timeout) for peer in range(rendezvous.world_size)}
            for peer, pair in pairs.items():
                self._device_links[peer] = DeviceLink(
                    pair, int(peer > self._rank), self._timeout, self._place, self._device, lambda: groups.is_aborted
                )
            for peer in pairs:
                self._try_link(peer)
        except (RuntimeError, ValueError) as error:
            raise RankLost(f"rank {self._rank} could not join the {rendezvous.world_size} ranks: {_reason(error)}") from None

    @property
    def versions(self) -> dict[str, str]:
        """Versions that must be equal on all ranks that request NCCL; empty if this rank does not. Rank 0 never uses it."""
        return self._new_groups.versions() if self._wanted == "nccl" and self._rank > 0 else {}

    def _try_link(self, peer: int) -> None:
        """Exchange one message with a neighbour: NCCL makes a connection when it is first used, which takes seconds.

        Called in the order in which the pairs have connected, so that no stage waits for more than one before its own turn.
        """
        link = self._device_links[peer]
        if peer > self._rank:
            message = torch.zeros(1, dtype=torch.uint8, device=link.place)
            self._attempt("send to", peer, lambda: link.send(message, _TRIAL_TAG).wait())
        else:
            self._attempt("receive from", peer, lambda: link.receive(1, _TRIAL_TAG).wait())

    def measured_link(self) -> LinkSpeed:
        """The speed of the link through host memory to the next rank, or from the last to rank 0. All ranks measure at the same
        time, after ``join``. Raises RankLost if the next rank, or the one before, is gone or did not answer in time.
        """
        after, before = ((self._rank + step) % len(self._host_links) for step in (1, -1))
        is_timed = Event()
        with ThreadPoolExecutor(1) as pool:
            answered = pool.submit(
                lambda: self._attempt("answer", before, lambda: link_speed.answer(self._host_links[before], is_timed))
            )
            speed = self._attempt("measure the link to", after, lambda: link_speed.measured(self._host_links[after], is_timed))
            answered.result()
        return speed

    def _rows_from(self, sender: int) -> RowFormat:
        return self._rows if sender > 0 else self._bare_rows

    def _part_bytes(self, sender: int, peer: int) -> int:
        """Size of the parts into which messages of rank ``sender`` are divided, to or from a peer."""
        return part_bytes(self._bare_rows if peer in self._device_links else self._rows_from(sender))

    def send_message(self, message: StageMessage, dst: int) -> DeviceEvent:
        device_link = self._device_links.get(dst)
        packed, hidden = pack_message(message, self._rows.wire_dtype, holds_hidden=device_link is None)
        parts = packed.split(self._part_bytes(self._rank, dst))
        left = self._send(self._host_links[dst], parts, dst, MESSAGE_TAG)
        if hidden is None or device_link is None:
            return left
        return self._send(device_link, [pack_hidden(hidden, self._rows.wire_dtype)], dst, STEP_TAG)

    def _send(self, link: Link, parts: Sequence[Tensor], dst: int, tag: int) -> DeviceEvent:
        if link not in self._senders:
            self._senders[link] = Sender(link, self._depth)
        return self._attempt("send to", dst, lambda: self._senders[link].send(parts, tag))

    def receive_message(self, src: int) -> StageMessage:
        rows, is_followed = self._rows_from(src), src in self._device_links
        buffer = self._next_part(src)
        hidden, arrival = None, None
        try:
            prefix = unpack_prefix(buffer, rows.row_bytes)
            hidden_bytes = rows.hidden_bytes(prefix.rows)
            end = prefix.end if is_followed else prefix.end + hidden_bytes
            if end > len(buffer):
                buffer = np.concatenate([buffer, *(self._next_part(src) for _ in range(len(buffer), end, len(buffer)))])
            if hidden_bytes and is_followed:
                arrival = self._receive_hidden(prefix.rows, src)
                hidden = arrival.hidden
            elif hidden_bytes:
                hidden = to_device(rows.decoded(torch.from_numpy(buffer[prefix.end : end]), prefix.rows), self._place)
            message = unpack_message(buffer[PREFIX_BYTES : prefix.end], hidden, prefix)
        except ValueError as error:
            raise RankLost(f"rank {src} sent a malformed message: {error}") from None
        return message if arrival is None else replace(message, arrival=arrival)

    def _next_part(self, src: int) -> Bytes:
        """Wait for the next part of a message, or the whole of it, from rank ``src``."""

        def take() -> Tensor:
            if src not in self._receivers:
                num_bytes = self._part_bytes(src, src)
                self._receivers[src] = Receiver(self._host_links[src], num_bytes, self._depth, MESSAGE_TAG)
            return self._receivers[src].receive_next()

        return self._attempt("receive from", src, take).numpy()

    def _receive_hidden(self, num_rows: int, src: int) -> _HiddenArrival:
        """Begin to receive the activations of so many rows, which follow a message."""
        rows = self._rows
        transfer = self._attempt("receive from", src, lambda: self._device_links[src].receive(rows.hidden_bytes(num_rows)))
        if rows.wire_dtype is None:
            hidden = rows.decoded(transfer.message, num_rows)
        else:
            hidden = torch.empty(num_rows, rows.hidden_size, dtype=rows.dtype, device=self._place)
        return _HiddenArrival(self, src, rows, hidden, transfer)

    def _attempt(self, action: str, peer: int, call: Callable[[], Result]) -> Result:
        """Return the result of ``call``. Raises RankLost if it raises RuntimeError."""
        try:
            return call()
        except RuntimeError as error:
            assert self._groups is not None
            reason = "the transfers were aborted" if self._groups.is_aborted else _reason(error)
            raise RankLost(f"rank {self._rank} could not {action} rank {peer}: {reason}") from error

    def abort(self) -> None:
        """Close the connections to all ranks, from any thread: a waiting transfer ends with RankLost, on both sides.

        Not over NCCL, where a call that waits for the device may never return; see ``can_rejoin``.
        """
        if (groups := self._groups) is not None:
            groups.abort()

    def close(self) -> None:
        self._forget()
        self._groups = self.all_ranks = None


def _reason(error: Exception) -> str:
    """The message of a gloo error in one line."""
    return _SOURCE_LINE.sub("", str(error)).split(". ")[0].splitlines()[0][:160]
