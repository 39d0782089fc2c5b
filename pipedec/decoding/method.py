"""A decoding method at work on one thread of an answer: which of its rows enter the pipeline, and when.

One file per method; ``pipedec.methods`` lists them. A method knows its thread's accepted tokens, its tree and the draft model; it
knows no other request, no process and no memory.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from pipedec.core import NO_MASKS, Accepted, MaskParams, Request, Step
from pipedec.decoding.budget import Demand
from pipedec.decoding.drafter import Drafter
from pipedec.decoding.experience import Experience
from pipedec.decoding.forced import MAX_FORCED
from pipedec.decoding.scoring import Scoring
from pipedec.grammar import Grammar
from pipedec.methods import find_method
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, DraftTree, RowChanges


@dataclass
class DraftRoom:
    """The share of the draft model's forwards that each request may use in this timestep.

    Attributes:
        forwards: maximum forwards for requests whose number of forwards is tuned.
        rows: of each forward.
        min_chance: of a row that is drafted: the candidates below others are improbable, and would not enter soon.
        round: number of forwards computed in this timestep so far.
    """

    forwards: int = 2
    rows: int = 16
    min_chance: float = 0.0
    round: int = 0


@dataclass(frozen=True)
class MethodContext:
    """One answer, and the objects that its methods use.

    Attributes:
        sequence: the answer's threads; methods only read it.
        drafter: the draft model; None if there is none, or the method does not use it.
        experience: statistics learned from earlier answers.
        scoring: scores the proposals of draft sources, for all requests together.
        draft_room: the same object for all requests.
        grammar: the answer's structure; None without one.
        children: candidates per row, for requests whose number of candidates is tuned.
        device: of the draft model.
        trained_masks: mask rows that the target's BiTA was trained with; 0 if it has none.
    """

    request: Request
    sequence: ThreadSequence
    drafter: Drafter | None
    experience: Experience
    scoring: Scoring
    draft_room: DraftRoom
    children: int
    grammar: Grammar | None = None
    device: torch.device | str = "cpu"
    trained_masks: int = 0


class Method(ABC):
    """Decodes one thread. In every timestep it returns its ``demand`` and, if it gets room, the rows that it ``propose``s. While
    the stages compute, ``draft`` and ``drafted`` alternate until it has no more rows to draft. ``accept`` follows a verdict.

    Args:
        thread: number of the thread.

    Attributes:
        masks: the mask rows after the prompt and after rows of its steps.
        tree: its prediction tree; None if it has none.
        drafter: the draft model, if it uses one.
        max_forced: rows of the longest chain of forced tokens; 0 without a structure.
        children: number of candidates that it asks the draft model for after each row.
        whole: maximum rows of a step, if they enter together or not at all; 0 if they may enter one by one.
        is_tuned: whether the number of its rows is tuned.
        root: the thread's last certain token, if it has yet to enter. None at first.
    """

    masks: MaskParams = NO_MASKS
    tree: DraftTree | None = None
    children = 0
    whole = 0
    is_tuned = False
    root: int | None = None

    def __init__(self, context: MethodContext, thread: int) -> None:
        self.context = context
        self.thread = thread
        self.drafter = context.drafter
        self.max_forced = 0 if context.grammar is None else MAX_FORCED

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Rows that have entered and that no verdict has accepted or pruned."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing enters and nothing is drafted before the next verdict. False if that is unknown."""
        return self.tree is None and self.root is None

    @abstractmethod
    def demand(self) -> Demand:
        """The rows that it wants to enter at the next timestep."""

    @abstractmethod
    def propose(self, room: int) -> Step | None:
        """The rows that enter at the next timestep, at most ``room``, or None."""

    def draft(self, room: int) -> Sequence[int]:
        """The rows of its tree that the draft model computes next, ascending; none if there is nothing more to draft in this
        timestep.

        Args:
            room: maximum rows; a method of whole steps decides by itself.
        """
        return ()

    def undrafted_chances(self) -> Iterable[float]:
        """The log-chances of the rows that ``draft`` would return, best first. The threads of an answer share the draft model's
        rows by them, unless the method's steps enter whole.
        """
        return ()

    def drafted(self, rows: Sequence[int], candidates: Candidates | None) -> None:
        """Take the results of the draft model for ``rows``.

        Args:
            candidates: None if it has no ``drafter``.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts nothing")

    @abstractmethod
    def accept(self, accepted: Accepted) -> None:
        """Advance to the accepted tokens and prune what can no longer be accepted."""

    @abstractmethod
    def cut(self) -> None:
        """Drop all rows: the thread waits or has ended."""

    def plant(self, token: int) -> None:
        """Start over with a certain token: a forced token or a join token."""
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
    """The method that the context's request names, for one of its threads.

    Raises:
        UserError: the method is unknown, cannot work with its options, or needs a draft model or a BiTA and there is none.
    """
    entry = find_method(context.request.method)
    entry.check_needs(context.drafter is not None, context.trained_masks > 0)
    if entry.draft == "none":
        context = replace(context, drafter=None)
    module, _, name = entry.implementation.partition(":")
    method: Method = getattr(importlib.import_module(module), name)(context, thread)
    return method
