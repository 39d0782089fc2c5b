"""Wraps a drafter so that each of its forwards runs inside a timer: a clock, or the pacer of an emulated device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipedec.decoding import Drafter
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, RowsToDraft


class ForwardTimer(Protocol):
    """Returns the context in which one draft forward of ``rows`` rows runs."""

    def __call__(self, rows: int, /) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class TimedDrafter:
    """A drafter with a timer around each of its forwards in decoding."""

    drafter: Drafter
    timer: ForwardTimer

    def begin(self, sequence: Sequence) -> None:
        self.drafter.begin(sequence)

    def prefill(self, token_ids: Tensor) -> None:
        self.drafter.prefill(token_ids)

    def expand(self, requested: list[RowsToDraft], children: int) -> list[Candidates]:
        with self.timer(sum(len(rows) for _, _, rows in requested)):
            return self.drafter.expand(requested, children)

    def advance(self, thread: int, advance: Advance) -> None:
        self.drafter.advance(thread, advance)

    def threads_changed(self) -> None:
        self.drafter.threads_changed()
