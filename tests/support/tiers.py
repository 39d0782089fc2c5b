"""A pytest plugin that chooses the tests of the fast tier, and which of those marked ``in_turn`` a run tries.

The fast tier (``-m "not slow"``) holds every behaviour once. What repeats it over shapes, kinds and seeds is marked ``slow``.
A run with ``--turn`` tries an n-th of the slow cases of a function marked ``in_turn(n)``, or of all its cases if it is a
property: n turns try all.
"""

from __future__ import annotations

import zlib
from collections import defaultdict

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--turn", type=int, help="the number of this run, by which tests marked in_turn are chosen; else all are")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what follows from fixtures and from ``fast_cases``, and leave out what is not in turn."""
    first_cases: set[str] = set()
    for item in items:
        if "leaves_nothing" in getattr(item, "fixturenames", ()):  # a test that must leave no process behind starts some
            item.add_marker(pytest.mark.processes)
        _mark_slow_cases(item, first_cases)
    if (turn := config.getoption("turn")) is not None:
        left_out = _not_in_turn(items, turn)
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def _mark_slow_cases(item: pytest.Item, first_cases: set[str]) -> None:
    """Mark the cases that ``fast_cases`` does not name; without that marker, those with the second of the two dispatches.

    Adds to ``first_cases`` the functions that have been met.
    """
    function, _, case = item.nodeid.partition("[")
    marker = item.get_closest_marker("fast_cases")
    if marker is None:
        is_fast = "tasks" not in case or "tasks" not in getattr(item, "callspec").params.values()  # noqa: B009
    else:
        is_fast = case.removesuffix("]") in marker.args if marker.args else function not in first_cases
    first_cases.add(function)
    if not is_fast:
        item.add_marker(pytest.mark.slow)


def _not_in_turn(items: list[pytest.Item], turn: int) -> set[pytest.Item]:
    """The cases that other turns try. A hash shares out those of a function, which mixes the values of its parameters."""
    cases: defaultdict[tuple[str, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        marker = item.get_closest_marker("in_turn")
        is_property = getattr(getattr(item, "obj", None), "is_hypothesis_test", False)
        if marker and (is_property or item.get_closest_marker("slow")):
            cases[item.nodeid.partition("[")[0], marker.args[0]].append(item)
    left_out: set[pytest.Item] = set()
    for (function, count), found in cases.items():
        found.sort(key=lambda item: _hash(item.nodeid))
        left_out.update(item for place, item in enumerate(found, _hash(function)) if (place + turn) % count)
    return left_out


def _hash(text: str) -> int:
    return zlib.crc32(text.encode())
