"""Steps between real processes over gloo, and the errors when one of them is gone."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
from support import peer
from support.peer import Peer

from pipedec.core.errors import UserError
from pipedec.core.verdict import Accepted, Verdict
from pipedec.messages.events import CardEvent
from pipedec.transport.link_speed import rate_of
from pipedec.transport.torch_distributed import ProcessGroups, TorchTransport
from pipedec.transport.wire import PROTOCOL
from pipedec.validation import to_json

Pair = tuple[Peer, Peer]


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    given = {"dtype": torch.float32, **getattr(request, "param", {})}
    peers = Peer(0, 2, tmp_path / "meeting", **given), Peer(1, 2, tmp_path / "meeting", **given)
    try:
        assert [one.result() for one in peers] == ["met", "met"]
        yield peers
    finally:
        for one in peers:
            one.end()


@pytest.mark.parametrize("pair", [{"dtype": torch.bfloat16}], indirect=True)
def test_steps_arrive_equal(pair: Pair) -> None:
    dtype = torch.bfloat16
    draft, stage = pair
    for seed, num_rows in enumerate((1, 32, 200)):
        stage.order(peer.receive_message, 0)
        draft.do(peer.send_message, seed, num_rows, None, 1)  # rank 0 drafts: it has no activations to send
        assert stage.result() == (peer.as_lists(peer.make_step(num_rows, None, seed)), None)
        draft.order(peer.receive_message, 1)
        stage.do(peer.send_message, seed, num_rows, None, 0, dtype)
        assert draft.result() == (peer.as_lists(peer.make_step(num_rows, dtype, seed)), None)
    stage.order(peer.close)
    assert draft.do(peer.close) == stage.result() == "closed"


def forty_threads(finished: str | None = None) -> Verdict:
    """Several tokens and a forecast of each of 40 threads: more values than many heads have."""
    accepted = [
        Accepted(number, tuple(range(number, number + 5)), tuple((2**40, place, number) for place in range(3)))
        for number in range(40)
    ]
    return Verdict(tuple(accepted), finished)


@pytest.mark.parametrize("pair", [{"depth": 1}, {"depth": 4}], indirect=True)
def test_many_rows_in_many_threads_and_their_verdict_arrive(pair: Pair) -> None:
    draft, stage = pair
    for num_rows, verdict in product((0, 3, 200), (forty_threads(), Verdict.of(5), None, forty_threads("stop"))):
        stage.order(peer.receive_message, 0)
        draft.do(peer.send_message, 1, num_rows, verdict, 1, None, 40)
        step = peer.as_lists(peer.make_step(num_rows, None, 1, 40)) if num_rows else None
        assert stage.result() == (step, verdict)
        draft.order(peer.receive_message, 1)
        stage.do(peer.send_message, 2, num_rows, verdict, 0, torch.float32, 40)
        step = peer.as_lists(peer.make_step(num_rows, torch.float32, 2, 40)) if num_rows else None
        assert draft.result() == (step, verdict)


def test_named_tensors_arrive_beside_rows(pair: Pair) -> None:
    draft, stage = pair
    for num_rows, size in product((0, 3, 200), (7, 20_000)):  # inline, and in a message of its own
        stage.order(peer.receive_tensors, 0)
        draft.do(peer.send_tensors, num_rows, size, 1)
        assert stage.result() == peer.described(peer.make_tensors(size)), "in the order in which they were sent"


PREFIX = struct.Struct("<8siiiii4x")


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (bytes(64), "it begins with other bytes"),
        (PREFIX.pack(PROTOCOL.encode(), 0, 0, -1, 24, 0), "-1 rows, which must be between 0 and 65536"),
        (PREFIX.pack(PROTOCOL.encode(), 0, 0, 2**31 - 1, 24, 0), "2147483647 rows"),
        (PREFIX.pack(PROTOCOL.encode(), 0, 0, 1, 24, 0), "a head of 0 bytes for 0 of JSON and 1 rows, of which each takes 24"),
        (PREFIX.pack(PROTOCOL.encode(), 24, 0, 1, 44, 0), "rows of 44 bytes, not 24"),
        (PREFIX.pack(PROTOCOL.encode(), 2**31 - 8, 0, 0, 0, 0), "a head of 2147483640 bytes, of which 67108864 are allowed"),
        (PREFIX.pack(PROTOCOL.encode(), -8, 0, 0, 0, 0), "a head of -8 bytes"),
        (PREFIX.pack(PROTOCOL.encode(), 8, 8, 0, 0, 0) + b"no JSON!", "its head cannot be read"),
        (PREFIX.pack(PROTOCOL.encode(), 8, 8, 0, 0, 0) + b"[[1, 2]]", "its head cannot be read"),
        (PREFIX.pack(PROTOCOL.encode(), 32, 8, 1, 24, 0) + b"[[],[] ]" + bytes(24), "its updates have 0 rows, not 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.failure_case("S12")
def test_a_malformed_message_names_its_sender(pair: Pair, message: bytes, reason: str) -> None:
    draft, stage = pair
    stage.order(peer.receive_message, 0)
    draft.do(peer.send_bytes, message, 1)
    assert stage.result().startswith(f"RankLost: rank 0 sent a malformed message: {reason}")


def test_a_peer_killed_before_the_next_message_is_awaited_is_named(pair: Pair) -> None:
    draft, stage = pair
    stage.order(peer.receive_message, 0)
    draft.do(peer.send_message, 0, 3, None, 1)
    stage.result()
    draft.process.kill()
    draft.process.join()
    for _ in range(2):
        assert stage.do(peer.receive_message, 0).startswith("RankLost: rank 1 could not receive from rank 0: ")


def test_a_killed_peer_is_named(pair: Pair) -> None:
    draft, stage = pair
    stage.order(peer.receive_message, 0)
    draft.do(peer.send_message, 0, 3, None, 1)
    stage.result()
    draft.order(peer.receive_message, 1)
    stage.process.kill()
    message = draft.result()
    assert message.startswith("RankLost: rank 0 could not receive from rank 1: ")
    assert "\n" not in message
    assert draft.do(peer.send_message, 0, 3, None, 1).startswith("RankLost: rank 0 could not send to rank 1: ")


def test_messages_arrive_in_order_however_many_are_on_their_way(pair: Pair) -> None:
    """Also those of the next session, and those that are longer than a message."""
    draft, stage = pair
    sent = [(1, Verdict.of(1)), (400, forty_threads()), (0, Verdict.of(2, finished="stop")), (3, Verdict.of(3))]
    for num_rows, verdict in sent:
        draft.do(peer.send_message, 1, num_rows, verdict, 1)
    for num_rows, verdict in sent:
        step = peer.as_lists(peer.make_step(num_rows, None, 1)) if num_rows else None
        assert stage.do(peer.receive_message, 0) == (step, verdict)


@pytest.mark.parametrize("pair", [{"depth": 2, "timeout_seconds": 1.0}], indirect=True)
def test_a_receiver_that_does_not_keep_up_is_named(pair: Pair) -> None:
    draft, _ = pair
    results = [draft.do(peer.send_message, 0, 3, None, 1) for _ in range(3)]
    late = "it has not received 2 earlier messages: Timed out"
    assert results[:2] == [None, None] and results[2].startswith(f"RankLost: rank 0 could not send to rank 1: {late}")


def test_a_rendezvous_without_the_other_ranks_raises_rank_lost(tmp_path: Path) -> None:
    alone = Peer(0, 3, tmp_path / "meeting", torch.float32, timeout_seconds=1.0)
    try:
        assert alone.result().startswith("rank 0 could not join the 3 ranks: ")
    finally:
        alone.end()


@pytest.mark.failure_case("S11")
def test_who_waits_for_a_transfer_comes_loose_when_another_thread_aborts(trio: tuple[Peer, ...]) -> None:
    """Here and at the other end, although one of the peers is gone already."""
    draft, first, last = trio
    last.process.kill()
    last.process.join()
    first.order(peer.receive_message, 0)
    draft.do(peer.abort_soon, 0.2)
    draft.order(peer.receive_message, 1)
    assert draft.result() == "RankLost: rank 0 could not receive from rank 1: the transfers were aborted"
    assert first.result().startswith("RankLost: rank 1 could not receive from rank 0: ")
    assert draft.do(peer.send_message, 0, 3, None, 1).endswith("could not send to rank 1: the transfers were aborted")


def test_links_of_a_ring_are_measured_at_every_meeting(trio: tuple[Peer, ...], tmp_path: Path) -> None:
    """And what is measured is in the way of no message."""
    for meeting in range(2):
        for one in trio:
            one.order(peer.measured_link)
        speeds = [one.result() for one in trio]
        assert all(0 < one.latency_seconds < 60 and 0 < one.bytes_per_second < math.inf for one in speeds), speeds
        send_both_ways(*trio[1:], 1, torch.float32)
        for rank, one in enumerate(trio):
            one.order(peer.join_again, rank, 3, tmp_path / f"meeting-{meeting}")
        assert [one.result() for one in trio] == ["joined"] * 3


def test_two_ranks_measure_both_directions(pair: Pair) -> None:
    for one in pair:
        one.order(peer.measured_link)
    assert all(0 < one.result().latency_seconds < 60 for one in pair)


def test_a_rank_that_is_gone_when_links_are_measured_is_named(trio: tuple[Peer, ...]) -> None:
    """By both of its neighbours, which still measure what they can."""
    draft, first, last = trio
    for one in (draft, last):
        one.order(peer.measured_link)
    first.process.kill()
    assert draft.result().startswith("RankLost: rank 0 could not measure the link to rank 1: ")
    assert last.result().startswith("RankLost: rank 2 could not answer rank 1: ")


@pytest.mark.parametrize(
    ("arrivals", "seconds"),
    [([0.0, 0.1, 0.101, 0.102], 0.001), ([0.0, 0.1, 0.101], 0.001), ([0.0, 0.5], 0.5), ([0.0, 0.0], 1e-6)],
)
def test_the_rate_of_a_link_is_that_of_the_second_half_of_a_burst(arrivals: list[float], seconds: float) -> None:
    """Of 14 kB in each part."""
    assert rate_of(arrivals) == pytest.approx(14_000 / seconds)


@pytest.mark.failure_case("S17")
def test_joining_ranks_that_do_not_come_can_be_aborted(trio: tuple[Peer, ...], tmp_path: Path) -> None:
    draft, first, _ = trio
    for one in (draft, first):
        one.do(peer.abort_soon, 0.5)
    draft.order(peer.join_again, 0, 3, tmp_path / "next")
    first.order(peer.join_again, 1, 3, tmp_path / "next")
    for rank, one in enumerate((draft, first)):
        assert one.result() == f"RankLost: rank {rank} could not join the 3 ranks: the transfers were aborted"


@pytest.mark.failure_case("S17")
def test_ranks_that_meet_many_times_leave_no_descriptors_and_threads(trio: tuple[Peer, ...], tmp_path: Path) -> None:
    """After transfers, aborted transfers, and the loss of a rank."""
    used: list[list[tuple[int, int]]] = []
    for epoch in range(20):
        for rank, one in enumerate(trio):
            one.order(peer.join_again, rank, 3, tmp_path / f"meeting-{epoch}")
        assert [one.result() for one in trio] == ["joined"] * 3
        trio[1].order(peer.receive_message, 0)
        trio[0].do(peer.send_message, epoch, 3, None, 1)
        trio[1].result()
        trio[1].order(peer.receive_message, 0)
        trio[0].do(peer.abort_soon, 0.0)
        assert "RankLost" in trio[1].result()
        used.append([one.do(peer.used) for one in trio])
    for early, late in zip(used[4], used[-1], strict=True):
        assert late[0] <= early[0] + 2 and late[1] <= early[1] + 1, "descriptors or threads are left"


@pytest.fixture
def trio(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Peer, ...]]:
    """Rank 0 and two stages; the test's first parameter, if it has one, lists their backends."""
    backends = request.node.callspec.params["backends"] if hasattr(request.node, "callspec") else ["gloo"] * 3
    peers = tuple(Peer(rank, 3, tmp_path / "meeting", torch.float32, backend=backends[rank]) for rank in range(3))
    try:
        assert [one.result() for one in peers] == ["met"] * 3
        yield peers
    finally:
        for one in peers:
            one.end()


def send_both_ways(sender: Peer, receiver: Peer, src: int, dtype: torch.dtype | None) -> None:
    """Messages with few and with many rows must arrive unchanged."""
    for num_rows in (3, 129):
        receiver.order(peer.receive_message, src)
        sender.do(peer.send_message, src, num_rows, Verdict.of(7), src + 1, dtype)
        assert receiver.result() == (peer.as_lists(peer.make_step(num_rows, dtype, src)), Verdict.of(7))


@pytest.mark.parametrize("backends", [("gloo", "nccl", "nccl")], ids="-".join)
def test_stages_with_nccl_have_groups_of_their_own(trio: tuple[Peer, ...], backends: tuple[str, ...]) -> None:
    """Whatever backend rank 0 has. Here the groups use gloo, but are created and used like NCCL groups."""
    draft, first, last = trio
    send_both_ways(draft, first, 0, None)
    send_both_ways(first, last, 1, torch.float32)
    draft.order(peer.receive_message, 2)
    last.do(peer.send_message, 0, 0, Verdict.of(1, 2), 0)
    assert draft.result() == (None, Verdict.of(1, 2))
    assert draft.do(peer.messages) == []
    assert first.do(peer.messages) == [("send", 1, "1>2")] * 2
    assert last.do(peer.messages) == [("recv", 0, "1>2")] * 2
    last.order(peer.receive_message, 1)
    first.process.kill()
    assert last.result().startswith("RankLost: rank 2 could not receive from rank 1: ")


@pytest.mark.parametrize("backends", [("nccl", "nccl", "gloo")], ids="-".join)
def test_one_stage_without_nccl_disables_it_for_all(trio: tuple[Peer, ...], backends: tuple[str, ...]) -> None:
    draft, first, last = trio
    send_both_ways(draft, first, 0, None)
    send_both_ways(first, last, 1, torch.float32)
    assert last.do(peer.messages) == []
    for one in trio:
        one.order(peer.close)
    assert [one.result() for one in trio] == ["closed"] * 3


def test_a_single_stage_with_nccl_works(tmp_path: Path) -> None:
    draft, stage = (Peer(rank, 2, tmp_path / "meeting", torch.float32, backend="nccl") for rank in range(2))
    try:
        assert draft.result() == stage.result() == "met"
        send_both_ways(draft, stage, 0, None)
        assert stage.do(peer.messages) == []
        stage.order(peer.close)
        assert draft.do(peer.close) == stage.result() == "closed"
    finally:
        draft.end()
        stage.end()


def test_versions_of_nccl_can_be_published(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    versions = ProcessGroups.versions()
    assert versions == {"torch build": torch.__version__, "NCCL": "2.28.9"}
    assert "2.28.9" in to_json(CardEvent(1, "host", "machine", "127.0.0.1", versions, {}, {}))


def test_nccl_is_refused_on_a_processor() -> None:
    with pytest.raises(UserError, match="transport nccl needs --device cuda; use gloo on a CPU"):
        TorchTransport("nccl", 1, 8, torch.float32, torch.device("cpu"))
