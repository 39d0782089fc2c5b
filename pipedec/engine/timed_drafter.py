"""Wraps a drafter so that each of its forwards runs inside a timer: a clock, or the pacer of an emulated device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from pipedec.core import UserError
from pipedec.decoding import Drafter, ForestDrafter
from pipedec.drafting import DraftModel
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, PredictionTree


class ForwardTimer(Protocol):
    """Returns the context in which one draft forward of ``rows`` rows runs."""

    def __call__(self, rows: int, /) -> AbstractContextManager[None]: ...


class TimedDrafter:
    """A drafter with a timer around each of its forwards in decoding."""

    def __init__(self, drafter: Drafter, timer: ForwardTimer) -> None:
        self._drafter = drafter
        self._timer = timer

    def begin(self) -> None:
        self._drafter.begin()

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        self._drafter.prefill(token_ids, prompt_length)

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        with self._timer(len(rows)):
            return self._drafter.expand(tree, rows, children)

    def advance(self, advance: Advance) -> None:
        self._drafter.advance(advance)

    def for_threads(self, sequence: Sequence) -> TimedForestDrafter:
        """The drafter for the threads of an answer. Raises UserError if it can only draft for one tree."""
        if not isinstance(self._drafter, DraftModel):
            raise UserError("this drafter cannot draft for several threads: use --method pp")
        return TimedForestDrafter(self._drafter.for_threads(sequence), self._timer)


class TimedForestDrafter:
    """Like ``TimedDrafter``, for the threads of an answer."""

    def __init__(self, drafter: ForestDrafter, timer: ForwardTimer) -> None:
        self._drafter = drafter
        self._timer = timer

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        self._drafter.prefill(token_ids, prompt_length)

    def expand(self, requested: list[tuple[int, PredictionTree, Tensor]], children: int) -> list[Candidates]:
        with self._timer(sum(len(rows) for _, _, rows in requested)):
            return self._drafter.expand(requested, children)

    def advance(self, number: int, advance: Advance) -> None:
        self._drafter.advance(number, advance)

    def threads_changed(self) -> None:
        self._drafter.threads_changed()
