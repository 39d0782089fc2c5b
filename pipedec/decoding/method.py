"""The interface of decoding methods. A method decodes one thread of an answer: it decides which rows enter, and when.

Each method has its own file; ``pipedec.methods`` lists them. A method knows its thread's accepted tokens, its tree and the draft
model; it knows no other request, no process and no memory.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NO_MASKS, MaskParams, Step
from pipedec.core.verdict import Accepted
from pipedec.decoding.budget import Demand
from pipedec.decoding.experience import Experience
from pipedec.decoding.forced import MAX_FORCED
from pipedec.decoding.proposers import Proposals
from pipedec.grammar import Grammar
from pipedec.methods import find_method
from pipedec.model.markov import MarkovTable
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, DraftTree, RowChanges


class Drafter(Protocol):
    """A draft model for the trees of all running requests (see ``drafting``)."""

    def open(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """Begin a request, or continue one after a pause. Returns how many of ``token_ids``, the prompt and the answer's earlier
        tokens, need not be computed. ``sequence`` is read only; accepted tokens are in it before ``advance`` is called.
        Candidates are tokens that the target will choose with ``sampling``.
        """

    def close(self, number: int) -> None:
        """Forget a request that has ended or is paused."""

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """Run one forward over rows of any requests, and over the next chunks of the prompts of others. Returns the candidates of
        each entry of ``requested``, without tokens if there is no memory for its rows. Entries of one request are adjacent, at
        most one for each thread.
        """

    def advance(self, number: int, thread: int, changes: RowChanges) -> None:
        """Follow the tree of a request's thread, which has advanced."""

    def threads_changed(self, number: int) -> None:
        """Follow threads of a request that were opened, joined or ended."""

    def forget_prefixes(self) -> None:
        """Let requests that open from now on adopt no prefixes of ended ones."""


@dataclass
class DraftRoom:
    """Each request's share of the draft model's forwards in this timestep."""

    forwards: int = 2  # maximum forwards for requests whose number of forwards is tuned
    rows: int = 16  # of each forward
    min_chance: float = 0.0  # of a row that is drafted: candidates below less probable rows would not enter soon
    round: int = 0  # number of forwards computed in this timestep so far


@dataclass(frozen=True)
class MethodContext:
    """One answer, and the objects that its methods use."""

    request: TokenizedRequest
    sequence: ThreadSequence  # methods only read it
    drafter: Drafter | None  # the draft model; None if there is none, or the method does not use it
    experience: Experience  # statistics learned from earlier answers
    proposals: list[Proposals]  # of draft sources, for all requests, which are then scored together
    draft_room: DraftRoom  # the same object for all requests
    children: int  # candidates per row, for requests whose number of candidates is tuned
    grammar: Grammar | None = None  # the answer's structure; None without one
    device: torch.device | str = "cpu"  # of the draft model
    trained_masks: int = 0  # mask rows that the target's BiTA was trained with; 0 if it has none
    markov: MarkovTable | None = None  # of the target's BiTA


class Method(ABC):
    """Decodes one thread. In every timestep ``demand`` is followed, if there is room, by ``propose``. While the stages compute,
    ``draft`` and ``drafted`` alternate until ``draft`` returns no rows. ``accept`` follows each verdict.
    """

    masks: MaskParams = NO_MASKS  # the mask rows after the prompt and after rows of its steps
    tree: DraftTree | None = None  # its prediction tree; None if it has none
    children = 0  # number of candidates that it asks the draft model for after each row
    whole = 0  # maximum rows of a step, if they enter together or not at all; 0 if they may enter one by one
    choices = 0  # maximum candidates of all rows of a tree that is drafted at one timestep; 0 if it may stop after any forward
    is_tuned = False  # whether the number of its rows is tuned
    fills = False  # whether rows enter while others are in flight
    root: int | None = None  # the thread's last certain token, if it has yet to enter. None at first.

    def __init__(self, context: MethodContext, thread: int) -> None:
        self.context = context
        self.thread = thread
        self.drafter = context.drafter  # the draft model, if it uses one
        self.max_forced = 0 if context.grammar is None else MAX_FORCED  # rows of the longest chain of forced tokens

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Rows that have entered and that no verdict has accepted or pruned."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing enters and nothing is drafted before the next verdict. False if it cannot know."""
        return self.tree is None and self.root is None

    @abstractmethod
    def demand(self) -> Demand:
        """The rows that it wants to enter at the next timestep."""

    @abstractmethod
    def propose(self, room: int) -> Step | None:
        """The rows that enter at the next timestep, at most ``room``, or None."""

    def draft(self, room: int) -> Sequence[int]:
        """The rows of its tree to draft next, ascending; at most ``room``, unless its steps enter whole. None to end drafting."""
        return ()

    def undrafted_chances(self) -> Iterable[float]:
        """The log-chances of the rows that ``draft`` would return, best first. The threads of an answer share rows by them."""
        return ()

    def drafted(self, rows: Sequence[int], candidates: Candidates | None) -> None:
        """Take the candidates of ``rows``, which were drafted; None if it has no ``drafter``."""
        raise NotImplementedError(f"{type(self).__name__} drafts nothing")

    @abstractmethod
    def accept(self, accepted: Accepted) -> None:
        """Advance to the accepted tokens and prune what can no longer be accepted."""

    @abstractmethod
    def cut(self) -> None:
        """Drop all rows: the thread waits or has ended."""

    def plant(self, token: int) -> None:
        """Start over with a certain token as root: a forced token or a join token."""
        self.root = token

    def to_draft(self, rows: Sequence[int]) -> DraftRows:
        """``rows`` of its tree for the draft model."""
        assert self.tree is not None
        return DraftRows(self.context.request.number, self.thread, self.tree, rows, self.children)

    def _follow(self, changes: RowChanges) -> None:
        """Let the draft model's cache follow the tree."""
        if self.drafter is not None:
            self.drafter.advance(self.context.request.number, self.thread, changes)


def new_method(context: MethodContext, thread: int = 0) -> Method:
    """The method that the context's request names, for one thread. Raises UserError if it is unknown or cannot work here."""
    entry = find_method(context.request.method)
    entry.check_needs(context.drafter is not None, context.trained_masks > 0)
    if entry.draft == "none":
        context = replace(context, drafter=None)
    module, _, name = entry.implementation.partition(":")
    method: Method = getattr(importlib.import_module(module), name)(context, thread)
    return method
