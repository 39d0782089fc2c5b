"""Wraps a drafter so that each of its forwards runs inside a timer: a clock, or the pacer of an emulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from pipedec.core import Load
from pipedec.decoding import Drafter
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Advance, Candidates, DraftRows


class ForwardTimer(Protocol):
    """Returns the context in which one draft forward runs."""

    def __call__(self, load: Load, /) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class TimedDrafter:
    """A drafter with a timer around each of its forwards."""

    drafter: Drafter
    timer: ForwardTimer

    def open(self, number: int, sequence: ThreadSequence) -> None:
        self.drafter.open(number, sequence)

    def close(self, number: int) -> None:
        self.drafter.close(number)

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Tensor]) -> list[Candidates]:
        with self.timer(Load(sum(len(entry.rows) for entry in requested) + sum(map(len, prompts.values())))):
            return self.drafter.expand(requested, prompts)

    def advance(self, number: int, thread: int, advance: Advance) -> None:
        self.drafter.advance(number, thread, advance)

    def threads_changed(self, number: int) -> None:
        self.drafter.threads_changed(number)
