"""The fixed rule for ties."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedec.sampling import greedy

FEW_VALUES = st.sampled_from([-2.0, 0.0, 0.5, 3.0])  # so that ties are common


@settings(deadline=None)
@given(
    st.lists(st.lists(FEW_VALUES, min_size=7, max_size=7), min_size=1, max_size=5),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_greedy_takes_the_lowest_of_the_likeliest(rows: list[list[float]], dtype: torch.dtype) -> None:
    assert greedy(torch.tensor(rows, dtype=dtype)).tolist() == [row.index(max(row)) for row in rows]


def test_ties_in_a_large_vocabulary() -> None:
    logits = torch.zeros(3, 128_256)
    logits[1, [70_000, 5, 128_000]] = 1.0
    assert greedy(logits).tolist() == [0, 5, 0]
