"""The protocols inside a decoding method: the draft model that it uses, and the policy that selects its rows."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor

from pipedec.core import Accepted, MaskParams, Step
from pipedec.decoding.controller import TimestepTiming
from pipedec.threads import Sequence
from pipedec.tree import Advance, Candidates, PredictionTree, RowsToDraft


class Drafter(Protocol):
    """A draft model for the trees of an answer's threads (see ``drafting``)."""

    def begin(self, sequence: Sequence) -> None:
        """Forget the previous answer.

        Args:
            sequence: the threads of the next one, read only. Accepted tokens are in it before ``advance`` is called.
        """

    def prefill(self, token_ids: Tensor) -> None:
        """Process the next chunk of the prompt: int64 [any number]."""

    def expand(self, requested: list[RowsToDraft], children: int) -> list[Candidates]:
        """Draft rows of several trees in one forward.

        Args:
            requested: rows that are not drafted yet; their ancestors were drafted or are among them.
            children: number of most probable next tokens to return for each row.

        Returns:
            the candidates for each entry of ``requested``.
        """

    def advance(self, thread: int, advance: Advance) -> None:
        """Follow the tree of a thread, which was advanced."""

    def threads_changed(self) -> None:
        """Threads were opened, joined or ended."""


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
    def drafter(self) -> Drafter | None:
        """The draft model that it uses, if any."""

    def create(self, number: int) -> Member:
        """The member for a thread that was just opened."""

    def draft(self, running: dict[int, Any]) -> None:
        """Run the draft model, while the stages compute."""

    def propose(self, running: dict[int, Any], room: int) -> list[tuple[int, Step]]:
        """The rows that enter at the next timestep, at most ``room`` if several threads run: (thread number, step)."""

    def observe(self, timing: TimestepTiming) -> None:
        """Learn from the timing of a timestep of the full pipeline."""
