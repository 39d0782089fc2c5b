"""Verdicts from successors: the walk along the tree, and where an answer ends."""

from __future__ import annotations

import pytest
import torch
from pipedec.stage.verifier import Verifier

from pipedec.core import SamplingParams, Verdict
from pipedec.tree import PredictionTree

EOS = 2
#            0 (token 10)
#       1 (11)        2 (12)
#    3 (13) 4 (14)    5 (13)
#    6 (15)
TOKEN_IDS = [10, 11, 12, 13, 14, 13, 15]
PARENTS = [-1, 0, 0, 1, 1, 2, 3]


def tree_of(rows: int = 7) -> PredictionTree:
    tree = PredictionTree()
    tree.append(torch.tensor(TOKEN_IDS[:rows]), torch.tensor(PARENTS[:rows]))
    return tree


def verifier(max_tokens: int = 100, stop: tuple[int, ...] = (), ignore_eos: bool = False) -> Verifier:
    return Verifier(SamplingParams(max_tokens=max_tokens, stop_token_ids=stop, ignore_eos=ignore_eos), (EOS, 3))


@pytest.mark.parametrize(
    ("successors", "tokens"),
    [
        ([11, 13, 0, 15, 0, 0, 20], (11, 13, 15, 20)),  # to a leaf and one beyond
        ([12, 0, 13, 0, 0, 30, 0], (12, 13, 30)),  # the same token elsewhere is another row
        ([11, 12, 0, 0, 0, 0, 0], (11, 12)),  # 12 is no child of row 1
        ([40, 0, 0, 0, 0, 0, 0], (40,)),
    ],
)
def test_walk_goes_as_deep_as_the_rows_allow(successors: list[int], tokens: tuple[int, ...]) -> None:
    assert verifier().verify(tree_of(), torch.tensor(successors)) == Verdict(tokens)


def test_the_rows_that_gave_the_tokens_are_remembered() -> None:
    checker = verifier(max_tokens=3)
    checker.verify(tree_of(), torch.tensor([11, 13, 0, 15, 0, 0, 20]))
    assert checker.verified_rows == [0, 1, 3], "cut with the tokens"
    checker = verifier()
    checker.verify(tree_of(3), torch.tensor([11, 13, 0]))
    assert checker.verified_rows == [0, 1]
    tree = tree_of(4)
    checker.verify(tree, torch.tensor([11, 13, 0, 15]))
    assert checker.verified_rows == [3], "not those of the verdict before, which the tree still holds"


def test_first_token_counts() -> None:
    checker = verifier(max_tokens=2)
    assert checker.first(10) == Verdict((10,))
    checker.replayed(Verdict((10,)))
    assert checker.verify(tree_of(1), torch.tensor([11])) == Verdict((11,), "length")
    assert verifier(max_tokens=1).first(10) == Verdict((10,), "length")
    assert verifier().first(EOS) == Verdict((EOS,), "stop")


LONG_WALK = torch.tensor([11, 13, 0, 15, 0, 0, 20])


@pytest.mark.parametrize(("max_tokens", "tokens"), [(1, (11,)), (3, (11, 13, 15)), (4, (11, 13, 15, 20))])
def test_cut_at_max_tokens(max_tokens: int, tokens: tuple[int, ...]) -> None:
    assert verifier(max_tokens).verify(tree_of(), LONG_WALK) == Verdict(tokens, "length")


def test_cut_at_the_first_end_token() -> None:
    assert verifier(stop=(15, 13)).verify(tree_of(), LONG_WALK) == Verdict((11, 13), "stop")
    assert verifier(max_tokens=2, stop=(13,)).verify(tree_of(), LONG_WALK) == Verdict((11, 13), "stop")
    assert verifier(max_tokens=1, stop=(13,)).verify(tree_of(), LONG_WALK) == Verdict((11,), "length")


@pytest.mark.parametrize("eos", [EOS, 3])
def test_end_tokens_of_the_model(eos: int) -> None:
    ends_here = torch.tensor([eos])
    assert verifier().verify(tree_of(1), ends_here) == Verdict((eos,), "stop")
    assert verifier(ignore_eos=True).verify(tree_of(1), ends_here) == Verdict((eos,))
    assert verifier(ignore_eos=True, stop=(eos,)).verify(tree_of(1), ends_here) == Verdict((eos,), "stop")


def test_rows_that_arrive_before_a_verdict_is_replayed_go_on_from_it() -> None:
    checker, tree = verifier(), tree_of(3)
    assert checker.verify(tree, torch.tensor([11, 13, 0])) == Verdict((11, 13))
    assert checker.verify(tree, torch.tensor([11, 13, 0])) is None, "the row of 13 is not there yet"
    tree.append(torch.tensor([13]), torch.tensor([1]))
    assert checker.verify(tree, torch.tensor([11, 13, 0, 15])) == Verdict((15,)), "verified once, 13 is not reported again"
    advance = tree.advance((11, 13))
    checker.replayed(Verdict((11, 13)))
    successors = torch.tensor([11, 13, 0, 15])[advance.kept]
    assert checker.verify(tree, successors) is None
    tree.append(torch.tensor([15]), torch.tensor([0]))
    assert checker.verify(tree, torch.cat([successors, torch.tensor([16])])) == Verdict((16,))


def test_after_a_miss_only_the_new_root_counts() -> None:
    checker, tree = verifier(), tree_of(3)
    assert checker.verify(tree, torch.tensor([40, 0, 0])) == Verdict((40,))
    tree.append(torch.tensor([13]), torch.tensor([1]))  # was under way when the verdict fell
    assert checker.verify(tree, torch.tensor([40, 0, 0, 15])) is None
    tree.advance((40,))
    checker.replayed(Verdict((40,)))
    assert checker.verify(tree, torch.zeros(0, dtype=torch.int64)) is None
    tree.append(torch.tensor([40]), torch.tensor([-1]))
    assert checker.verify(tree, torch.tensor([41])) == Verdict((41,))


def test_nothing_is_said_after_the_end() -> None:
    checker, tree = verifier(max_tokens=1), tree_of(1)
    assert checker.verify(tree, torch.tensor([11])) == Verdict((11,), "length")
    tree.append(torch.tensor([11]), torch.tensor([0]))
    assert checker.verify(tree, torch.tensor([11, 12])) is None
