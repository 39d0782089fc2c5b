"""Transfers between stages whose devices carry them out late: nothing is read, reported or reused before its time."""

from __future__ import annotations

from collections import defaultdict, deque
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from support.fake_cuda import FakeCuda, FakeWork
from torch import Tensor
from torch.distributed import HashStore

from pipedec.core.errors import RankLost
from pipedec.core.stage_message import RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.device import GpuDevice
from pipedec.transport.links import DeviceLink
from pipedec.transport.rendezvous import Rendezvous
from pipedec.transport.torch_distributed import MESSAGE_TAG, ProcessGroups, TorchTransport
from pipedec.transport.wire import PART_ROWS, RowFormat, part_bytes

LATENCY = 0.02
NEAR = 5e-3
PATIENCE_SECONDS = 1.0
GARBAGE = 0xFF
HIDDEN_SIZE = 4
DEPTH = 8
CPU = torch.device("cpu")


class Nccl:
    """A group of two ranks in one process. What goes over it is carried out in order, and received ``LATENCY`` after it left."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.latency = LATENCY
        self._sent: deque[tuple[Tensor, float]] = deque()
        self._free_at = 0.0
        self.calls: list[tuple[str, int]] = []

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        self.calls.append(("send", tensors[0].nbytes))
        self._free_at = ends_at = max(self._free_at, self.cuda.current_stream().free_at, self.cuda.now) + self.latency
        self._sent.append((tensors[0], ends_at))
        return FakeWork(self.cuda, ends_at)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> FakeWork:
        self.calls.append(("receive", tensors[0].nbytes))
        tensors[0].fill_(GARBAGE)
        if not self._sent:
            return FakeWork(self.cuda, float("inf"))
        message, left_at = self._sent.popleft()
        ends_at = max(left_at, self.cuda.current_stream().free_at)
        self.cuda.at(ends_at, lambda: tensors[0].copy_(message))
        return FakeWork(self.cuda, ends_at)

    def abort(self) -> None:
        raise AssertionError("the abort of a communicator may wait for a kernel that waits for a lost peer")


class Done:
    """A transfer of gloo that has ended."""

    def wait(self, timeout: timedelta | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Gloo:
    """One rank's member of a group in one process, with members by rank. A receive may be posted before the message is sent."""

    def __init__(self, rank: int, members: dict[int, Gloo]) -> None:
        self._rank, self._members = rank, members
        self._arrived: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self._posted: dict[tuple[int, int], deque[Tensor]] = defaultdict(deque)
        self.round_trips = 0  # of messages that found no receive
        members[rank] = self

    def size(self) -> int:
        return 3

    def allreduce(self, votes: Tensor, operation: Any) -> Done:
        return Done()

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        self._members[peer].deliver(tensors[0], self._rank, tag)
        return Done()

    def deliver(self, message: Tensor, peer: int, tag: int) -> None:
        self.round_trips += not self._posted[peer, tag]
        self._arrived[peer, tag].append(message)
        self._match(peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Done:
        self._posted[peer, tag].append(tensors[0])
        self._match(peer, tag)
        return Done()

    def posted_bytes(self, peer: int) -> list[int]:
        """Sizes of the buffers that wait for messages of ``peer``."""
        return [buffer.nbytes for buffer in self._posted[peer, MESSAGE_TAG]]

    def _match(self, peer: int, tag: int) -> None:
        while self._posted[peer, tag] and self._arrived[peer, tag]:
            message = self._arrived[peer, tag].popleft()
            self._posted[peer, tag].popleft()[: len(message)] = message


Pair = tuple[FakeCuda, TorchTransport, TorchTransport]


@pytest.fixture
def nccl() -> Nccl:
    return Nccl(FakeCuda(query_seconds=5e-4))


@pytest.fixture
def pair(nccl: Nccl, request: pytest.FixtureRequest) -> Pair:
    """Stages 1 and 2 with devices that share a clock, and groups that rank 0 has joined, too. The test's first parameter may be
    the data type of activations on their way.
    """
    members = dict[int, Gloo]()

    class Groups(ProcessGroups):
        nccl_place = "cpu"

        def connect(self) -> Gloo:
            return Gloo(self.rendezvous.rank, members)

        def connect_pair(self, sender: int, device: torch.device) -> Nccl:
            return nccl

    return nccl.cuda, *(joined(nccl.cuda, rank, Groups, getattr(request, "param", None)) for rank in (1, 2))


def joined(cuda: FakeCuda, rank: int, groups: type[ProcessGroups], wire_dtype: torch.dtype | None = None) -> TorchTransport:
    device = GpuDevice(cuda=cuda, now=lambda: cuda.now)
    transport = TorchTransport("nccl", rank, HIDDEN_SIZE, torch.float32, CPU, device, groups, DEPTH, wire_dtype)
    transport.join(Rendezvous(rank, 3, HashStore(), PATIENCE_SECONDS, "lo"))
    assert transport.backend == "nccl"
    return transport


def rows(num_rows: int) -> Step:
    hidden = torch.arange(num_rows * HIDDEN_SIZE, dtype=torch.float32).view(num_rows, HIDDEN_SIZE)
    return Step(torch.arange(num_rows), torch.arange(num_rows) - 1, hidden)


def send_many(sender: TorchTransport, count: int) -> None:
    for _ in range(count):
        sender.send_message(StageMessage((RequestUpdate(7, step=rows(3)),)), 2)


def received_rows(message: StageMessage) -> tuple[Step, Tensor]:
    step = message.updates[0].step
    assert step is not None and step.hidden is not None
    return step, step.hidden


@pytest.mark.parametrize("num_rows", [3, 1000])
def test_everything_else_is_known_while_activations_are_on_their_way(pair: Pair, num_rows: int) -> None:
    cuda, sender, receiver = pair
    sent, began = rows(num_rows), cuda.now
    sender.send_message(StageMessage((RequestUpdate(7, verdict=Verdict.of(5), step=sent),)), 2)
    message = receiver.receive_message(1)
    assert cuda.now < began + LATENCY, "the host has waited for activations"
    step, hidden = received_rows(message)
    assert message.updates[0].verdict == Verdict.of(5)
    assert torch.equal(step.token_ids, sent.token_ids) and torch.equal(step.parents, sent.parents)
    read: list[Tensor] = []
    cuda.give(0.0, lambda: read.append(hidden.clone()))
    cuda.advance(0.0)
    assert not torch.equal(read[0], sent.hidden), "what reads too early reads garbage"  # type: ignore[arg-type]
    message.await_hidden()
    assert cuda.now < began + LATENCY, "the host has waited for activations"
    cuda.give(0.001, lambda: read.append(hidden.clone()))
    cuda.advance(1.0)
    assert torch.equal(read[1], sent.hidden)  # type: ignore[arg-type]


@pytest.mark.parametrize("pair", [torch.int8], indirect=True)
def test_rounded_activations_are_those_that_were_sent_once_they_are_awaited(pair: Pair) -> None:
    cuda, sender, receiver = pair
    send_many(sender, 1)
    message = receiver.receive_message(1)
    cuda.advance(LATENCY)
    for _ in range(2):
        message.await_hidden()
    hidden, sent = received_rows(message)[1], rows(3).hidden
    assert sent is not None and hidden.dtype == sent.dtype
    assert ((hidden - sent).abs() <= 0.501 * sent.amax(1, keepdim=True) / 127).all() and not torch.equal(hidden, sent)


def test_activations_leave_when_they_have_been_computed(pair: Pair) -> None:
    cuda, sender, _ = pair
    step = rows(3)
    assert step.hidden is not None
    computed, began = step.hidden.clone(), cuda.now
    step.hidden.zero_()
    cuda.give(0.01, lambda: step.hidden.copy_(computed))  # type: ignore[union-attr]
    left = sender.send_message(StageMessage((RequestUpdate(7, step=step),)), 2)
    cuda.advance(0.01)
    assert not left.has_passed, "a transfer was reported before its end"
    left.wait()
    assert left.seconds == pytest.approx(began + 0.01 + LATENCY, abs=NEAR)


def test_the_receiver_of_a_message_waits_for_all_of_it() -> None:
    cuda = FakeCuda(query_seconds=5e-4)
    group = Nccl(cuda)
    link = DeviceLink(group, 0, timedelta(seconds=5), CPU, GpuDevice(cuda=cuda, now=lambda: cuda.now), lambda: False)
    message, began = torch.arange(9, dtype=torch.uint8), cuda.now
    group.send([message], 1, 0)
    transfer = link.receive(9)
    assert not transfer.end.has_passed
    transfer.wait()
    assert cuda.now >= began + LATENCY and torch.equal(transfer.message, message)


def test_what_never_comes_ends_in_time_and_what_was_aborted_at_once(pair: Pair, nccl: Nccl) -> None:
    _, sender, _ = pair
    nccl.latency = float("inf")
    late = "it has not received 8 earlier messages: nothing has arrived within 1 seconds"
    with pytest.raises(RankLost, match=f"rank 1 could not send to rank 2: {late}"):
        send_many(sender, DEPTH + 1)
    assert not sender.can_rejoin
    sender.abort()
    with pytest.raises(RankLost, match="rank 1 could not send to rank 2: the transfers were aborted"):
        send_many(sender, 1)


def test_many_sends_are_kept_until_they_have_ended(pair: Pair) -> None:
    """The sender waits for its device only when many messages are pending."""
    cuda, sender, _ = pair
    began = cuda.now
    send_many(sender, DEPTH)
    assert cuda.now < began + LATENCY
    send_many(sender, DEPTH)
    assert cuda.now >= began + DEPTH * LATENCY, "messages were let go of before they had left"


@pytest.mark.failure_case("S3c")
def test_neighbours_exchange_a_message_when_they_join(pair: Pair, nccl: Nccl) -> None:
    """NCCL makes a connection when it is first used, which would take seconds of a timestep."""
    assert nccl.calls == [("send", 1), ("receive", 1)]


@pytest.mark.failure_case("S3c")
def test_a_rank_that_does_not_take_part_in_the_first_exchange_is_named(nccl: Nccl) -> None:
    class Groups(ProcessGroups):
        nccl_place = "cpu"

        def connect(self) -> Gloo:
            return Gloo(self.rendezvous.rank, {})

        def connect_pair(self, sender: int, device: torch.device) -> Nccl:
            return nccl

    with pytest.raises(RankLost, match="rank 2 could not receive from rank 1: nothing has arrived within 1 seconds"):
        joined(nccl.cuda, 2, Groups)


def test_nothing_that_waits_for_a_message_of_another_gpu_has_room_for_activations(pair: Pair) -> None:
    _, sender, receiver = pair
    sender.send_message(StageMessage((RequestUpdate(7, step=rows(3)),)), 2)
    receiver.receive_message(1)
    assert receiver.all_ranks.posted_bytes(1) == [part_bytes(RowFormat(0, torch.float32))] * DEPTH


def test_several_steps_are_in_flight(pair: Pair) -> None:
    """Heads run ahead, and activations arrive in their order while those before are still computed with."""
    cuda, sender, receiver = pair
    send_many(sender, 1)
    receiver.receive_message(1).await_hidden()
    receiver.all_ranks.round_trips, began = 0, cuda.now
    for number in range(3):
        sender.send_message(StageMessage((RequestUpdate(number, step=rows(3 + number)),)), 2)
    messages = [receiver.receive_message(1) for _ in range(3)]
    assert cuda.now < began + LATENCY, "the host has waited for activations"
    assert receiver.all_ranks.round_trips == 0
    found: list[list[float]] = []
    for message in messages:
        message.await_hidden()
        cuda.give(0.001, partial(lambda hidden: found.append(hidden.flatten().tolist()), received_rows(message)[1]))
    cuda.advance(1.0)
    assert found == [list(range(number * HIDDEN_SIZE)) for number in (3, 4, 5)]


@pytest.mark.parametrize("num_rows", [1, 64, 512, 700])
def test_no_message_waits_for_a_round_trip(num_rows: int) -> None:
    """Of rows of one timestep through host memory, as many as there are: each finds a receive that was posted before."""
    members = dict[int, Gloo]()

    class Groups(ProcessGroups):
        def connect(self) -> Gloo:
            return Gloo(self.rendezvous.rank, members)

    sender, receiver = (TorchTransport("gloo", rank, HIDDEN_SIZE, torch.float32, CPU, None, Groups, DEPTH) for rank in (1, 2))
    for rank, transport in enumerate((sender, receiver), start=1):
        transport.join(Rendezvous(rank, 3, HashStore(), PATIENCE_SECONDS, "lo"))
    message = StageMessage((RequestUpdate(7, verdict=Verdict.of(*range(400)), step=rows(num_rows)),))
    sender.send_message(message, 2)
    receiver.receive_message(1)
    members[2].round_trips = 0
    for _ in range(DEPTH * PART_ROWS // max(num_rows, PART_ROWS)):
        sender.send_message(message, 2)
    step, hidden = received_rows(receiver.receive_message(1))
    assert members[2].round_trips == 0
    assert torch.equal(hidden, rows(num_rows).hidden) and step.num_rows == num_rows  # type: ignore[arg-type]


@pytest.mark.parametrize(("rank", "senders"), [(1, [1]), (2, [2, 1]), (3, [2, 3]), (4, [3])])
def test_every_second_pair_of_stages_connects_first(rank: int, senders: list[int]) -> None:
    """Four stages; one group for what a stage receives, another one for what it sends."""
    asked: list[int] = []

    class Groups(ProcessGroups):
        def connect_pair(self, sender: int, device: torch.device) -> int:
            asked.append(sender)
            return sender

    found = Groups(Rendezvous(rank, 5, HashStore(), 1.0, "lo")).connect_neighbours(CPU)
    assert asked == senders
    assert found == {rank + 1 if sender == rank else sender: sender for sender in senders}
