"""Mailboxes between the stages of one process."""

import pytest
import torch

from pipedec.core import Accepted, Envelope, RankLost, Step, Verdict
from pipedec.transport import LocalTransport


def step(*token_ids: int) -> Step:
    return Step(torch.tensor(token_ids), torch.full((len(token_ids),), -1))


def test_steps_arrive_in_order_from_each_sender() -> None:
    ranks = LocalTransport.connect(3)
    first, second, other = step(1), step(2, 3), step(4)
    ranks[0].send(first, 2)
    ranks[0].send(second, 2)
    ranks[1].send(other, 2)
    assert ranks[2].receive(1, 1) is other
    assert ranks[2].receive(1, 0) is first
    assert ranks[2].receive(2, 0) is second


@pytest.mark.parametrize("num_rows", [1, 3])
def test_a_step_of_another_size_raises_rank_lost(num_rows: int) -> None:
    ranks = LocalTransport.connect(2)
    ranks[0].send(step(1, 2), 1)
    with pytest.raises(RankLost, match=rf"^rank 1 expected {num_rows} rows from rank 0, which did not send them$"):
        ranks[1].receive(num_rows, 0)
    assert ranks[1].receive(2, 0).num_rows == 2


def test_an_empty_mailbox_raises_rank_lost() -> None:
    ranks = LocalTransport.connect(2)
    with pytest.raises(RankLost):
        ranks[0].receive(1, 1)
    ranks[0].send(step(1), 1)
    ranks[0].close()
    with pytest.raises(RankLost):
        ranks[1].receive(1, 0)


def test_envelopes_of_any_size_arrive_as_they_were() -> None:
    rows = torch.arange(200)
    accepted = tuple(Accepted(number, (number, 1, 2), ((3, 4), (5, 6))) for number in range(40))
    envelope = Envelope(Step(rows, rows - 1, torch.zeros(200, 4), rows % 40), Verdict(accepted, "stop"))
    ranks = LocalTransport.connect(2)
    ranks[0].send_envelope(envelope, 1)
    assert ranks[1].receive_envelope(0) is envelope
    with pytest.raises(RankLost, match=r"^rank 1 expected an envelope from rank 0"):
        ranks[1].receive_envelope(0)
