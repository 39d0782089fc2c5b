"""The choice model against its formula, and against sources whose probabilities are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from pipedec.decoding.acceptance import NO_TOKEN, AcceptanceModel, Choices

PRIOR = {"draft": {"log probability": 1.0, "not proposed": 0.0}}


def random_choices(lines: int, seed: int = 0) -> Choices:
    """Some of three choices are missing."""
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.arange(3 * lines).view(lines, 3)
    token_ids = token_ids.masked_fill(torch.rand(lines, 3, generator=generator) < 0.3, NO_TOKEN)
    return Choices(token_ids, torch.randn(lines, 4, 2, generator=generator))


def test_chances_are_a_conditional_logit() -> None:
    choices = random_choices(40)
    acceptance = AcceptanceModel({"draft": {"log probability": 0.7}, "seen": {"seen": -1.3}})
    acceptance.weights[-1] = 0.4
    chances = acceptance.log_chances(choices).exp()
    for tokens, features, found in zip(choices.token_ids.tolist(), choices.features.tolist(), chances.tolist(), strict=True):
        scores = [math.exp(0.7 * line[0] - 1.3 * line[1]) for line in features]
        named = [score * (token != NO_TOKEN) for score, token in zip(scores, tokens, strict=False)]
        others = scores[-1] * math.exp(0.4)
        assert found == pytest.approx([score / (sum(named) + others) for score in named], rel=1e-4)
        assert sum(found) + others / (sum(named) + others) == pytest.approx(1, abs=1e-5)


@dataclass(frozen=True)
class Source:
    """Draws what follows each of three rows; a draft says probabilities that are too sure of themselves."""

    said: Tensor  # [D, K]
    true: Tensor  # [D, K + 1]

    @classmethod
    def overrated(cls) -> Source:
        """The truth is the square root of what the draft says, others twice as likely, and the second proposer's word."""
        said = torch.tensor([[0.9, 0.08], [0.6, 0.3], [0.97, 0.02]])
        rest = 1 - said.sum(1, keepdim=True)
        true = torch.cat((said, rest), 1).sqrt() * torch.tensor([1.0, 3.0, 2.0])
        return cls(said, true / true.sum(1, keepdim=True))

    def choices(self) -> Choices:
        rows, children = self.said.shape
        rest = 1 - self.said.sum(1, keepdim=True)
        likely = torch.cat((self.said, rest), 1).log()
        marked = torch.zeros_like(likely)
        marked[:, 1] = 1
        token_ids = torch.arange(children).expand(rows, -1)
        token_ids = torch.nn.functional.pad(token_ids, (0, 1), value=NO_TOKEN)
        features = torch.stack((likely, marked), -1)
        padded = torch.cat((features[:, :-1], features[:, -2:-1], features[:, -1:]), 1)  # a missing choice looks like the last
        return Choices(token_ids, padded)

    @property
    def entropy(self) -> float:
        return float(-(self.true * self.true.log()).sum(1).mean())

    def loss(self, acceptance: AcceptanceModel) -> float:
        """Expected −log of the chance of what follows, in nats."""
        named = acceptance.log_chances(self.choices())[:, :-1].exp()
        others = 1 - named.sum(1, keepdim=True)
        return float(-(self.true * torch.cat((named, others), 1).log()).sum(1).mean())


def taught(acceptance: AcceptanceModel, count: int, seed: int = 3) -> list[float]:
    """Draw and observe tokens of ``Source.overrated``; returns the expected loss before each."""
    source, generator = Source.overrated(), torch.Generator().manual_seed(seed)
    choices, losses = source.choices(), list[float]()
    for number in range(count):
        losses.append(source.loss(acceptance))
        drawn = int(torch.multinomial(source.true[number % 3], 1, generator=generator))
        assert acceptance.observe(choices, number % 3, drawn if drawn < 2 else 77) is (drawn < 2)
    return losses


def test_it_learns_what_a_source_is_like() -> None:
    source, acceptance = Source.overrated(), AcceptanceModel(PRIOR)
    losses = taught(acceptance, 1500)
    assert losses[0] > source.entropy + 0.2
    assert source.entropy - 1e-4 <= source.loss(acceptance) < source.entropy + 0.02


def test_learned_weights_are_a_better_start_and_reversed_ones_are_unlearned_within_64_tokens() -> None:
    teacher, pupil, misled, beginner = (AcceptanceModel(PRIOR) for _ in range(4))
    taught(teacher, 600)
    pupil.start_from(teacher.learned)
    assert pupil.learned == teacher.learned
    misled.start_from({source: {name: -weight for name, weight in each.items()} for source, each in teacher.learned.items()})
    losses, losses_misled, losses_without = (taught(each, 96, seed=4) for each in (pupil, misled, beginner))
    assert losses[0] < losses_without[0] - 0.2 and sum(losses[:64]) < sum(losses_without[:64])
    assert losses_misled[0] > losses_without[0] + 0.2, "it begins wrong"
    assert losses_misled[64:] == pytest.approx(losses_without[64:], abs=0.01)


def test_weights_are_kept_by_source_and_feature() -> None:
    learned = AcceptanceModel({"draft": {"log probability": 0.7}, "ngrams": {"length 1": 0.2, "length 2": 0.4}})
    learned.weights[-1] = -2
    other = AcceptanceModel({"suffixes": {"length 1": 9.0}, "ngrams": {"length 2": 0.0, "length 3": 8.0}})
    other.start_from(learned.learned)
    expected = {
        "suffixes": {"length 1": 9.0},
        "ngrams": {"length 2": 0.4, "length 3": 8.0},
        "others": {"none of the choices": -2.0},
    }
    assert {source: pytest.approx(features) for source, features in expected.items()} == other.learned
