"""What several proposers say, put together, and what each of them says, against a naive search."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from torch import Tensor

from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.choices import NO_TOKEN, Choices
from pipedec.decoding.proposers import MAX_MATCH, DraftProposal, NgramProposal, NgramProposer
from pipedec.tree import Candidates


@dataclass(frozen=True)
class Scripted:
    """Names some tokens; the feature of a token is its id times ``factor``, of all others −1."""

    token_ids: Tensor
    factor: float

    def features(self, token_ids: Tensor) -> Tensor:
        known = (token_ids * self.factor).masked_fill(token_ids == NO_TOKEN, 0.0)
        return torch.nn.functional.pad(known, (0, 1), value=-1.0)[..., None]


FIRST = Scripted(torch.tensor([[7, 3], [4, NO_TOKEN]]), 1.0)
SECOND = Scripted(torch.tensor([[3, 9, NO_TOKEN], [4, 5, 6]]), 10.0)


def test_merged_choices_are_the_union_without_repeats() -> None:
    choices = Choices.merged([FIRST, SECOND])
    named = [[token for token in line if token != NO_TOKEN] for line in choices.token_ids.tolist()]
    assert named == [[7, 3, 9], [4, 5, 6]]


def test_merged_features_stand_beside_their_tokens() -> None:
    """Of every proposer, for tokens that another one named, too."""
    choices = Choices.merged([FIRST, SECOND])
    assert choices.features.shape == (2, choices.token_ids.shape[1] + 1, 2)
    for tokens, features in zip(choices.token_ids.tolist(), choices.features.tolist(), strict=True):
        for token, pair in zip(tokens, features, strict=False):
            assert token == NO_TOKEN or pair == [token, 10 * token]
        assert features[-1] == [-1, -1]


def test_a_draft_says_how_likely_its_tokens_are() -> None:
    """A token of others counts as likely as the draft's last one, and is marked; all that is left has the rest."""
    children = Candidates(torch.tensor([0]), torch.tensor([[8, 5]]), torch.tensor([[0.6, 0.3]]).log())
    features = DraftProposal(children).features(torch.tensor([[5, 9, 8, NO_TOKEN]]))[0]
    assert features[:, 0].exp().tolist() == pytest.approx([0.3, 0.3, 0.6, 0.3, 0.1])
    assert features[:, 1].tolist() == [0, 1, 0, 1, 0]


def test_a_draft_that_is_certain_leaves_something_for_others() -> None:
    children = Candidates(torch.tensor([0]), torch.tensor([[8]]), torch.zeros(1, 1))
    assert math.isfinite(float(DraftProposal(children).features(torch.tensor([[8]]))[0, -1, 0]))


class NaiveSearch:
    """Every place of the text, one after the other, compared with a row's path token by token."""

    def __init__(self, text: list[int], below_root: list[int]) -> None:
        context = [*text, *below_root]
        places = []
        for place in range(len(text) - 1):
            length = 0
            while length < min(MAX_MATCH, place + 1) and text[place - length] == context[-1 - length]:
                length += 1
            places.append((length, place))
        self.best = [(length, text[place + 1]) for length, place in sorted(places, reverse=True)[:32]]

    def named(self) -> list[int]:
        return list(dict.fromkeys(token for length, token in self.best if length >= 2))[:4]

    def length(self, token: int) -> int:
        return max((length for length, named in self.best if named == token), default=0)

    def is_best(self, token: int) -> bool:
        return bool(self.best) and self.best[0][1] == token


def check_row(proposal: NgramProposal, index: int, naive: NaiveSearch) -> None:
    tokens = proposal.token_ids[index].tolist()
    assert [token for token in tokens if token != NO_TOKEN] == naive.named()
    asked = [0, 1, 2, 3, 99, NO_TOKEN]
    features = proposal.features(torch.tensor([asked]).expand(len(proposal.token_ids), -1))[index].tolist()
    for token, line in zip(asked, features, strict=False):
        expected = [0.0] * (2 * MAX_MATCH)
        length = naive.length(token)
        if length:
            expected[length - 1] = 1.0
            expected[MAX_MATCH + length - 1] = float(naive.is_best(token))
        assert line == expected
    assert features[-1] == [0.0] * (2 * MAX_MATCH)


@examples(200)
@given(st.integers(0, 2**32), st.integers(1, 60), st.integers(0, 6))
def test_ngrams_equal_a_naive_search(seed: int, length: int, below: int) -> None:
    """From a text of two tokens on: few different tokens, so that there are long matches; rows anywhere in a small tree."""
    chooser = random.Random(seed)
    text = [chooser.choice((0, 0, 1, 2)) for _ in range(length)]
    accepted = [chooser.choice((0, 1, 2)) for _ in range(chooser.randint(1, 3))]
    proposer = NgramProposer(tuple(text))
    proposer.accept(tuple(accepted))
    text += accepted
    paths: list[list[int]] = [[]]
    for _ in range(below):
        paths.append([*chooser.choice(paths), chooser.choice((0, 1, 2))])
    proposal = NgramProposal.of([proposer.find(path) for path in paths])
    for index, path in enumerate(paths):
        check_row(proposal, index, NaiveSearch(text, path))


def test_a_path_inside_the_tree_continues_the_text() -> None:
    proposer = NgramProposer((5, 6, 7, 8, 9, 5))
    named = [proposer.find(path).proposed() for path in ([], [6], [6, 7], [6, 7, 8])]
    assert named == [[], [7], [8], [9]]


def test_the_latest_of_equally_long_matches_is_named_first() -> None:
    assert NgramProposer((5, 6, 1, 5, 6, 2, 5, 6)).find([]).proposed() == [2, 1]


@pytest.mark.parametrize("text", [(5,), (5, 5), (5, 6)])
def test_a_short_text_names_nothing(text: tuple[int, ...]) -> None:
    choices = Choices.merged([NgramProposal.of([NgramProposer(text).find([])])])
    assert (choices.token_ids == NO_TOKEN).all()
    assert Acceptance(NgramProposer.prior).log_chances(choices).exp().sum() == 0
