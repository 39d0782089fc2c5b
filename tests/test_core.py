"""Sampling parameters out of their range are refused in one line, whoever made them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams, StructuredOutputs


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature: must be a number (at least 0), not -0.1"),
        ({"temperature": math.nan}, "temperature: must be a number (at least 0), not nan"),
        ({"temperature": math.inf}, "temperature: must be a number (at least 0), not inf"),
        ({"top_k": -2}, "top_k: must be an integer (at least -1), not -2"),
        ({"top_p": 0}, "top_p: must be a number (above 0, at most 1), not 0"),
        ({"top_p": 1.01}, "top_p: must be a number (above 0, at most 1), not 1.01"),
        ({"min_p": -0.1}, "min_p: must be a number (0 to 1), not -0.1"),
        ({"min_p": 1.1}, "min_p: must be a number (0 to 1), not 1.1"),
        ({"seed": -2}, "seed: must be at least 0 and below 2**64, not -2"),
        ({"seed": 2**64}, "seed: must be at least 0 and below 2**64"),
        ({"max_tokens": 0}, "max_tokens: must be an integer (at least 1), not 0"),
        ({"stop": ""}, "stop: must be a string (not empty) or a list, not ''"),
        ({"stop": ["a", ""]}, "stop[1]: must be a string (not empty), not ''"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be a number (above 0), not 0"),
        ({"presence_penalty": 2.1}, "presence_penalty: must be a number (-2 to 2), not 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty: must be a number (-2 to 2), not -2.1"),
        ({"frequency_penalty": math.nan}, "frequency_penalty: must be a number (-2 to 2), not nan"),
        ({"logit_bias": {-1: 0.0}}, "logit_bias: must be a mapping from an integer (at least 0), not {-1: 0.0}"),
        ({"logit_bias": {1: 101.0}}, "logit_bias.1: must be a number (-100 to 100), not 101.0"),
        ({"logprobs": -1}, "logprobs: must be an integer (0 to 20), not -1"),
        ({"logprobs": 21}, "logprobs: must be an integer (0 to 20), not 21"),
        ({"prompt_logprobs": -1}, "prompt_logprobs: must be an integer (0 to 20), not -1"),
        ({"min_tokens": -1}, "min_tokens: must be an integer (at least 0), not -1"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens: must be at most max_tokens, 8, not 9"),
        (
            {"min_tokens": 1, "structured_outputs": StructuredOutputs(regex="a")},
            "min_tokens is not possible with structured_outputs",
        ),
        ({"skip_special_tokens": None}, "skip_special_tokens: must be true or false, not empty"),
        ({"include_stop_str_in_output": 1}, "include_stop_str_in_output: must be true or false, not 1"),
        ({"shown_special_tokens": ["a"]}, "shown_special_tokens[0]: must be an integer, not 'a'"),
    ],
)
def test_out_of_range(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        SamplingParams(**values)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_one_stop_string_is_no_list_of_letters() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_the_edges_of_the_ranges() -> None:
    edge = SamplingParams(0, -1, 1, 1, 2**64 - 1, 1, (), (), 0.01, -2, 2, {0: -100, 1: 100}, 20)
    assert not edge.is_stochastic and edge.has_penalties and not edge.is_plainly_greedy
    assert SamplingParams().is_plainly_greedy and hash(SamplingParams()) == hash(SamplingParams())
