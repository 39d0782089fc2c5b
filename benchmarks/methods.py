"""The table of decoding methods as benchmarks and tests use it: with further methods, and with limits that several share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pipedec.core.request import MethodOptions
from pipedec.methods import METHODS, MethodEntry, find_method, make_options


@contextmanager
def registered(*entries: MethodEntry) -> Iterator[None]:
    """In this context the table has further methods.

    Raises ValueError if another method has such a name.
    """
    added = {entry.name: entry for entry in entries}
    if known := added.keys() & METHODS.keys():
        raise ValueError(f"there is another method {', '.join(sorted(known))}")
    METHODS.update(added)
    try:
        yield
    finally:
        for name in added:
            del METHODS[name]


def applicable_options(name: str, limits: Mapping[str, Any]) -> MethodOptions:
    """The options of a method from ``limits`` shared by several methods. Those that it does not take, or that are None, are left
    out. Raises UserError as ``make_options``.
    """
    taken = find_method(name).option_names
    return make_options(name, {key: value for key, value in limits.items() if key in taken and value is not None})
