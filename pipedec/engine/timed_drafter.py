"""Wraps a drafter so that each of its forwards runs inside a timer: a clock, or the pacer of an emulated device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol

from pipedec.core import Load
from pipedec.decoding import Drafter
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, RowChanges


class ForwardTimer(Protocol):
    """Returns the context in which one draft forward runs."""

    def __call__(self, load: Load, /) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class TimedDrafter:
    """A drafter with a timer around each of its forwards."""

    drafter: Drafter
    timer: ForwardTimer
    _sequences: dict[int, ThreadSequence] = field(default_factory=dict)

    def open(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int]) -> int:
        self._sequences[number] = sequence
        return self.drafter.open(number, sequence, token_ids)

    def close(self, number: int) -> None:
        self._sequences.pop(number, None)
        self.drafter.close(number)

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        with self.timer(self._load(requested, prompts)):
            return self.drafter.expand(requested, prompts)

    def advance(self, number: int, thread: int, changes: RowChanges) -> None:
        self.drafter.advance(number, thread, changes)

    def threads_changed(self, number: int) -> None:
        self.drafter.threads_changed(number)

    def forget_prefixes(self) -> None:
        self.drafter.forget_prefixes()

    def _load(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> Load:
        """The load of one forward. A chunk of a prompt is assumed to attend to no chunk before it."""
        rows = sum(len(entry.rows) for entry in requested) + sum(map(len, prompts.values()))
        return Load(rows, sum(_cached(self._sequences[number]) for number in {entry.number for entry in requested}))


def _cached(sequence: ThreadSequence) -> int:
    """Tokens of a request in the draft model's cache."""
    return sequence.prompt_length + sum(thread.num_tokens for thread in sequence.threads)
