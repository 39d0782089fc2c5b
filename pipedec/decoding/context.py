"""What a policy and its members are made from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pipedec.core import Request
from pipedec.decoding.drafter import RequestDrafter, ThreadDrafter
from pipedec.decoding.experience import Experience
from pipedec.decoding.scoring import Scoring
from pipedec.grammar import Grammar
from pipedec.threads import Sequence


@dataclass
class DraftRoom:
    """How much of the draft model's forwards each request may use in this timestep.

    Attributes:
        forwards: of requests that leave their number to be tuned.
        rows: of each forward.
        min_chance: of a row that is drafted: what it proposes is less probable, and would not enter soon.
    """

    forwards: int = 2
    rows: int = 16
    min_chance: float = 0.0


@dataclass(frozen=True)
class MethodContext:
    """One answer and what rank 0 has for it.

    Attributes:
        sequence: the answer's threads; policies and members only read it.
        drafter: the draft model; None if there is none.
        experience: what earlier answers have taught.
        scoring: of what draft sources propose, for all requests together.
        draft_room: the same object for all requests.
        trained_masks: mask rows that the target's BiTA was trained with; 0 if it has none.
    """

    request: Request
    sequence: Sequence
    drafter: RequestDrafter | None
    experience: Experience
    scoring: Scoring
    draft_room: DraftRoom
    device: torch.device | str = "cpu"
    trained_masks: int = 0

    @property
    def grammar(self) -> Grammar | None:
        """What the answer's structure allows; None without one."""
        return self.sequence.grammar

    def drafter_of(self, number: int) -> ThreadDrafter:
        """The drafter for a thread, of a method that requires a draft model."""
        assert self.drafter is not None
        return ThreadDrafter(self.drafter, number)
