"""Best-first injection (``pipedec-bestfirst``): at every timestep the most probable rows of *any* depth enter the pipeline.

While the stages compute, the draft model runs several forwards, each on the most probable rows that are not drafted yet, at any
depth. A row's probability is the product of *learned* acceptance probabilities along its path (``acceptance``). So several layers
enter at once where drafts are reliable. Where they are not, further siblings near the root enter later: such a token is delayed a
little, where the paper's policy would have a miss and drain the pipeline. If an accepted token was drafted but has not entered,
its subtree is kept and enters with it.

If an answer has several threads, the rows of all their trees are compared: roots are certain and so come first. Acceptance
probabilities, width and number of draft forwards are learned from all threads together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Accepted, Step, UserError
from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.choices import Choices, Proposal
from pipedec.decoding.context import MethodContext
from pipedec.decoding.controller import Controller, TimestepTiming
from pipedec.decoding.drafter import RequestDrafter
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.lockstep import Drafting
from pipedec.decoding.proposers import DraftProposal, NgramProposer
from pipedec.forest import paths
from pipedec.methods import BestFirstOptions, options_of
from pipedec.tree import DraftRows, PredictionTree

DRAFTED_ROWS = 16  # of one forward for one thread: more make no answer faster


class Branch:
    """The rows of one thread."""

    def __init__(self, number: int, policy: BestFirst, ngrams: NgramProposer | None, device: torch.device | str) -> None:
        self.number = number
        self.injection = InjectionTree(device)
        self.ngrams = ngrams
        self.root_pending = False  # the root has yet to enter
        self._policy = policy

    @property
    def tree(self) -> PredictionTree:
        return self.injection.tree

    @property
    def has_entered(self) -> bool:
        return not self.root_pending

    def accept(self, accepted: Accepted) -> None:
        advance, choices = self.injection.advance(accepted.tokens)
        self._policy.learn(choices, advance.committed.tolist(), accepted.tokens)
        if self._policy.drafter is not None:
            self._policy.drafter.advance(self.number, advance)
        if self.ngrams is not None:
            self.ngrams.accept(accepted.tokens)
        self.root_pending = not self.injection.root_has_entered
        if not advance.hit:
            self.injection.plant(accepted.tokens[-1])

    def cut(self) -> None:
        advance = self.injection.cut()
        if self._policy.drafter is not None:
            self._policy.drafter.advance(self.number, advance)
        self.root_pending = False

    def plant(self, token: int) -> None:
        if self.ngrams is not None:
            self.ngrams.accept((token,))
        self.injection.plant(token)
        self.root_pending = True


class BestFirst:
    """Limits that the request does not set are tuned by ``Controller``.

    Raises:
        UserError: the request leaves no draft source.
    """

    masks = NO_MASKS

    def __init__(self, context: MethodContext) -> None:
        sources = options_of(context.request, BestFirstOptions).proposers
        self.drafter: RequestDrafter | None = context.drafter if "draft" in sources else None
        self._uses_ngrams = "ngrams" in sources
        prior = (*(DraftProposal.prior if self.drafter else ()), *(NgramProposer.prior if self._uses_ngrams else ()))
        if not prior:
            raise UserError("method pipedec-bestfirst has no proposer: give --draft DIR, or let the n-grams propose")
        self._context = context
        self._sequence = context.sequence
        self._controller: Controller = context.experience.controller(context.request)
        self._children = self._controller.children
        self._acceptance: Acceptance = context.experience.acceptance(context.request, prior, context.device)

    @property
    def rows(self) -> int:
        return self._controller.width

    def create(self, number: int) -> Branch:
        return Branch(number, self, self._ngrams(number) if self._uses_ngrams else None, self._context.device)

    def _ngrams(self, number: int) -> NgramProposer:
        """N-grams of the other threads, the prompt and, last, the tokens that the thread itself sees."""
        threads = self._sequence.threads
        seen = [token for other, count in self._sequence.context(number) for token in threads[other].token_ids[:count]]
        siblings = [] if number == 0 else [t for thread in threads if thread.number != number for t in thread.token_ids]
        return NgramProposer((*siblings, *self._context.request.prompt_token_ids, *seen), self._context.device)

    def learn(self, choices: Choices, rows: Sequence[int], tokens: Sequence[int]) -> None:
        """Update the acceptance model with every accepted token that follows a drafted row.

        Args:
            choices: of those of ``rows`` that were drafted.
            rows: after which ``tokens`` were accepted; none if the tree was empty.
        """
        self._controller.record_accepted(len(tokens))
        for row, token in zip(rows, tokens, strict=False):
            was_proposed = self._acceptance.observe(choices, row, token)
            if was_proposed is not None:
                self._controller.record_proposed(was_proposed)

    def draft(self, running: dict[int, Branch]) -> Drafting:
        """As many draft forwards as the controller has set, each on rows of all threads."""
        for _ in range(self._controller.forwards if self._controller.is_speculating else 0):
            rows = {number: rows for number, rows in self._undrafted(running).items() if len(rows)}
            if not rows:
                return
            found: dict[int, list[Proposal]] = {number: [] for number in rows}
            if self.drafter is not None:
                candidates = yield self._requested(self.drafter, running, rows)
                for number, of_thread in zip(rows, candidates, strict=True):
                    found[number].append(DraftProposal(of_thread))
            for number, proposals in found.items():
                branch = running[number]
                if branch.ngrams is not None:
                    proposals.append(branch.ngrams.propose(branch.tree, rows[number]))
                choices = Choices.merged(rows[number], proposals)
                branch.injection.add(choices, self._acceptance.log_chances(choices))

    def _requested(self, drafter: RequestDrafter, running: dict[int, Branch], rows: dict[int, Tensor]) -> list[DraftRows]:
        return [drafter.rows(number, running[number].tree, of_thread, self._children) for number, of_thread in rows.items()]

    def _undrafted(self, running: dict[int, Branch]) -> dict[int, Tensor]:
        """By thread, the most probable undrafted rows among all threads, to be drafted now."""
        count = DRAFTED_ROWS if len(running) == 1 else 2 * DRAFTED_ROWS
        shares = _shares(running, count, InjectionTree.undrafted_chances)
        taken = {number: running[number].injection.undrafted(share) for number, share in shares.items()}
        if not self._sequence.can_fork:
            return taken
        return {number: self._with_successors(running[number], rows) for number, rows in taken.items()}

    def _with_successors(self, branch: Branch, rows: Tensor) -> Tensor:
        """Those of ``rows`` that can have successors: their token neither joins nor ends the thread."""
        sequence = self._sequence
        has_successor = [
            not (path and sequence.is_control(path[-1]) and sequence.ends_walk(branch.number, path[-1], path[:-1]))
            for path in paths(branch.tree, rows.tolist())
        ]
        return rows[torch.tensor(has_successor, dtype=torch.bool, device=rows.device)]

    def propose(self, running: dict[int, Branch], room: int) -> list[tuple[int, Step]]:
        """The most probable rows of all threads; without speculation, their roots alone."""
        is_speculating = self._controller.is_speculating
        width = min(self._controller.width, room) if is_speculating else room
        pending = [number for number, branch in running.items() if branch.root_pending]
        if not is_speculating or len(pending) >= width:
            shares = dict.fromkeys(pending[:width], 1)  # parents before their children, which attend to the openers
        else:
            shares = _shares(running, width, InjectionTree.entering_chances)
        steps, chances = [], []
        for number in sorted(shares):
            step, of_step = running[number].injection.enter(shares[number])
            if step is not None:
                steps.append((number, step))
                chances.append(of_step)
                running[number].root_pending = False
        if is_speculating:
            self._controller.record_entered(torch.cat(chances) if chances else torch.zeros(0, device=self._context.device))
        return steps

    def observe(self, timing: TimestepTiming) -> None:
        self._controller.record_timestep(timing)


def _shares(running: dict[int, Branch], count: int, chances_of: Callable[[InjectionTree, int], Tensor]) -> dict[int, int]:
    """By thread, the number of its rows among the ``count`` most probable rows of all threads."""
    if len(running) <= 1:
        return dict.fromkeys(running, count)
    chances = {number: chances_of(branch.injection, count) for number, branch in running.items()}
    owners = torch.cat([torch.full((len(of_tree),), number) for number, of_tree in chances.items()])
    all_chances = torch.cat(list(chances.values()))
    best = owners[all_chances.topk(min(count, len(all_chances))).indices.to(owners.device)]
    numbers, counts = best.unique(return_counts=True)
    return dict(zip(numbers.tolist(), counts.tolist(), strict=True))
