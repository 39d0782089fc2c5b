"""The protocols of a decoding method and of the draft model that it uses.

The constructor of a method names the arguments that it needs: ``request``, ``drafter``, ``experience``, ``device``,
``trained_masks`` (see ``registry``).
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from pipedec.core import MaskParams, Step, Verdict
from pipedec.decoding.controller import TimestepTiming
from pipedec.tree import Advance, Candidates, PredictionTree


class Drafter(Protocol):
    """A model that proposes children for tree rows (see ``drafting``)."""

    def begin(self) -> None: ...

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None: ...

    def expand(self, tree: PredictionTree, rows: Tensor, children: int) -> Candidates:
        """In one forward, the ``children`` most probable children of each of ``rows``: int64 [F], ascending, ancestors first."""

    def advance(self, advance: Advance) -> None: ...


class Method(Protocol):
    """Runs on rank 0. In every timestep: ``draft`` while the stages compute, ``apply`` if there is a verdict, ``propose``."""

    hits: int
    misses: int

    @property
    def masks(self) -> MaskParams:
        """The mask rows behind the prompt and behind rows of the method's steps."""

    def prefill(self, token_ids: Tensor) -> None:
        """Process the next chunk of the prompt: int64 [R]. The ``masks`` follow the last chunk."""

    def draft(self) -> None:
        """Rank 0's compute phase: run the draft model below rows in flight, or for the rows that enter next."""

    def apply(self, verdict: Verdict) -> None:
        """Advance to the accepted tokens and prune what can no longer be accepted."""

    def propose(self) -> Step | None:
        """The rows that enter the first stage at the next timestep, or None."""

    def observe(self, timing: TimestepTiming) -> None:
        """Learn how long a timestep of the full pipeline took."""
