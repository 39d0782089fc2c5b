"""What a decoding method is, and the table of them that the command line offers."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import MaskParams, Request, Step, UserError, Verdict
from pipedec.decoding.best_first import BestFirst
from pipedec.decoding.best_first_team import BestFirstTeam
from pipedec.decoding.bita import Bita
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.decoding.members import Member, Members
from pipedec.decoding.pipedec import PipeDec
from pipedec.decoding.plain import PlainPipeline
from pipedec.decoding.static_tree import StaticTree
from pipedec.decoding.thread_drafter import ForestDrafter, ThreadDrafter
from pipedec.decoding.threaded import Threaded
from pipedec.forest import Forest
from pipedec.threads import Sequence
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
    """The method that ``request`` asks for, for an answer in one thread, with what earlier answers have taught.

    Args:
        trained_masks: masks of the target's BiTA; 0 if it has none.

    Raises:
        UserError: the method is unknown, or needs a draft model or a BiTA and there is none.
    """
    kind = _kind(request)
    if issubclass(kind, BestFirst):
        return kind(request, drafter, experience, device)
    return _member(request, drafter, experience, device, trained_masks)


def create_threaded(
    request: Request,
    sequence: Sequence,
    drafter: ForestDrafter | None,
    experience: Experience,
    device: torch.device | str = "cpu",
    trained_masks: int = 0,
) -> Threaded:
    """As ``create_method``, for an answer in several threads.

    Args:
        sequence: the threads, just begun; nobody else replays it.
        drafter: replays nothing, but reads ``sequence``.
    """
    forest = Forest(sequence, device)
    if issubclass(_kind(request), BestFirst):
        return Threaded(forest, BestFirstTeam(request, drafter, experience, forest, device), device)

    def make(number: int) -> Member:
        own = None if drafter is None else ThreadDrafter(drafter, number)
        return _member(request, own, experience, device, trained_masks)

    return Threaded(forest, Members(forest, make, drafter), device)


def _kind(request: Request) -> type[PlainPipeline] | type[StaticTree] | type[PipeDec] | type[BestFirst] | type[Bita]:
    if request.method not in METHODS:
        raise UserError(f"unknown method {request.method!r}: choose one of {', '.join(METHODS)}")
    return METHODS[request.method]


def _member(
    request: Request, drafter: Drafter | None, experience: Experience, device: torch.device | str, trained_masks: int
) -> PlainPipeline | StaticTree | PipeDec | Bita:
    kind = _kind(request)
    if issubclass(kind, PlainPipeline):
        return kind(request, device)
    if issubclass(kind, Bita):
        return kind(request, trained_masks, experience, device)
    assert issubclass(kind, StaticTree | PipeDec)
    if drafter is None:
        raise UserError(f"method {request.method} needs a draft model: give --draft DIR, or use --method {DEFAULT_METHOD}")
    return kind(request, drafter, device)
