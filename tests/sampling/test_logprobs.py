"""Log-probabilities of tokens: what is sent is finite, because JSON has no infinity."""

from __future__ import annotations

import math

import torch

from pipedec.sampling.logprobs import Logprobs


def test_a_token_that_cannot_be_has_a_finite_log_probability() -> None:
    logprobs = Logprobs(2)
    logprobs.accept_first(torch.tensor([[0.0, -math.inf]]), torch.tensor([1]))
    logprobs.accept_first(torch.tensor([[math.nan, 0.0]]), torch.tensor([0]))
    first, second = logprobs.pop_rows()
    assert first == ((1, -9999.0), (0, 0.0), (1, -9999.0))
    assert {value for _, value in second} == {-9999.0}
