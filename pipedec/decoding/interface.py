"""What a decoding method is, and what it asks of a draft model: two protocols.

The constructor of a method takes, by these names, what it needs of: ``request``, ``drafter``, ``experience``, ``device``,
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
        """In one forward, the likeliest ``children`` of ``rows``: int64 [F], ascending, each after its ancestors."""

    def advance(self, advance: Advance) -> None: ...


class Method(Protocol):
    """Runs on rank 0. In every timestep: ``draft`` while the stages compute, ``apply`` when a verdict came, ``propose``."""

    hits: int
    misses: int

    @property
    def masks(self) -> MaskParams:
        """The mask rows that follow the prompt and rows of its steps."""

    def prefill(self, token_ids: Tensor) -> None:
        """Take in the next chunk of the prompt: int64 [R]. ``masks`` follow the last."""

    def draft(self) -> None:
        """The compute phase of rank 0: draft rows that are in flight, or what is to enter next."""

    def apply(self, verdict: Verdict) -> None:
        """Advance to the accepted tokens and forget what cannot come true."""

    def propose(self) -> Step | None:
        """The rows that enter the first stage at the next timestep, or None."""

    def observe(self, timing: TimestepTiming) -> None:
        """What a timestep of the full pipeline took."""
