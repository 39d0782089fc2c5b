"""Drafting as generators: a method yields the rows that it wants drafted, and is sent their candidates.

So that one forward of the draft model serves everybody, several of these run in lockstep, and what all of them want next is
one request. Knows no method and no draft model.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from itertools import islice

from pipedec.tree import Candidates, DraftRows

Drafting = Generator[list[DraftRows], list[Candidates], None]


def nothing_to_draft() -> Drafting:
    """The drafting of a method that has no draft model, or nothing to ask it."""
    yield from ()


def in_lockstep(several: Iterable[Drafting]) -> Drafting:
    """Run ``several`` side by side: the n-th requests of all of them are one.

    One that yields no rows at all waits until all others have got their candidates, too.
    """
    asking = _after_waiting([(one, next(one, None)) for one in several])
    while asking:
        found = iter((yield [entry for _, rows in asking for entry in rows]))
        asking = _after_waiting([(one, resumed(one, list(islice(found, len(rows))))) for one, rows in asking])


def _after_waiting(asking: list[tuple[Drafting, list[DraftRows] | None]]) -> list[tuple[Drafting, list[DraftRows]]]:
    """Those that want rows, once those that waited for others have gone on."""
    while any(rows == [] for _, rows in asking):
        asking = [(one, resumed(one, []) if rows == [] else rows) for one, rows in asking]
    return [(one, rows) for one, rows in asking if rows is not None]


def resumed(drafting: Drafting, candidates: list[Candidates]) -> list[DraftRows] | None:
    """What ``drafting`` wants next, now that it gets its ``candidates``; None if that was all."""
    try:
        return drafting.send(candidates)
    except StopIteration:
        return None
