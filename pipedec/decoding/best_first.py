"""Best-first injection (``pipedec-bestfirst``): at every timestep the most probable rows of *any* depth enter the pipeline.

While the stages compute, the draft model runs several forwards, each on the most probable rows that are not drafted yet, at any
depth. A row's probability is the product of *learned* acceptance probabilities along its path (``acceptance``). So several layers
enter at once where drafts are reliable. Where they are not, further siblings near the root enter later: such a token is delayed a
little, where the paper's policy would have a miss and drain the pipeline. If an accepted token was drafted but has not entered,
its subtree is kept and enters with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Request, Step, UserError, Verdict
from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.choices import Choices, Proposer
from pipedec.decoding.controller import WIDTHS, Controller, TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.proposers import DraftProposer, NgramProposer

if TYPE_CHECKING:
    from pipedec.decoding.method import Drafter

MAX_WIDTH = WIDTHS[-1]  # a verdict accepts a step's rows at most and must fit into a message's header
DRAFTED_ROWS = 16  # of one forward: more make no answer faster


class BestFirst:
    """Best-first injection for an answer in one thread. Limits that the request does not set are tuned by ``Controller``."""

    masks = NO_MASKS

    def __init__(
        self, request: Request, drafter: Drafter | None, experience: Experience, device: torch.device | str = "cpu"
    ) -> None:
        if (request.tree.width or 0) > MAX_WIDTH:
            raise UserError(f"method pipedec-bestfirst takes a tree width of at most {MAX_WIDTH}, not {request.tree.width}")
        self.hits = 0
        self.misses = 0
        self._prompt_length = len(request.prompt_token_ids)
        self._controller = experience.controller(request)
        self._drafter = drafter if "draft" in request.tree.proposers else None
        self._ngrams = NgramProposer(request.prompt_token_ids, device) if "ngrams" in request.tree.proposers else None
        self._proposers: list[Proposer] = []
        if self._drafter is not None:
            self._drafter.begin()
            self._proposers.append(DraftProposer(self._drafter, self._controller.children))
        if self._ngrams is not None:
            self._proposers.append(self._ngrams)
        if not self._proposers:
            raise UserError("method pipedec-bestfirst has no proposer: give --draft DIR, or let the n-grams propose")
        prior = tuple(weight for proposer in self._proposers for weight in proposer.prior)
        self._acceptance = experience.acceptance(request, prior, device)
        self._injection = InjectionTree(self._prompt_length, device)
        self._root_pending = False  # the root has yet to enter

    def prefill(self, token_ids: Tensor) -> None:
        if self._drafter is not None:
            self._drafter.prefill(token_ids, self._prompt_length)

    def draft(self) -> None:
        """Run the number of draft forwards that the controller has set."""
        for _ in range(self._controller.forwards if self._controller.is_speculating else 0):
            tree, rows = self._injection.tree, self._injection.undrafted(DRAFTED_ROWS)
            if not len(rows):
                return
            choices = Choices.merged(rows, [proposer.propose(tree, rows) for proposer in self._proposers])
            self._injection.add(choices, self._acceptance.log_chances(choices))

    def apply(self, verdict: Verdict) -> None:
        learn_from_accepted(self._injection, verdict.tokens, self._acceptance, self._controller)
        self._controller.record_accepted(len(verdict.tokens))
        advance, has_entered = self._injection.advance(verdict.tokens)
        if self._drafter is not None:
            self._drafter.advance(advance)
        if self._ngrams is not None:
            self._ngrams.accept(verdict.tokens)
        self.hits += max(0, len(verdict.tokens) - 1)
        if verdict.finished is not None:
            return
        self.hits += has_entered
        self.misses += not has_entered
        self._root_pending = not has_entered
        if not advance.hit:
            self._injection.plant(verdict.tokens[-1])

    def propose(self) -> Step | None:
        """The most probable rows; without speculation, the root alone."""
        if not self._controller.is_speculating:
            step = self._injection.enter(1)[0] if self._root_pending else None
        else:
            step, chances = self._injection.enter(self._controller.width)
            self._controller.record_entered(chances)
        self._root_pending = False
        return step

    def observe(self, timing: TimestepTiming) -> None:
        self._controller.record_timestep(timing)


def learn_from_accepted(injection: InjectionTree, tokens: Sequence[int], acceptance: Acceptance, controller: Controller) -> None:
    """Update the acceptance model with every accepted token that follows a drafted row of the tree."""
    tree, choices = injection.tree, injection.choices
    row = 0 if tree.num_rows else None
    for token in tokens:
        if row is None or choices is None:
            return
        was_proposed = acceptance.observe(choices, row, token)
        if was_proposed is not None:
            controller.record_proposed(was_proposed)
        row = tree.child(row, token)
