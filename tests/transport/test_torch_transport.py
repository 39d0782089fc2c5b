"""Steps between real processes over gloo, and what happens when one of them is gone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import peer
import pytest
import torch
from peer import Peer

from pipedec.core import UserError, Verdict
from pipedec.transport.torch_distributed import Rendezvous, TorchTransport

Pair = tuple[Peer, Peer]


@pytest.fixture
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    dtype = getattr(request, "param", torch.float32)
    peers = Peer(0, 2, tmp_path / "meeting", dtype), Peer(1, 2, tmp_path / "meeting", dtype)
    try:
        assert [one.result() for one in peers] == ["met", "met"]
        yield peers
    finally:
        for one in peers:
            one.end()


@pytest.mark.parametrize("pair", [torch.float32, torch.bfloat16], indirect=True, ids=str)
def test_steps_arrive_equal(pair: Pair, request: pytest.FixtureRequest) -> None:
    dtype = request.node.callspec.params["pair"]
    draft, stage = pair
    for seed, num_rows in enumerate((1, 32, 7)):
        stage.order(peer.receive, num_rows, 0)
        draft.do(peer.send, num_rows, None, seed, 1)  # rank 0 drafts: it has no activations to send
        assert stage.result() == peer.as_lists(peer.make_step(num_rows, None, seed))
        draft.order(peer.receive, num_rows, 1)
        stage.do(peer.send, num_rows, dtype, seed, 0)
        assert draft.result() == peer.as_lists(peer.make_step(num_rows, dtype, seed))
    stage.order(peer.close)
    assert draft.do(peer.close) == stage.result() == "closed"


def test_envelopes_arrive_in_order_and_leave_room_for_steps(pair: Pair) -> None:
    """Headers are awaited ahead of time: a step that is sent in between must not be taken for one."""
    draft, stage = pair
    sent = [(3, Verdict((8, 9))), (0, None), (128, None), (129, Verdict((5,))), (1, None), (0, Verdict((4,), "stop"))]
    for seed, (num_rows, verdict) in enumerate(sent):
        stage.order(peer.receive_envelope, 0)
        draft.do(peer.send_envelope, seed, num_rows, verdict, 1)
        step = peer.as_lists(peer.make_step(num_rows, None, seed)) if num_rows else None
        assert stage.result() == (step, verdict)
        if verdict is None or verdict.finished is None:
            stage.order(peer.receive, 2, 0)
            draft.do(peer.send, 2, None, seed, 1)
            assert stage.result() == peer.as_lists(peer.make_step(2, None, seed))


def test_a_peer_killed_inside_a_window_is_named(pair: Pair) -> None:
    draft, stage = pair
    stage.order(peer.receive_envelope, 0)
    draft.process.kill()
    assert stage.result().startswith("RankLost: rank 1 could not receive from rank 0")


def test_a_killed_peer_is_named(pair: Pair) -> None:
    draft, stage = pair
    stage.order(peer.receive, 3, 0)
    draft.do(peer.send, 3, None, 0, 1)
    stage.result()
    draft.order(peer.receive, 3, 1)
    stage.process.kill()
    message = draft.result()
    assert message.startswith("RankLost: rank 0 could not receive from rank 1: ")
    assert "\n" not in message
    assert draft.do(peer.send, 3, None, 0, 1).startswith("RankLost: rank 0 could not send to rank 1: ")


def test_a_meeting_that_nobody_attends(tmp_path: Path) -> None:
    alone = Peer(0, 3, tmp_path / "meeting", torch.float32, timeout_seconds=1.0)
    try:
        assert alone.result().startswith("rank 0 could not meet the other 2: ")
    finally:
        alone.end()


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("nccl", "^transport nccl needs --device cuda; use gloo on a CPU$"),
        ("mpi", "^unknown transport 'mpi': choose one of gloo, nccl$"),
    ],
)
def test_a_transport_that_cannot_be(backend: str, message: str) -> None:
    rendezvous = Rendezvous(0, 2, "file:///nowhere/meeting", 1.0)
    with pytest.raises(UserError, match=message):
        TorchTransport(backend, rendezvous, 8, torch.float32, torch.device("cpu"))
