"""Fewer cases than a full product, with every pair of values of any two parameters in at least one of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[int, Any, int, Any]  # parameter and value, twice


def pairwise(*parameters: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Cases of one value per parameter. With two parameters they are the full product; values must be hashable and distinct."""
    values = [list(parameter) for parameter in parameters]
    missing = {
        (first, one, second, other): None  # a dict keeps its order, and with it the cases are always the same
        for first, second in combinations(range(len(values)), 2)
        for one, other in product(values[first], values[second])
    }
    cases: list[tuple[Any, ...]] = []
    while missing:
        first, one, second, other = next(iter(missing))
        case: dict[int, Any] = {first: one, second: other}
        for place in range(len(values)):
            if place not in case:
                turn = len(cases) % len(values[place])  # among equals, let the values take turns
                candidates = values[place][turn:] + values[place][:turn]
                case[place] = max(candidates, key=lambda value: _gain(missing, {**case, place: value}))
        found = tuple(case[place] for place in range(len(values)))
        for pair in pairs_of(found):
            missing.pop(pair, None)
        cases.append(found)
    return cases


def pairs_of(case: Sequence[Any]) -> list[Pair]:
    """The pairs of values that a case covers."""
    return [(first, case[first], second, case[second]) for first, second in combinations(range(len(case)), 2)]


def _gain(missing: dict[Pair, None], case: dict[int, Any]) -> int:
    places = sorted(case)
    return sum((first, case[first], second, case[second]) in missing for first, second in combinations(places, 2))
