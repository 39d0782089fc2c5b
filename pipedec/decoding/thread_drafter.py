"""The draft model as one thread of an answer sees it."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Protocol

from torch import Tensor

from pipedec.tree import Advance, Candidates, PredictionTree


class ForestDrafter(Protocol):
    """A model that proposes children for rows of several threads' trees (see ``drafting``)."""

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None: ...

    def expand(self, asks: Rows[tuple[int, PredictionTree, Tensor]], children: int) -> list[Candidates]:
        """In one forward, the likeliest ``children`` of rows (int64 [F], ascending) of the trees of some threads."""

    def advance(self, number: int, advance: Advance) -> None: ...

    def threads_changed(self) -> None:
        """Threads were opened, joined or ended."""


class ThreadDrafter:
    """A ``Drafter`` for the tree of one thread."""

    def __init__(self, drafter: ForestDrafter, number: int) -> None:
        self._drafter = drafter
        self._number = number

    def begin(self) -> None:
        """The answer has begun already."""

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        self._drafter.prefill(token_ids, prompt_length)

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        return self._drafter.expand([(self._number, tree, rows)], children)[0]

    def advance(self, advance: Advance) -> None:
        self._drafter.advance(self._number, advance)
