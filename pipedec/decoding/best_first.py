"""Best-first injection (``pipedec-bestfirst``): at every timestep the most probable rows of *any* depth enter the pipeline.

While the stages compute, the draft model runs several forwards, each on the most probable rows that are not drafted yet, at any
depth. A row's probability is the product of *learned* acceptance probabilities along its path (``acceptance``). So several layers
enter at once where drafts are reliable. Where they are not, more siblings near the root enter later: if one of them is accepted,
its token is delayed a little, where the paper's policy would miss and drain the pipeline. If an accepted token was drafted but
has not entered, its subtree is kept and enters with it.

Where the text recurs, the draft model is too slow: a chain of tokens that followed a long n-gram before, in this text or in an
earlier answer, enters at once, and is drafted when there is time (``_guess``). The chance of such a token is how often n-grams of
that length were right.

The rows of all threads of an answer are compared; roots are certain and so come first. Acceptance probabilities are learned from
all threads together. How many rows enter is decided for all requests together (``budget``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from math import exp, inf, log

import torch

from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import Step
from pipedec.core.verdict import Accepted
from pipedec.decoding.acceptance import NO_LINE, Line
from pipedec.decoding.budget import Demand
from pipedec.decoding.forced import chain_below
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.method import DraftRoom, Method, Resources
from pipedec.decoding.proposers import Proposals
from pipedec.decoding.sources import DraftAlone, DraftSources
from pipedec.methods import BestFirstOptions, options_of
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, Growth

_GUESSED_ROWS = 8  # in one round
_GUESS_ROUNDS = 8
_MIN_GUESSED = 0.15  # chance of the rows below which tokens are guessed
_MIN_RATE = 0.5  # of a guessed token, given the row above it


class BestFirst(Method):
    """The most probable rows of one thread. Raises UserError if the request leaves no draft source."""

    tree: InjectionTree
    fills = True

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        self._options = options_of(request, BestFirstOptions)
        if "draft" not in self._options.proposers:
            self.drafter = None
        self._sources = self._new_sources()
        self.is_tuned = self._options.width is None
        self.tree = InjectionTree(None if self.grammar is None else partial(chain_below, self.grammar))
        self._controller = resources.experience.controller
        self.lane_opened()

    def lane_opened(self) -> None:
        self.children = (self._options.children or self._controller.children) if self.drafter else 0

    def _new_sources(self) -> DraftAlone | DraftSources:
        return DraftSources(self, self._options.proposers, self.drafter is not None)

    @property
    def in_flight(self) -> int:
        return self.tree.num_entered

    @property
    def is_idle(self) -> bool:
        return self.root is None and self.tree.is_exhausted

    @property
    def _is_speculating(self) -> bool:
        return self._controller.is_speculating or not self.is_tuned

    def demand(self) -> Demand:
        """The root and its forced rows, then the most probable rows."""
        pending, most = self.tree.num_certain, self._options.width
        certain = pending if most is None else min(pending, most)
        if not self._is_speculating:
            return Demand(certain)
        return Demand(certain, chances=map(exp, islice(self.tree.entering_chances(), pending, None)), most=most)

    def propose(self, room: int) -> Step | None:
        token_ids, parents = self.tree.enter(room)
        if not token_ids:
            return None
        self.root = None
        entering, below = torch.tensor((token_ids, parents)).unbind()
        return Step(entering, below, log_probs=self.tree.log_probs)

    def draft(self, room: DraftRoom) -> Sequence[int]:
        """The most probable rows that are not drafted. Called several times in a timestep."""
        if not self._is_speculating:
            return ()
        left = (self._options.forwards or room.forwards) - room.round
        if left <= 0:
            self._guess()
            return ()
        least = log(room.min_chance) if room.min_chance > 0 and self.is_tuned else -inf
        rows = self.tree.undrafted(room.rows, least)
        if not self.sequence.can_fork:
            self.growth = self._growth(rows, left - 1, room.rows)
            return rows
        ended = [row for row in rows if self._ends(self.tree.path(row))]
        self.tree.add(ended, [NO_LINE] * len(ended))
        return [row for row in rows if row not in ended]

    def _growth(self, rows: Sequence[int], forwards: int, more: int) -> Growth | None:
        """The ``forwards`` after that of ``rows``, each of up to ``more`` rows."""
        log_chances = self._sources.log_chances
        if self.drafter is None or log_chances is None or self.grammar is not None:
            return None
        return Growth(forwards, more, False, log_chances, partial(self.tree.frontier, rows, forwards * more))

    def _guess(self) -> None:
        """Add tokens that followed long n-grams, below the most probable rows that the draft model has not reached."""
        if self.sequence.can_fork:
            return
        tried = set[int]()
        for _ in range(_GUESS_ROUNDS):
            rows, lines = list[int](), list[Line]()
            probable = [row for row in self.tree.without_choices(_GUESSED_ROWS, log(_MIN_GUESSED)) if row not in tried]
            tried.update(probable)
            for row in probable:
                path, grammar = self.tree.path(row), self.grammar
                rate, token = self._sources.copied(path)
                if rate >= _MIN_RATE and (grammar is None or token in grammar.allowed(path)):
                    rows.append(row)
                    lines.append(Line([token], [log(rate)], None, 0))
            if not rows:
                return
            self.tree.guess(rows, lines)

    def _ends(self, path: list[int]) -> bool:
        """Whether nothing follows the last token of ``path``, because it joins or ends the thread."""
        sequence = self.sequence
        return bool(path) and sequence.is_control(path[-1]) and sequence.ends_walk(self.thread, path[-1], path[:-1])

    def index_text(self, most: int) -> int:
        return self._sources.index_text(most)

    def undrafted_chances(self) -> Iterator[float]:
        return self.tree.undrafted_chances()

    def drafted(self, rows: Sequence[int], candidates: Candidates | None) -> Proposals | None:
        return self._sources.propose(self.tree, rows, candidates)

    def accept(self, accepted: Accepted) -> None:
        """Advance, and learn from each accepted token that follows a drafted row."""
        changes, hit, lessons = self.tree.advance_to(accepted.tokens)
        self._controller.record_accepted(len(accepted.tokens), self.tree.num_entered > 0)
        self._sources.learn(lessons)
        self._follow(changes)
        self._sources.append(accepted.tokens)
        self.root = None if self.tree.num_entered else accepted.tokens[-1]
        if not hit:
            self.tree.plant(accepted.tokens[-1])

    def cut(self) -> None:
        self._follow(self.tree.cut())
        self.root = None

    def plant(self, token: int) -> None:
        super().plant(token)
        self._sources.append((token,))
        self.tree.plant(token)
