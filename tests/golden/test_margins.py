"""A close call is found: of two best scores, of a token near a cut-off, and of an answer that is not the target's."""

from __future__ import annotations

import math

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from golden.margins import LEAST, close_calls, kept, lead
from golden.questions import QUESTIONS
from golden.record import read
from pipedec.core import SamplingParams
from pipedec.sampling import filtered

DRAWN = SamplingParams(1.0, seed=1)
SILENCE = torch.zeros(4, dtype=torch.float64)


def logs(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def test_a_greedy_lead_is_the_difference_of_logits() -> None:
    assert lead(torch.tensor([1.0, 3.0, 2.5]), 1, SamplingParams()) == pytest.approx(0.5)
    assert lead(torch.tensor([1.0, 3.0, 2.9995]), 1, SamplingParams()) < LEAST
    assert lead(torch.tensor([1.0, 3.0, 2.5]), 2, SamplingParams()) < 0, "another token is the best"
    assert lead(torch.tensor([-torch.inf, 3.0, -torch.inf]), 1, SamplingParams()) == math.inf, "nothing else is possible"


def test_noise_and_temperature_count() -> None:
    noise = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=torch.float64)
    assert lead(logs(0.4, 0.3, 0.2, 0.1), 1, replace(DRAWN, temperature=2.0), noise) == pytest.approx(1 - math.log(4 / 3) / 2)


@pytest.mark.parametrize(
    ("cut", "probabilities", "near"),
    [
        ({"top_k": 2}, (0.4, 0.3, 0.29999, 0.00001), {1, 2}),
        ({"top_p": 0.7}, (0.4, 0.2999, 0.2, 0.1001), {2}),
        ({"top_p": 0.7}, (0.4, 0.3001, 0.2, 0.0999), {2}),
        ({"min_p": 0.5}, (0.4, 0.20001, 0.2, 0.19999), {1, 2, 3}),
        ({"min_p": 0.5, "top_p": 0.778}, (0.4, 0.2, 0.1, 0.3), {1}),
        ({"top_k": 3, "top_p": 0.95}, (0.4, 0.3, 0.2, 0.1), set()),
    ],
)
def test_tokens_near_a_cut_off(cut: dict[str, float], probabilities: tuple[float, ...], near: set[int]) -> None:
    sampling, scores = replace(DRAWN, **cut), logs(*probabilities)  # type: ignore[arg-type]
    surely, maybe = kept(scores, sampling)
    assert {int(token) for token in (surely ^ maybe).nonzero()} == near
    within = filtered(scores[None], sampling)[0] > -torch.inf
    assert not (surely & ~within).any() and not (within & ~maybe).any()
    for token in near:
        assert lead(scores, token, sampling, SILENCE) < LEAST


def test_a_token_that_is_nearly_kept_is_a_rival() -> None:
    noise = torch.tensor([0.0, 0.0, 5.0, 0.0], dtype=torch.float64)
    assert lead(logs(0.4, 0.3, 0.29999, 0.00001), 0, replace(DRAWN, top_k=2), noise) < 0
    assert lead(logs(0.4, 0.3, 0.2, 0.1), 0, replace(DRAWN, top_k=2), noise) > LEAST


def test_of_an_answer_that_is_not_the_targets_the_token_is_named() -> None:
    first, second = "copytree", "baker"
    found = close_calls(QUESTIONS[first], [*said(first)[:3], said(second)[3]])
    assert [call.place for call in found] == [((), 3)] and found[0].lead < 0 and "token 3 leads by -" in str(found[0])


def said(name: str) -> list[int]:
    tokens: list[int] = read("texts")[f"question: {name}"]["tokens"]
    return tokens
