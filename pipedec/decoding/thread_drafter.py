"""Drafting for several decode threads, and an adapter that gives one of them the interface of a ``Drafter``."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipedec.tree import Advance, Candidates, PredictionTree


class ForestDrafter(Protocol):
    """A draft model for the trees of several threads (see ``drafting``)."""

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None: ...

    def expand(self, requested: list[tuple[int, PredictionTree, Tensor]], children: int) -> list[Candidates]:
        """Draft rows of several trees in one forward.

        Args:
            requested: (thread number, its tree, int64 [F] rows of the tree, ascending).
            children: number of most probable next tokens to return for each row.
        """

    def advance(self, number: int, advance: Advance) -> None:
        """Follow the tree of thread ``number``, which was advanced."""

    def threads_changed(self) -> None:
        """Threads were opened, joined or ended."""


class ThreadDrafter:
    """A ``Drafter`` for the tree of one thread, on top of a ``ForestDrafter``."""

    def __init__(self, drafter: ForestDrafter, number: int) -> None:
        self._drafter = drafter
        self._number = number

    def begin(self) -> None:
        """Nothing to do: the ``ForestDrafter`` is created for one answer."""

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None:
        self._drafter.prefill(token_ids, prompt_length)

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        return self._drafter.expand([(self._number, tree, rows)], children)[0]

    def advance(self, advance: Advance) -> None:
        self._drafter.advance(self._number, advance)
