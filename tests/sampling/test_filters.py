"""Temperature and filters against their definitions, ties included."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import naive_sampling
from support.examples import examples

from pipedec.core.sampling import SamplingParams
from pipedec.sampling import filtered

LOGITS = st.lists(
    st.sampled_from([-3.0, -1.0, 0.0, 0.5, 2.0]) | st.integers(-64, 64).map(lambda n: n / 8), min_size=1, max_size=12
)  # ties are common


@examples(300)
@given(
    LOGITS,
    st.floats(0.05, 3.0),
    st.integers(-1, 13),
    st.sampled_from([0.1, 0.3, 0.5, 0.77, 0.9, 0.999, 1.0]),
    st.sampled_from([0.0, 0.0, 0.01, 0.2, 1.0]),
)
def test_filters_keep_what_their_definitions_keep(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature, top_k, top_p, min_p, seed=0)
    two_rows = torch.tensor([logits, logits[::-1]], dtype=torch.float64)
    found = filtered(two_rows, params).softmax(-1)
    expected = torch.tensor(
        [naive_sampling.probabilities(logits, params), naive_sampling.probabilities(logits[::-1], params)], dtype=torch.float64
    )
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(1.0, top_k=2), [0, 1, 2]),  # 1 and 2 are equally likely
        (SamplingParams(1.0, top_p=0.36), [0, 1, 2]),
        (SamplingParams(1.0, top_p=0.86), [0, 1, 2, 3]),
        (SamplingParams(1.0, min_p=0.5), [0, 1, 2]),
        (SamplingParams(1e-300), [0]),
        (SamplingParams(0.5, top_p=0.45), [0]),  # of squares: 0.1225, 0.0625, 0.0625 and 0.0225
    ],
)
def test_filters_on_a_distribution_written_down(params: SamplingParams, kept: list[int]) -> None:
    logits = torch.tensor([[0.35, 0.25, 0.25, 0.15]], dtype=torch.float64).log()
    logits[0, 2] = logits[0, 1]
    found = filtered(logits, params).softmax(-1)[0]
    assert torch.nonzero(found)[:, 0].tolist() == kept and found.sum().item() == pytest.approx(1)
