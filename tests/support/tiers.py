"""A pytest plugin that chooses the tests of the fast tier.

The fast tier (``-m "not slow"``) holds every behaviour once. What repeats it over shapes, kinds and seeds is marked ``slow``.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what follows from fixtures and from ``fast_cases``."""
    first_cases: set[str] = set()
    for item in items:
        if "leaves_nothing" in getattr(item, "fixturenames", ()):  # a test that must leave no process behind starts some
            item.add_marker(pytest.mark.processes)
        _mark_slow_cases(item, first_cases)


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
