"""Walks along the trees of an answer in one thread, and where the answer ends."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from pipedec.core.verdict import Verdict
from pipedec.stage.verification import Verifier
from pipedec.threads import Sequence
from pipedec.tree import Forest

EOS = 2
#            0 (token 10)
#       1 (11)        2 (12)
#    3 (13) 4 (14)    5 (13)
#    6 (15)
TOKEN_IDS = [10, 11, 12, 13, 14, 13, 15]
PARENTS = [-1, 0, 0, 1, 1, 2, 3]


@dataclass
class Stage:
    """The forest of a last stage and its acceptance, after ``said`` tokens; the last of them is the tree's root."""

    end_token_ids: tuple[int, ...] = (EOS, 3)
    max_tokens: int = 101
    forest: Forest = field(init=False)
    acceptance: Verifier = field(init=False)

    def __post_init__(self) -> None:
        self.forest, other = (Forest(Sequence(5, self.end_token_ids, self.max_tokens)) for _ in range(2))
        self.acceptance = Verifier(other.sequence)
        self.acceptance.record_accepted(0, TOKEN_IDS[0])
        self.replay(TOKEN_IDS[0])

    def enter(self, count: int = 7, first: int = 0) -> Stage:
        rows = slice(first, first + count)
        self.forest.append(torch.tensor(TOKEN_IDS[rows]), torch.tensor(PARENTS[rows]))
        return self

    def replay(self, *tokens: int) -> None:
        _, changes, _ = self.forest.replay(Verdict.of(*tokens))
        self.acceptance.replayed(changes)

    def accepted(self, *successors: int) -> tuple[int, ...]:
        walks = self.acceptance.verify(self.forest, successors)
        self.rows = [row for walk in walks for row in walk.rows]
        assert [walk.thread for walk in walks] == [0] * len(walks) and len(walks) <= 1
        return tuple(token for walk in walks for token in walk.tokens)


def test_a_walk_goes_as_deep_as_the_rows_allow() -> None:
    for successors, tokens in (
        ([12, 0, 13, 0, 0, 30, 0], (12, 13, 30)),  # the same token elsewhere is another row
        ([11, 12, 0, 0, 0, 0, 0], (11, 12)),  # 12 is no child of row 1
        ([40, 0, 0, 0, 0, 0, 0], (40,)),
    ):
        assert Stage().enter().accepted(*successors) == tokens


def test_the_rows_that_gave_the_tokens_are_told() -> None:
    stage = Stage(max_tokens=4).enter()
    assert stage.accepted(11, 13, 0, 15, 0, 0, 20) == (11, 13, 15)
    assert stage.rows == [0, 1, 3], "cut with the tokens"
    stage = Stage().enter(3)
    stage.accepted(11, 13, 0)
    assert stage.rows == [0, 1]
    stage.enter(1, first=3).accepted(11, 13, 0, 15)
    assert stage.rows == [3], "not those of the verdict before, which the tree still holds"


def test_the_first_token_may_end_the_answer() -> None:
    assert Stage().acceptance.sequence.finished is None
    assert Stage(max_tokens=1).acceptance.sequence.finished == "length"
    assert Stage((TOKEN_IDS[0],)).acceptance.sequence.finished == "stop"


@pytest.mark.parametrize(
    ("max_tokens", "end_token_ids", "tokens", "finished"),
    [
        (1, (), (11,), "length"), (3, (), (11, 13, 15), "length"), (4, (), (11, 13, 15, 20), "length"),
        (100, (15, 13), (11, 13), "stop"), (2, (13,), (11, 13), "stop"), (1, (13,), (11,), "length"),
        (100, (EOS, 20), (11, 13, 15, 20), "stop"), (100, (), (11, 13, 15, 20), None),
    ],
)  # fmt: skip
def test_an_answer_is_cut_at_max_tokens_or_the_first_end_token(
    max_tokens: int, end_token_ids: tuple[int, ...], tokens: tuple[int, ...], finished: str | None
) -> None:
    stage = Stage(end_token_ids, max_tokens + 1).enter()
    assert stage.accepted(11, 13, 0, 15, 0, 0, 20) == tokens and stage.acceptance.sequence.finished == finished


def test_rows_that_arrive_before_a_verdict_is_replayed_go_on_from_it() -> None:
    stage = Stage().enter(3)
    assert stage.accepted(11, 13, 0) == (11, 13)
    assert stage.accepted(11, 13, 0) == (), "the row of 13 is not there yet"
    stage.enter(1, first=3)
    assert stage.accepted(11, 13, 0, 15) == (15,), "verified once, 13 is not reported again"
    stage.replay(11, 13)
    assert stage.forest.num_rows == 1 and stage.accepted(15) == ()
    stage.forest.append(torch.tensor([15]), torch.tensor([0]))
    assert stage.accepted(15, 16) == (16,)


def test_after_a_miss_only_the_new_root_counts() -> None:
    stage = Stage().enter(3)
    assert stage.accepted(40, 0, 0) == (40,)
    stage.enter(1, first=3)  # was under way when the verdict fell
    assert stage.accepted(40, 0, 0, 15) == ()
    stage.replay(40)
    assert stage.accepted() == ()
    stage.forest.append(torch.tensor([40]), torch.tensor([-1]))
    assert stage.accepted(41) == (41,)


def test_nothing_is_said_after_the_end() -> None:
    stage = Stage(max_tokens=2).enter(1)
    assert stage.accepted(11) == (11,) and stage.acceptance.sequence.finished == "length"
    stage.forest.append(torch.tensor([11]), torch.tensor([0]))
    assert stage.accepted(11, 12) == ()
