"""The protocols around a decoding method: the policy that selects the rows of a request, thread by thread."""

from __future__ import annotations

from typing import Any, Protocol

from pipedec.core import Accepted, MaskParams, Step
from pipedec.decoding.budget import Wish
from pipedec.decoding.drafter import RequestDrafter
from pipedec.decoding.lockstep import Drafting
from pipedec.tree import RootedTree


class Member(Protocol):
    """What a policy keeps for one running or waiting thread."""

    @property
    def tree(self) -> RootedTree | None:
        """Its tree; None if it has none."""

    @property
    def has_entered(self) -> bool:
        """Whether the thread's last certain token has entered the pipeline."""

    @property
    def in_flight(self) -> int:
        """Rows that have entered and that no verdict has accepted or pruned."""

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
    def drafter(self) -> RequestDrafter | None:
        """The draft model, if it uses one."""

    def create(self, number: int) -> Member:
        """The member for a thread that was just opened."""

    def draft(self, running: dict[int, Any]) -> Drafting:
        """What the draft model is to compute while the stages compute."""

    @property
    def largest(self) -> int:
        """Maximum rows of a step that enters whole; 0 if its rows may enter one by one."""

    @property
    def together(self) -> int:
        """Rows of the largest step that enters whole; 1 if its rows may enter one by one."""

    @property
    def is_tuned(self) -> bool:
        """Whether it leaves the number of its rows to what is measured."""

    def rests(self, running: dict[int, Any]) -> bool:
        """Whether nothing enters and nothing is drafted before the next verdict. False if that is not known."""

    def wish(self, running: dict[int, Any]) -> Wish:
        """What it would let enter at the next timestep."""

    def propose(self, running: dict[int, Any], room: int) -> list[tuple[int, Step]]:
        """The rows that enter at the next timestep: (thread number, step). At most ``room``."""
