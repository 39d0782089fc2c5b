"""The helper that other tests trust not to leave out a pair."""

from __future__ import annotations

from itertools import product

import pytest
from support.pairwise import pairs_of, pairwise


@pytest.mark.parametrize("sizes", [(2, 3), (1, 1, 4), (5, 5, 3, 4), (6, 2, 9, 2), (3, 3, 3, 3)])
def test_every_pair_is_in_a_case_and_cases_are_few(sizes: tuple[int, ...]) -> None:
    parameters = [[f"{name}{value}" for value in range(size)] for name, size in zip("abcd", sizes, strict=False)]
    cases = pairwise(*parameters)
    wanted = {pair for case in product(*parameters) for pair in pairs_of(case)}
    assert {pair for case in cases for pair in pairs_of(case)} == wanted
    largest, second = sorted(sizes)[-1], sorted(sizes)[-2]
    assert largest * second <= len(cases) <= 1.25 * largest * second + 3
    assert cases == pairwise(*parameters)
