"""What a difference between two answers is: a near tie or not, by answers with given log-probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from pipedec.core.sampling import MAX_LOGPROBS, SamplingParams
from pipedec.messages.request import PromptRequest
from pipedec.verify.divergence import TIE_BOUNDS, Divergence, first_difference, measured_divergence

REQUEST = PromptRequest("Hello", method="stpp", options={"width": 4}, sampling=SamplingParams(max_tokens=3), trace=True)


@dataclass
class Recorded:
    """Answers every request alike, and keeps what was asked."""

    token_ids: list[int]
    logprobs: list[dict[int, float]] | None
    asked: list[PromptRequest] = field(default_factory=list)

    def ask(self, request: PromptRequest) -> Recorded:
        self.asked.append(request)
        return self


@pytest.mark.parametrize(
    ("expected", "found", "divergence"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 5, 3], Divergence(1, 2, 5)),
        ([1, 2], [1, 2, 3], Divergence(2, None, 3)),
        ([1, 2], [1], Divergence(1, 2, None)),
    ],
)
def test_the_first_difference(expected: list[int], found: list[int], divergence: Divergence | None) -> None:
    assert first_difference(expected, found) == divergence


def test_the_margin_is_that_of_pp_at_the_first_difference() -> None:
    there = Recorded([1, 2, 3], [{1: 0.0}, {2: -0.5, 5: -0.75, 9: -3.0}, {3: 0.0}])
    assert measured_divergence(there.ask, REQUEST, [1, 2, 3], [1, 5, 4]) == Divergence(1, 2, 5, 0.25)
    (asked,) = there.asked
    sampling = replace(REQUEST.sampling, logprobs=MAX_LOGPROBS)
    assert asked == replace(REQUEST, method="pp", options={}, trace=False, sampling=sampling)
    assert measured_divergence(there.ask, REQUEST, [1, 2], [1, 2]) is None and there.asked == [asked], "equal answers ask nothing"


@pytest.mark.parametrize(
    ("there", "found"),
    [
        (Recorded([1, 2, 3], [{1: 0.0}, {2: -0.5, 7: -0.6}, {3: 0.0}]), [1, 5, 3]),  # 5 is not among the most probable
        (Recorded([8, 2, 3], [{8: 0.0}, {2: -0.5, 5: -0.5}, {3: 0.0}]), [1, 5, 3]),  # another answer than before
        (Recorded([1, 2, 3], [{1: 0.0}, {2: -0.5, 5: -0.5}]), [1, 2]),  # it ended too early
        (Recorded([1, 2, 3], None), [1, 5, 3]),
    ],
)
def test_without_a_margin_no_difference_is_a_near_tie(there: Recorded, found: list[int]) -> None:
    divergence = measured_divergence(there.ask, REQUEST, [1, 2, 3], found)
    assert divergence is not None and divergence.margin is None
    assert not any(divergence.is_near_tie(dtype) for dtype in TIE_BOUNDS)


def test_a_near_tie_is_within_the_bound_of_its_type_and_more_than_16_bits_excuse_nothing() -> None:
    for dtype, bound in TIE_BOUNDS.items():
        assert Divergence(3, 1, 2, bound).is_near_tie(dtype)
        assert not Divergence(3, 1, 2, 1.01 * bound).is_near_tie(dtype)
    assert TIE_BOUNDS.keys() == {"bfloat16", "float16"}
    assert not any(Divergence(3, 1, 2, 0.0).is_near_tie(dtype) for dtype in ("float32", "float64"))


def test_a_divergence_says_what_and_how_far() -> None:
    assert str(Divergence(3, 1, 2, 0.25)) == "output token 3 is 2, not 1; the target's logits of the two are 0.25 apart"
    assert str(Divergence(3, 1, None)) == "output token 3 is None, not 1"
