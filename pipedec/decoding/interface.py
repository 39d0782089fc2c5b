"""The protocols around a decoding method: the policy that selects the rows of a request, thread by thread."""

from __future__ import annotations

from typing import Any, Protocol

from pipedec.core import Accepted, MaskParams, Step
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.drafter import RequestDrafter
from pipedec.decoding.lockstep import Drafting
from pipedec.tree import PredictionTree


class Member(Protocol):
    """What a policy keeps for one running or waiting thread."""

    @property
    def tree(self) -> PredictionTree | None:
        """Its tree; None if it has none."""

    @property
    def has_entered(self) -> bool:
        """Whether the thread's last certain token has entered the pipeline."""

    def accept(self, accepted: Accepted) -> None:
        """Advance to the accepted tokens and prune what can no longer be accepted."""

    def cut(self) -> None:
        """Drop all rows: the thread waits or has ended."""

    def plant(self, token: int) -> None:
        """Start again from a certain token, a forced token or a join token."""


class Policy(Protocol):
    """Selects the rows of all threads.

    ``running`` are the members of the running threads, by thread number, as ``create`` has returned them.
    """

    @property
    def masks(self) -> MaskParams:
        """The mask rows behind the prompt and behind rows of steps."""

    @property
    def rows(self) -> int:
        """Maximum rows of a step, as far as the options of the method limit them."""

    @property
    def drafter(self) -> RequestDrafter | None:
        """The draft model, if it uses one."""

    def create(self, number: int) -> Member:
        """The member for a thread that was just opened."""

    def draft(self, running: dict[int, Any]) -> Drafting:
        """What the draft model is to compute while the stages compute."""

    def propose(self, running: dict[int, Any], room: int) -> list[tuple[int, Step]]:
        """The rows that enter at the next timestep, at most ``room`` if several threads run: (thread number, step)."""

    def observe(self, timing: TimestepTiming) -> None:
        """Learn from the timing of a timestep of the full pipeline."""
