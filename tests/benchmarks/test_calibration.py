"""Predicted chances against accepted shares, of observations that the test made."""

from __future__ import annotations

import random

import pytest
import torch
from pandas import DataFrame

from benchmarks.policy.calibration import Drafted, Observation, Observed, differences
from pipedec.decoding.acceptance import NO_TOKEN, Choices, Line
from pipedec.decoding.proposers import DRAFT_PRIOR, NgramProposer

WIDTH = len(DRAFT_PRIOR) + len(NgramProposer.prior)


def line(*tokens: tuple[int, float, bool, bool]) -> Line:
    """Tokens with their log-chances, and whether the draft model and n-grams propose them."""
    features = torch.zeros(1, len(tokens) + 2, WIDTH)
    for place, (_, _, of_draft, of_ngrams) in enumerate(tokens):
        features[0, place, len(DRAFT_PRIOR) - 1] = float(not of_draft)
        features[0, place, len(DRAFT_PRIOR) + 3] = float(of_ngrams)
    token_ids = [token for token, *_ in tokens]
    choices = Choices(torch.tensor([[*token_ids, NO_TOKEN]]), features)
    return Line(token_ids, [log_chance for _, log_chance, *_ in tokens], choices, 0)


def test_every_proposed_token_is_an_observation_if_its_place_is_known() -> None:
    proposed = line((7, -0.5, True, True), (8, -1.5, False, True), (9, -2.0, True, False), (4, -3.0, False, False))
    drafted = [
        Drafted(1, [6], -0.25, proposed),  # on the answer's path
        Drafted(1, [5], -2.0, proposed),  # not on it
        Drafted(3, [7], -1.0, proposed),  # the answer ended before the next token
    ]
    right, wrong = [], []
    for one in Observed([3, 6, 8, 7], drafted).observations():
        (right if one.is_row_accepted else wrong).append(one)
    assert [(one.rank, one.is_accepted, one.source) for one in right] == [
        (1, False, "draft and n-grams"), (2, True, "n-grams"), (3, False, "draft"), (4, False, "seen tokens"),
    ]  # fmt: skip
    assert [one.depth for one in right] == [2, 2, 2, 2]
    assert right[1].chance == pytest.approx(0.2231, abs=1e-4) and right[1].path_chance == pytest.approx(0.1738, abs=1e-4)
    assert len(wrong) == 4 and not any(one.is_accepted for one in wrong)


def frame(bias: float, count: int) -> DataFrame:
    """Observations whose tokens are accepted more often than predicted by ``bias``."""
    chooser, rows = random.Random(5), []
    for number in range(count):
        chance = chooser.uniform(0.1, 0.8)
        is_accepted = chooser.random() < chance + bias
        one = Observation(chance, chance / 2, True, is_accepted, 1 + number % 40, 1 + number % 9, "draft")
        rows += [("default", "set", *one), ("default", "set", *one._replace(is_row_accepted=False, is_accepted=False))]
    return DataFrame(rows, columns=["policy", "prompt_set", *Observation._fields])


def test_differences_are_those_of_tokens_below_accepted_rows() -> None:
    for bias in (0.0, 0.15):
        (found,) = differences(frame(bias, 4000)).to_dict("records")
        assert (found["policy"], found["prompt_set"], found["observations"]) == ("default", "set", 4000)
        assert found["difference"] == pytest.approx(bias, abs=0.03)
