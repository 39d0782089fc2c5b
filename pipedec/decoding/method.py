"""What a decoding method is, and the table of them that the command line offers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import Request, Step, UserError, Verdict
from pipedec.decoding.pipedec import PipeDec
from pipedec.decoding.plain import PlainPipeline
from pipedec.tree import Advance, Candidates, PredictionTree


class Drafter(Protocol):
    """A model that proposes children for tree rows (see ``drafting``)."""

    def begin(self) -> None: ...

    def prefill(self, token_ids: Tensor, prompt_length: int) -> None: ...

    def expand(self, tree: PredictionTree, children: int) -> Candidates: ...

    def advance(self, advance: Advance) -> None: ...


class Method(Protocol):
    """Runs on rank 0. In every timestep: ``draft`` while the stages compute, ``apply`` when a verdict came, ``propose``."""

    hits: int
    misses: int

    def prefill(self, token_ids: Tensor) -> None:
        """Take in the next chunk of the prompt: int64 [R]."""

    def draft(self) -> None:
        """The compute phase of rank 0: draft the rows that entered the first stage at this timestep."""

    def apply(self, verdict: Verdict) -> None:
        """Advance to the accepted tokens and forget what cannot come true."""

    def propose(self) -> Step | None:
        """The rows that enter the first stage at the next timestep, or None."""


METHODS: dict[str, type[PlainPipeline] | type[PipeDec]] = {"pp": PlainPipeline, "pipedec": PipeDec}


def create_method(request: Request, drafter: Drafter | None, device: torch.device | str = "cpu") -> Method:
    """The method that ``request`` asks for.

    Raises:
        UserError: the method is unknown, or needs a draft model and there is none.
    """
    if request.method == "pp":
        return PlainPipeline(request, device)
    if request.method == "pipedec":
        if drafter is None:
            raise UserError("method pipedec needs a draft model: give --draft DIR, or use --method pp")
        return PipeDec(request, drafter, device)
    raise UserError(f"unknown method {request.method!r}: choose one of {', '.join(METHODS)}")
