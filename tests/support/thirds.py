"""A pytest plugin for runs that take turns with thirds of the test files, by a hash of their paths.

``--third K`` runs a third. ``--but-third K`` runs everything but what another run does with that third under another instruction
set: its tests marked ``numbers``. Properties stay, since the other run tries fewer examples of them.
"""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--third", type=int, choices=range(3), help="only the tests of one third of the files: 0, 1 or 2")
    parser.addoption("--but-third", type=int, choices=range(3), help="not the tests of one third that are marked numbers")
    parser.addoption("--tenth", type=int, choices=range(10), default=0, help="which tenth of the architectures is tried")
    parser.addoption("--architecture-rows", help="try all of them, and write what is found to this folder")


@pytest.hookimpl(trylast=True)  # when all tests have their marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    third, but_third = config.getoption("third"), config.getoption("but_third")

    def is_chosen(item: pytest.Item) -> bool:
        own = third_of(item.path.relative_to(config.rootpath).as_posix())
        runs_elsewhere = own == but_third and item.get_closest_marker("numbers") and not item.get_closest_marker("hypothesis")
        return third in (None, own) and not runs_elsewhere

    if third is None and but_third is None:
        return
    config.hook.pytest_deselected(items=[item for item in items if not is_chosen(item)])
    items[:] = [item for item in items if is_chosen(item)]


def third_of(path: str) -> int:
    """The third that a file is in, by its path relative to the root."""
    return zlib.crc32(path.encode()) % 3
