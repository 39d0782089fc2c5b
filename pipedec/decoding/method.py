"""What a decoding method is, and the table of them that the command line offers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import MaskParams, Request, Step, UserError, Verdict
from pipedec.decoding.best_first import BestFirst
from pipedec.decoding.bita import Bita
from pipedec.decoding.controller import Beat
from pipedec.decoding.experience import Experience
from pipedec.decoding.pipedec import PipeDec
from pipedec.decoding.plain import PlainPipeline
from pipedec.decoding.static_tree import StaticTree
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

    def observe(self, beat: Beat) -> None:
        """What a timestep of the full pipeline took."""


DEFAULT_METHOD = "pipedec-bestfirst"
METHODS: dict[str, type[PlainPipeline] | type[StaticTree] | type[PipeDec] | type[BestFirst] | type[Bita]] = {
    "pp": PlainPipeline,
    "stpp": StaticTree,
    "pipedec": PipeDec,
    DEFAULT_METHOD: BestFirst,
    "bita": Bita,
}


def create_method(
    request: Request,
    drafter: Drafter | None,
    experience: Experience,
    device: torch.device | str = "cpu",
    trained_masks: int = 0,
) -> Method:
    """The method that ``request`` asks for, with what earlier answers have taught.

    Args:
        trained_masks: masks of the target's BiTA; 0 if it has none.

    Raises:
        UserError: the method is unknown, or needs a draft model or a BiTA and there is none.
    """
    if request.method not in METHODS:
        raise UserError(f"unknown method {request.method!r}: choose one of {', '.join(METHODS)}")
    kind = METHODS[request.method]
    if issubclass(kind, PlainPipeline):
        return kind(request, device)
    if issubclass(kind, BestFirst):
        return kind(request, drafter, experience, device)
    if issubclass(kind, Bita):
        return kind(request, trained_masks, experience, device)
    if drafter is None:
        raise UserError(f"method {request.method} needs a draft model: give --draft DIR, or use --method {DEFAULT_METHOD}")
    return kind(request, drafter, device)
