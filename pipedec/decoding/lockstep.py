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
    """Run ``several`` side by side: the n-th requests of all of them are one."""
    asking = [(one, rows) for one in several if (rows := next(one, None)) is not None]
    while asking:
        found = iter((yield [entry for _, rows in asking for entry in rows]))
        answers = [list(islice(found, len(rows))) for _, rows in asking]
        asking = [
            (one, rows) for (one, _), answer in zip(asking, answers, strict=True) if (rows := resumed(one, answer)) is not None
        ]


def resumed(drafting: Drafting, candidates: list[Candidates]) -> list[DraftRows] | None:
    """What ``drafting`` wants next, now that it gets its ``candidates``; None if that was all."""
    try:
        return drafting.send(candidates)
    except StopIteration:
        return None
