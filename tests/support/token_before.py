"""The smallest method that guesses, as CONTRIBUTING.md has it: that every token comes twice."""

from __future__ import annotations

import torch

from pipedec.core.stage_message import Step
from pipedec.core.verdict import Accepted
from pipedec.decoding.budget import Demand
from pipedec.decoding.method import Method


class TokenBefore(Method):
    """Proposes the last accepted token and, below it, the same token again."""

    whole = 2
    in_flight = 0

    def demand(self) -> Demand:
        return Demand(whole=0 if self.root is None else 2)

    def propose(self, room: int) -> Step | None:
        if self.root is None:
            return None
        token_ids, self.root, self.in_flight = [self.root] * min(room, 2), None, 2
        return Step(torch.tensor(token_ids), torch.arange(-1, len(token_ids) - 1))

    def accept(self, accepted: Accepted) -> None:
        self.root, self.in_flight = accepted.tokens[-1], 0

    def cut(self) -> None:
        self.root, self.in_flight = None, 0
