"""A pytest plugin for ``--third K``: a third of the test files, by a hash of their paths, for runs that take turns."""

from __future__ import annotations

import zlib

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--third", type=int, choices=range(3), help="only the tests of one third of the files: 0, 1 or 2")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    third = config.getoption("third")
    if third is None:
        return
    chosen = [item for item in items if third_of(item.path.relative_to(config.rootpath).as_posix()) == third]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def third_of(path: str) -> int:
    """The third that a file is in, by its path relative to the root."""
    return zlib.crc32(path.encode()) % 3
