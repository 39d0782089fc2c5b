"""Best-first injection over several decode threads: at every timestep the most probable rows of all their trees enter.

A draft forward takes the most probable undrafted rows of all threads, and a step the most probable rows that have not entered.
Roots are certain and so come first. Acceptance probabilities, width and number of draft forwards are learned as for one thread
(see ``best_first``), from all threads together.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Part, Request, Step, UserError
from pipedec.decoding.best_first import DRAFTED_ROWS, learn_from_accepted
from pipedec.decoding.choices import Choices, Proposal
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.proposers import DraftProposal, DraftProposer, NgramProposer
from pipedec.decoding.thread_drafter import ForestDrafter
from pipedec.decoding.threaded import MAX_THREADS
from pipedec.forest import Forest, Remaining, ThreadChanges, paths, position_root
from pipedec.methods import BestFirstOptions, options_of
from pipedec.threads import State
from pipedec.tree import Candidates


class _Branch:
    """The state of one thread: its injection tree and its n-gram draft source."""

    def __init__(self, injection: InjectionTree, ngrams: NgramProposer | None) -> None:
        self.injection = injection
        self.ngrams = ngrams
        self.root_pending = False  # the root has yet to enter


class BestFirstTeam:
    """The ``Team`` of method pipedec-bestfirst.

    Raises:
        UserError: the request leaves no draft source.
    """

    masks = NO_MASKS

    def __init__(
        self, request: Request, drafter: ForestDrafter | None, experience: Experience, forest: Forest, device: torch.device | str
    ) -> None:
        self._request = request
        self._forest = forest
        self._device = device
        self._controller = experience.controller(request)
        self._children = self._controller.children
        self._sources = options_of(request, BestFirstOptions).proposers
        self._drafter = drafter if "draft" in self._sources else None
        self._branches = {0: _Branch(InjectionTree(len(request.prompt_token_ids), device), self._ngrams(0))}
        prior = (*(DraftProposer.prior if self._drafter else ()), *(NgramProposer.prior if self._branches[0].ngrams else ()))
        if not prior:
            raise UserError("method pipedec-bestfirst has no proposer: give --draft DIR, or let the n-grams propose")
        self._acceptance = experience.acceptance(request, prior, device)

    def _ngrams(self, number: int) -> NgramProposer | None:
        """N-grams of the other threads, the prompt and, last, the tokens that the thread itself sees."""
        if "ngrams" not in self._sources:
            return None
        threads = self._forest.sequence.threads
        seen = [token for other, count in self._forest.sequence.context(number) for token in threads[other].token_ids[:count]]
        siblings = [] if number == 0 else [t for thread in threads if thread.number != number for t in thread.token_ids]
        return NgramProposer((*siblings, *self._request.prompt_token_ids, *seen), self._device)

    def prefill(self, token_ids: Tensor) -> None:
        if self._drafter is not None:
            self._drafter.prefill(token_ids, len(self._request.prompt_token_ids))

    def draft(self) -> None:
        """Run the number of draft forwards that the controller has set, each on rows of all threads."""
        for _ in range(self._controller.forwards if self._controller.is_speculating else 0):
            rows = {number: rows for number, rows in self._undrafted().items() if len(rows)}
            if not rows:
                return
            for number, proposals in self._proposals(rows).items():
                choices = Choices.merged(rows[number], proposals)
                self._branches[number].injection.add(choices, self._acceptance.log_chances(choices))

    def _proposals(self, rows: dict[int, Tensor]) -> dict[int, list[Proposal]]:
        trees = {number: self._branches[number].injection.tree for number in rows}
        found: dict[int, list[Proposal]] = {number: [] for number in rows}
        if self._drafter is not None:
            requested = [(number, trees[number], rows[number]) for number in rows]
            drafted: list[Candidates] = self._drafter.expand(requested, self._children)
            for number, candidates in zip(rows, drafted, strict=True):
                found[number].append(DraftProposal(candidates))
        for number, proposals in found.items():
            ngrams = self._branches[number].ngrams
            if ngrams is not None:
                proposals.append(ngrams.propose(trees[number], rows[number]))
        return found

    def _undrafted(self) -> dict[int, Tensor]:
        """By thread, the most probable undrafted rows among all threads, to be drafted now."""
        running = self._running()
        count = DRAFTED_ROWS if len(running) == 1 else 2 * DRAFTED_ROWS
        shares = self._shares(running, count, InjectionTree.undrafted_chances)
        taken = {number: running[number].injection.undrafted(share) for number, share in shares.items()}
        return {number: self._with_successors(number, rows) for number, rows in taken.items()}

    def _with_successors(self, number: int, rows: Tensor) -> Tensor:
        """Those of ``rows`` that can have successors: their token neither joins nor ends the thread."""
        sequence, tree = self._forest.sequence, self._branches[number].injection.tree
        has_successor = [
            not (path and sequence.is_control(path[-1]) and sequence.ends_walk(number, path[-1], path[:-1]))
            for path in paths(tree, rows.tolist())
        ]
        return rows[torch.tensor(has_successor, dtype=torch.bool, device=rows.device)]

    def _shares(
        self, branches: dict[int, _Branch], count: int, chances_of: Callable[[InjectionTree, int], Tensor]
    ) -> dict[int, int]:
        """By thread, the number of its rows among the ``count`` most probable rows of all ``branches``."""
        chances = {number: chances_of(branch.injection, count) for number, branch in branches.items()}
        if not chances:
            return {}
        owners = torch.cat([torch.full((len(of_tree),), number) for number, of_tree in chances.items()])
        all_chances = torch.cat(list(chances.values()))
        best = owners[all_chances.topk(min(count, len(all_chances))).indices.to(owners.device)]
        numbers, counts = best.unique(return_counts=True)
        return dict(zip(numbers.tolist(), counts.tolist(), strict=True))

    def _running(self) -> dict[int, _Branch]:
        threads = self._forest.sequence.threads
        return {number: branch for number, branch in self._branches.items() if threads[number].state is State.RUNNING}

    def apply(self, changes: ThreadChanges, parts: dict[int, Part]) -> None:
        threads = self._forest.sequence.threads
        for number, tokens in changes.accepted.items():
            self._accept(number, tokens)
        for number, remaining in changes.remaining.items():
            if number in self._branches and remaining is not Remaining.SUBTREE:
                self._cut(number)
        for start in changes.starts:
            if start.thread not in self._branches:
                self._branches[start.thread] = _Branch(InjectionTree(0, self._device), self._ngrams(start.thread))
            branch = self._branches[start.thread]
            if branch.ngrams is not None:
                branch.ngrams.accept((start.token,))
            self._plant(branch, start.token)
        for number in [number for number in self._branches if threads[number].state is State.ENDED and number > 0]:
            del self._branches[number]
        for number, branch in self._branches.items():
            position_root(branch.injection.tree, self._forest.sequence, number)
        if self._drafter is not None and changes.affects_threads:
            self._drafter.threads_changed()

    def _accept(self, number: int, tokens: tuple[int, ...]) -> None:
        branch = self._branches[number]
        learn_from_accepted(branch.injection, tokens, self._acceptance, self._controller)
        self._controller.record_accepted(len(tokens))
        advance, has_entered = branch.injection.advance(tokens)
        if self._drafter is not None:
            self._drafter.advance(number, advance)
        if branch.ngrams is not None:
            branch.ngrams.accept(tokens)
        branch.root_pending = not has_entered
        if not advance.hit:
            branch.injection.plant(tokens[-1])

    def _cut(self, number: int) -> None:
        """Drop all rows of a thread that waits or has ended."""
        branch = self._branches[number]
        advance = branch.injection.cut()
        if self._drafter is not None:
            self._drafter.advance(number, advance)
        branch.root_pending = False

    def _plant(self, branch: _Branch, token: int) -> None:
        branch.injection.plant(token)
        branch.root_pending = True

    def propose(self, room: int) -> list[tuple[int, Step]]:
        """The most probable rows of all threads; without speculation, their roots alone."""
        branches = self._entering()
        steps: list[tuple[int, Step]] = []
        width = min(self._controller.width, room) if self._controller.is_speculating else room
        pending = [number for number, branch in branches.items() if branch.root_pending]
        if not self._controller.is_speculating or len(pending) >= width:
            shares = dict.fromkeys(pending[:width], 1)  # parents before their children, which attend to the openers
        else:
            shares = self._shares(branches, width, InjectionTree.entering_chances)
        entered = []
        for number in sorted(shares):
            step, chances = branches[number].injection.enter(shares[number])
            if step is not None:
                steps.append((number, step))
                entered.append(chances)
                branches[number].root_pending = False
        if self._controller.is_speculating:
            self._controller.record_entered(torch.cat(entered) if entered else torch.zeros(0, device=self._device))
        return steps

    def _entering(self) -> dict[int, _Branch]:
        """At most MAX_THREADS running threads, those with pending roots first."""
        running = self._running()
        order = sorted(running, key=lambda number: (not running[number].root_pending, number))
        return {number: running[number] for number in order[:MAX_THREADS]}

    def observe(self, timing: TimestepTiming) -> None:
        self._controller.record_timestep(timing)
