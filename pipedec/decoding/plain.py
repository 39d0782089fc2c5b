"""Plain pipeline parallelism (``pp``): one row passes through all stages for every token. The baseline without speculation.

The tokens that a structure forces pass through together with the one before them: they are no guesses.
"""

from __future__ import annotations

import torch

from pipedec.core import NO_MASKS, Accepted, Step
from pipedec.decoding.context import MethodContext
from pipedec.decoding.forced import chain_below, room_of_chain
from pipedec.decoding.lockstep import Drafting, nothing_to_draft


class PlainPipeline:
    """Proposes the last accepted token and what is forced behind it, then waits for the next verdict."""

    masks = NO_MASKS
    tree = None

    def __init__(self, context: MethodContext, number: int) -> None:
        self._grammar = context.grammar
        self._root: int | None = None  # a certain token that has yet to enter
        self.room = 1 + room_of_chain(self._grammar)
        self.in_flight = 0

    @property
    def has_entered(self) -> bool:
        return self._root is None

    @property
    def wanted(self) -> int:
        """The root and its chain."""
        return 0 if self._root is None else 1 + len(chain_below(self._grammar))

    def draft(self) -> Drafting:
        return nothing_to_draft()

    def accept(self, accepted: Accepted) -> None:
        self._root, self.in_flight = accepted.tokens[-1], 0

    def cut(self) -> None:
        self._root, self.in_flight = None, 0

    def plant(self, token: int) -> None:
        self._root = token

    def propose(self) -> Step | None:
        if self._root is None:
            return None
        tokens = [self._root, *chain_below(self._grammar)]
        self._root, self.in_flight = None, len(tokens)
        return Step(
            token_ids=torch.tensor(tokens, dtype=torch.int64),
            parents=torch.arange(-1, len(tokens) - 1),
        )
