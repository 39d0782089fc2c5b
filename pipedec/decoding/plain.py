"""Plain pipeline parallelism (``pp``): one row passes through all stages for every token. The baseline without speculation.

The tokens that a structure forces pass through together with the one before them: they are not guesses.
"""

from __future__ import annotations

import torch

from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import Step
from pipedec.core.verdict import Accepted
from pipedec.decoding.budget import Demand
from pipedec.decoding.forced import chain_below
from pipedec.decoding.method import Method, Resources
from pipedec.threads import Sequence as ThreadSequence


class Plain(Method):
    """Proposes the last accepted token and the tokens forced after it, then waits for the next verdict."""

    in_flight = 0

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        self.whole = 1 + self.max_forced

    def demand(self) -> Demand:
        if self.root is None:
            return Demand()
        grammar = self.grammar
        return Demand(whole=1 if grammar is None else 1 + len(chain_below(grammar)))

    def propose(self, room: int) -> Step | None:
        if self.root is None:
            return None
        grammar = self.grammar
        tokens = [self.root] if grammar is None else [self.root, *chain_below(grammar)]
        self.root, self.in_flight = None, len(tokens)
        return Step(torch.tensor(tokens), torch.arange(-1, len(tokens) - 1))

    def accept(self, accepted: Accepted) -> None:
        self.root, self.in_flight = accepted.tokens[-1], 0

    def cut(self) -> None:
        self.root, self.in_flight = None, 0
