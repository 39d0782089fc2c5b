"""The interface of decoding methods. A method decides which rows of an answer enter, and when.

Each method has its own file; ``pipedec.methods`` lists them. It decodes one thread; in an answer that may have several,
``ThreadedMethod`` is made of one for each. A method knows its thread's accepted tokens, its tree and the draft model; it knows no
other request, no process and no memory.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NO_MASKS, MaskParams, Step
from pipedec.core.verdict import Accepted, Verdict
from pipedec.decoding.budget import Demand
from pipedec.decoding.experience import Experience
from pipedec.decoding.forced import MAX_FORCED
from pipedec.decoding.proposers import Proposals
from pipedec.methods import find_method
from pipedec.model.markov import MarkovTable
from pipedec.threads import Sequence as ThreadSequence
from pipedec.threads import State
from pipedec.tree import Candidates, DraftRows, DraftTree, Growth, RowChanges, ThreadChanges, position_root


class Drafter(Protocol):
    """A draft model for the trees of all running requests (see ``drafting``)."""

    def open_lane(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        """Begin a request, or continue one after a pause. Returns how many of ``token_ids``, the prompt and the answer's earlier
        tokens, need not be computed. ``sequence`` is read only; accepted tokens are in it before ``advance`` is called.
        Candidates are tokens that the target will choose with ``sampling``.
        """

    def close_lane(self, number: int) -> None:
        """Forget a request that has ended or is paused."""

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        """Run one forward over rows of any requests, and over the next chunks of the prompts of others. Returns the candidates of
        each entry of ``requested``, without tokens if there is no memory for its rows. Entries of one request are adjacent, at
        most one for each thread. Rows whose ``growth`` says what will be asked for next may be followed by forwards over that,
        which later calls do not compute again.
        """

    def num_forwards(self, requested: Sequence[DraftRows]) -> int:
        """The number of forwards in which ``expand`` will compute these rows: 0 if it has, and more than one if it computes, as
        their ``growth`` says, what will be asked for next.
        """

    def follow_tree(self, number: int, thread: int, changes: RowChanges) -> None:
        """Follow the tree of a request's thread, which has advanced."""

    def threads_changed(self, number: int) -> None:
        """Follow threads of a request that were opened, joined or ended."""

    def forget_prefixes(self) -> None:
        """Let requests that open from now on adopt no prefixes of ended ones."""


POSITIONS = 16  # depths below a root at which accepted tokens are counted separately
ROWS_OF_SEVERAL_THREADS = 128  # of a step that enters whole and that threads share; more if the options allow one thread more


@dataclass
class Tally:
    """Counters of all requests of a run. They never decrease."""

    prompt_rows: int = 0  # tokens of prompts that have entered, and of answers that continue after a pause
    root_rows: int = 0  # certain tokens that have entered
    draft_rows: int = 0  # guesses that have entered
    mask_rows: int = 0  # masks that have entered
    drafts: int = 0  # roots that entered when nothing of their thread was in flight
    accepted_tokens: int = 0  # guesses that were accepted
    accepted_per_pos: list[int] = field(default_factory=lambda: [0] * POSITIONS)  # the same by depth below the root, from 1 on
    pauses: int = 0  # how often a request was paused
    corrupted: int = 0  # requests that ended because a stage computed NaN or infinity

    def count_accepted(self, depth: int, tokens: int) -> None:
        """Count ``tokens`` accepted guesses after one that was ``depth`` below its root."""
        self.accepted_tokens += tokens
        for position in range(depth, min(depth + tokens, POSITIONS)):
            self.accepted_per_pos[position] += 1


@dataclass
class Resources:
    """The objects that the methods of all requests of a run share.

    Attributes:
        experience: learned from earlier answers.
        drafter: the draft model, if there is one.
        device: of the draft model.
        trained_masks: mask rows that the target's BiTA was trained with; 0 if it has none.
        markov: of the target's BiTA, if it has one.
        awaits_drafter: the draft model is being loaded. Until then, the default method without it replaces those that need it.
    """

    experience: Experience
    drafter: Drafter | None = None
    device: torch.device | str = "cpu"
    trained_masks: int = 0
    markov: MarkovTable | None = None
    awaits_drafter: bool = False
    tally: Tally = field(default_factory=Tally)


class DraftRoom(NamedTuple):
    """Each request's share of a forward of the draft model."""

    rows: int = 16
    forwards: int = 2  # maximum forwards of this timestep for requests whose number of forwards is tuned
    min_chance: float = 0.0  # of a row that is drafted: candidates below less probable rows would not enter soon
    round: int = 0  # forwards computed in this timestep so far


class Entering(NamedTuple):
    """Rows that enter at a timestep, counted."""

    step: Step
    roots: int  # certain rows
    refills: int  # those of threads with nothing in flight


class Method(ABC):
    """Decodes one thread. In every timestep ``demand`` is followed, if there is room, by ``propose``. While the stages compute,
    ``draft`` and ``drafted`` alternate until ``draft`` returns no rows. ``accept`` follows each verdict.

    Args:
        request: as it is decoded now, perhaps without the draft model that it asks for.
        sequence: of the answer; read only.
    """

    masks: MaskParams = NO_MASKS  # the mask rows after the prompt and after rows of its steps
    tree: DraftTree | None = None  # its prediction tree; None if it has none
    children = 0  # number of candidates that it asks the draft model for after each row
    whole = 0  # maximum rows of a step, if they enter together or not at all; 0 if they may enter one by one
    choices = 0  # maximum candidates of all rows of a tree that is drafted at one timestep; 0 if it may stop after any forward
    is_tuned = False  # whether the number of its rows is tuned
    fills = False  # whether rows enter while others are in flight
    growth: Growth | None = None  # the rows that it will ask for after those of the last ``draft``; None if it cannot say
    root: int | None = None  # the thread's last certain token, if it has yet to enter. None at first.

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        self.request = request
        self.sequence = sequence
        self.resources = resources
        self.thread = thread
        self.grammar = sequence.grammar  # the answer's structure; None without one
        uses_draft = find_method(request.method).draft != "none"
        self.drafter = resources.drafter if uses_draft else None  # the draft model, if it uses one
        self.max_forced = 0 if self.grammar is None else MAX_FORCED  # rows of the longest chain of forced tokens
        self._below_root = 0  # accepted tokens after the root that entered last

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Rows that have entered and that no verdict has accepted or pruned."""

    @property
    def together(self) -> int:
        """Rows of its largest whole step, or 1."""
        return max(1, self.whole)

    @property
    def is_idle(self) -> bool:
        """Whether nothing enters and nothing is drafted before the next verdict. False if it cannot know."""
        return self.tree is None and self.root is None

    def lane_opened(self) -> None:  # noqa: B027 (most have nothing to follow)
        """Follow the opening of the request's lane: what is tuned takes its present value."""

    def index_text(self, most: int) -> int:
        """Index up to ``most`` tokens of the prompt, if it looks them up. Returns how many were indexed."""
        return 0

    @abstractmethod
    def demand(self) -> Demand:
        """The rows that it wants to enter at the next timestep."""

    def certain_rows(self, demand: Demand) -> int:
        """Maximum number of the rows of ``demand`` that are certain or must enter together."""
        return demand.whole or demand.certain

    def enter(self, room: int) -> Entering | None:
        """The rows that enter at the next timestep, at most ``room``; a step that enters whole has the demanded rows."""
        roots = int(self.root is not None)
        step = self.propose(max(self.whole, ROWS_OF_SEVERAL_THREADS) if self.whole else room)
        return None if step is None else Entering(step, roots, roots)

    @abstractmethod
    def propose(self, room: int) -> Step | None:
        """The thread's rows that enter at the next timestep, at most ``room``, or None."""

    def ask(self, room: DraftRoom) -> list[tuple[Method, Sequence[int]]]:
        """The rows to draft next, by method of a thread. Empty to end drafting."""
        rows = self.draft(room)
        return [(self, rows)] if rows else []

    def draft(self, room: DraftRoom) -> Sequence[int]:
        """The rows of its tree to draft next, ascending; at most ``room.rows``, unless its steps enter whole. None to end
        drafting.
        """
        return ()

    def undrafted_chances(self) -> Iterable[float]:
        """The log-chances of the rows that ``draft`` would return, best first. The threads of an answer share rows by them."""
        return ()

    def drafted(self, rows: Sequence[int], candidates: Candidates | None) -> Proposals | None:
        """Receive the candidates of ``rows``, which were drafted; None if it has no ``drafter``. Returns proposals that are to be
        scored together with those of other threads and requests, if there are any.
        """
        raise NotImplementedError(f"{type(self).__name__} drafts nothing")

    def follow(self, verdict: Verdict, changes: ThreadChanges) -> tuple[int, int]:
        """Advance to the accepted tokens, whose effects on threads are ``changes``. Returns its hits and misses (``Metrics``)."""
        for accepted in verdict.accepted:
            if accepted.thread in changes.accepted:
                self.accept(accepted)
        if changes.affects_threads and self.sequence.finished is not None:
            self.cut()
        elif self.tree is not None:
            position_root(self.tree, self.sequence, self.thread)
        tokens = changes.accepted.get(self.thread)
        return (0, 0) if tokens is None else self.count_accepted(len(tokens))

    def count_accepted(self, num_tokens: int) -> tuple[int, int]:
        """Count the accepted tokens. Returns hits and misses. The first token of an answer or of a child is neither."""
        goes_on = self.sequence.threads[self.thread].state is State.RUNNING
        is_hit = goes_on and self.root is None
        hits = num_tokens - 1 + is_hit
        self.resources.tally.count_accepted(self._below_root, hits)
        self._below_root = self._below_root + hits if is_hit else 0
        return hits, int(goes_on and not is_hit)

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
        return DraftRows(self.request.number, self.thread, self.tree, rows, self.children, self.growth)

    def _follow(self, changes: RowChanges) -> None:
        """Let the draft model's cache follow the tree."""
        if self.drafter is not None:
            self.drafter.follow_tree(self.request.number, self.thread, changes)


def new_method(request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> Method:
    """The method that the request names, for one thread. Raises UserError if it is unknown or cannot work here."""
    entry = find_method(request.method)
    entry.check_needs(resources.drafter is not None, resources.trained_masks > 0)
    module, _, name = entry.implementation.partition(":")
    method: Method = getattr(importlib.import_module(module), name)(request, sequence, resources, thread)
    return method
