"""The draft model as methods see it: one for all running requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, RowChanges


class Drafter(Protocol):
    """A draft model for the trees of all running requests (see ``drafting``)."""

    def open(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int]) -> int:
        """Begin a request, or continue one after a pause.

        Args:
            number: of the request, different from those of all others that are open.
            sequence: its threads, read only. Accepted tokens are in it before ``advance`` is called.
            token_ids: prompt, and the answer's earlier tokens.

        Returns:
            how many of ``token_ids`` need not be computed.
        """

    def close(self, number: int) -> None:
        """Forget a request that has ended or is paused."""

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """Run one forward over rows of any requests, and over the next chunks of the prompts of others.

        Args:
            requested: at most one entry for each thread of a request.
            prompts: by request, token ids that follow those computed before.

        Returns:
            the candidates for each entry of ``requested``; without tokens where there is no memory for its rows.
        """

    def advance(self, number: int, thread: int, changes: RowChanges) -> None:
        """Follow the tree of a thread of a request, which has advanced."""

    def threads_changed(self, number: int) -> None:
        """Follow threads of a request that were opened, joined or ended."""

    def forget_prefixes(self) -> None:
        """Let requests that open from now on adopt no prefixes of ended ones."""
