"""Best-first injection (``pipedec-bestfirst``): at every timestep the most probable rows of *any* depth enter the pipeline.

While the stages compute, the draft model runs several forwards, each on the most probable rows that are not drafted yet, at any
depth. A row's probability is the product of *learned* acceptance probabilities along its path (``acceptance``). So several layers
enter at once where drafts are reliable. Where they are not, further siblings near the root enter later: such a token is delayed a
little, where the paper's policy would have a miss and drain the pipeline. If an accepted token was drafted but has not entered,
its subtree is kept and enters with it.

If an answer has several threads, the rows of all their trees are compared: roots are certain and so come first. Acceptance
probabilities are learned from all threads together. How many rows enter is the company's decision (``budget``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from heapq import merge
from itertools import islice, repeat
from math import exp, inf, log

import torch

from pipedec.core import NO_MASKS, Accepted, Step, UserError
from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.budget import Wish
from pipedec.decoding.choices import NO_LINE
from pipedec.decoding.context import MethodContext
from pipedec.decoding.controller import Controller
from pipedec.decoding.drafter import RequestDrafter
from pipedec.decoding.forced import chain_below
from pipedec.decoding.injection import InjectionTree, Lesson
from pipedec.decoding.lockstep import Drafting
from pipedec.decoding.proposers import DraftProposal, NgramProposer, Occurrences, possible
from pipedec.methods import BestFirstOptions, options_of
from pipedec.tree import Candidates, DraftRows


class Branch:
    """The rows of one thread."""

    def __init__(self, number: int, policy: BestFirst, ngrams: NgramProposer | None) -> None:
        self.number = number
        grammar = policy.grammar
        self.tree = InjectionTree(None if grammar is None else partial(chain_below, grammar))
        self.ngrams = ngrams
        self.root_pending = False  # the root has yet to enter
        self._policy = policy

    @property
    def has_entered(self) -> bool:
        return not self.root_pending

    @property
    def in_flight(self) -> int:
        return self.tree.num_entered

    def accept(self, accepted: Accepted) -> None:
        changes, hit, lessons = self.tree.advance(accepted.tokens)
        self._policy.learn(lessons, len(accepted.tokens))
        if self._policy.drafter is not None:
            self._policy.drafter.advance(self.number, changes)
        if self.ngrams is not None:
            self.ngrams.accept(accepted.tokens)
        self.root_pending = not self.tree.root_has_entered
        if not hit:
            self.tree.plant(accepted.tokens[-1])

    def find(self, rows: list[int]) -> list[Occurrences] | None:
        """What n-grams know of rows; None if they are no source."""
        if self.ngrams is None:
            return None
        paths, grammar = [self.tree.path(row) for row in rows], self._policy.grammar
        found = [self.ngrams.find(path) for path in paths]
        if grammar is None:
            return found
        return [one.within(grammar.allowed(path)) for one, path in zip(found, paths, strict=True)]

    def cut(self) -> None:
        changes = self.tree.cut()
        if self._policy.drafter is not None:
            self._policy.drafter.advance(self.number, changes)
        self.root_pending = False

    def plant(self, token: int) -> None:
        if self.ngrams is not None:
            self.ngrams.accept((token,))
        self.tree.plant(token)
        self.root_pending = True


class BestFirst:
    """Limits that the request does not set are tuned by ``Controller``.

    Raises:
        UserError: the request leaves no draft source.
    """

    masks = NO_MASKS
    largest = 0
    together = 1

    def __init__(self, context: MethodContext) -> None:
        self._options = options_of(context.request, BestFirstOptions)
        sources = self._options.proposers
        self.drafter: RequestDrafter | None = context.drafter if "draft" in sources else None
        self._uses_ngrams = "ngrams" in sources
        prior = (*(DraftProposal.prior if self.drafter else ()), *(NgramProposer.prior if self._uses_ngrams else ()))
        if not prior:
            raise UserError("method pipedec-bestfirst has no proposer: give --draft DIR, or let the n-grams propose")
        self.is_tuned = self._options.width is None
        self.grammar = context.grammar
        self._context = context
        self._sequence = context.sequence
        self._controller: Controller = context.experience.controller
        self._children = self._options.children or self._controller.children
        self._acceptance: Acceptance = context.experience.acceptance(context.request, prior)

    @property
    def _is_speculating(self) -> bool:
        return self._controller.is_speculating or not self.is_tuned

    def create(self, number: int) -> Branch:
        return Branch(number, self, self._ngrams(number) if self._uses_ngrams else None)

    def _ngrams(self, number: int) -> NgramProposer:
        """N-grams of the other threads, the prompt and, last, the tokens that the thread itself sees.

        Among those are the tokens that an answer in one thread has said before it was resumed.
        """
        threads = self._sequence.threads
        seen = [token for other, count in self._sequence.context(number) for token in threads[other].token_ids[:count]]
        siblings = [] if number == 0 else [t for thread in threads if thread.number != number for t in thread.token_ids]
        said = threads[0].token_ids if number == 0 else []
        return NgramProposer((*siblings, *self._context.request.prompt_token_ids, *seen, *said))

    def learn(self, lessons: list[Lesson], num_accepted: int) -> None:
        """Update the acceptance model with every accepted token that follows a drafted row."""
        self._controller.record_accepted(num_accepted)
        for choices, place, token in lessons:
            self._controller.record_proposed(self._acceptance.observe(choices, place, token))

    def draft(self, running: dict[int, Branch]) -> Drafting:
        """Several draft forwards, each on rows of all threads."""
        forwards = self._options.forwards or self._context.draft_room.forwards
        for _ in range(forwards if self._is_speculating else 0):
            rows = {number: rows for number, rows in self._undrafted(running).items() if rows}
            if not rows:
                return
            candidates: list[Candidates] | list[None] = [None] * len(rows)
            if self.drafter is not None:
                drafted = yield self._requested(self.drafter, running, rows)
                candidates = drafted if self.grammar is None else [possible(one) for one in drafted]
            submitted = [
                self._context.scoring.submit(self._acceptance, proposed, running[number].find(of_thread))
                for (number, of_thread), proposed in zip(rows.items(), candidates, strict=True)
            ]
            yield []  # what all requests propose is scored together
            for (number, of_thread), scored in zip(rows.items(), submitted, strict=True):
                running[number].tree.add(of_thread, scored.lines)

    def _requested(self, drafter: RequestDrafter, running: dict[int, Branch], rows: dict[int, list[int]]) -> list[DraftRows]:
        return [drafter.rows(number, running[number].tree, of_thread, self._children) for number, of_thread in rows.items()]

    def _undrafted(self, running: dict[int, Branch]) -> dict[int, list[int]]:
        """By thread, the most probable undrafted rows among all threads, to be drafted now."""
        room = self._context.draft_room
        count = room.rows if len(running) == 1 else 2 * room.rows
        least = log(room.min_chance) if room.min_chance > 0 and self.is_tuned else -inf
        shares = _shares(running, count, InjectionTree.undrafted_chances)
        taken = {number: running[number].tree.undrafted(share, least) for number, share in shares.items()}
        if not self._sequence.can_fork:
            return taken
        return {number: self._with_successors(running[number], rows) for number, rows in taken.items()}

    def _with_successors(self, branch: Branch, rows: list[int]) -> list[int]:
        """Those of ``rows`` that can have successors: their token neither joins nor ends the thread."""
        ended = {row for row in rows if self._ends(branch.number, branch.tree.path(row))}
        branch.tree.add(list(ended), [NO_LINE] * len(ended))
        return [row for row in rows if row not in ended]

    def _ends(self, thread: int, path: list[int]) -> bool:
        sequence = self._sequence
        return bool(path) and sequence.is_control(path[-1]) and sequence.ends_walk(thread, path[-1], path[:-1])

    def rests(self, running: dict[int, Branch]) -> bool:
        return all(branch.has_entered and branch.tree.is_exhausted for branch in running.values())

    def wish(self, running: dict[int, Branch]) -> Wish:
        """The roots and what is forced behind them, and then the most probable rows of all threads."""
        most = self._options.width
        pending = sum(branch.tree.num_certain for branch in running.values())
        certain = pending if most is None else min(pending, most)
        if not self._is_speculating:
            return Wish(certain)
        of_threads = [branch.tree.entering_chances() for branch in running.values()]
        chances = of_threads[0] if len(of_threads) == 1 else merge(*of_threads, reverse=True)
        return Wish(certain, chances=map(exp, islice(chances, pending, None)), most=most)

    def propose(self, running: dict[int, Branch], room: int) -> list[tuple[int, Step]]:
        """The most probable rows of all threads, roots first."""
        pending = [number for number, branch in running.items() if branch.root_pending]
        if len(pending) >= room:
            shares = dict.fromkeys(pending[:room], 1)  # parents before their children, which attend to the openers
        else:
            shares = _shares(running, room, InjectionTree.entering_chances)
        steps = []
        for number in sorted(shares):
            token_ids, parents = running[number].tree.enter(shares[number])
            if token_ids:
                rows = torch.tensor((token_ids, parents))
                steps.append((number, Step(rows[0], rows[1], log_probs=running[number].tree.log_probs)))
                running[number].root_pending = False
        return steps


def _shares(running: dict[int, Branch], count: int, chances_of: Callable[[InjectionTree], Iterator[float]]) -> dict[int, int]:
    """By thread, the number of its rows among the ``count`` most probable rows of all threads."""
    if len(running) <= 1:
        return dict.fromkeys(running, count)
    owned = [zip(chances_of(branch.tree), repeat(number)) for number, branch in running.items()]
    shares: dict[int, int] = {}
    for _, number in islice(merge(*owned, key=lambda pair: pair[0], reverse=True), count):
        shares[number] = shares.get(number, 0) + 1
    return shares
