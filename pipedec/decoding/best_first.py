"""Best-first injection (``pipedec-bestfirst``): at every timestep the likeliest rows of *any* depth enter the pipeline.

While the stages compute, the draft runs several forwards, each on the likeliest rows that it has not drafted yet, wherever they
stand. A row's chance is the product of *measured* chances of acceptance along its path (``acceptance``), so a sure draft enters
several layers at once, and an unsure one enters late siblings near the root, which cost a short delay where the paper's policy
drains the pipeline. When the accepted token was drafted but has not entered, the subtree below it is kept and enters with it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pipedec.core import NO_MASKS, Request, Step, UserError, Verdict
from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.choices import Choices, Proposer
from pipedec.decoding.controller import Beat, Controller
from pipedec.decoding.experience import Experience
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.interface import Drafter
from pipedec.decoding.proposers import DraftProposer, NgramProposer
from pipedec.methods import BestFirstOptions, options_of

DRAFTED_ROWS = 16  # of one forward: more make no answer faster


class BestFirst:
    """Width, children and draft forwards are the controller's; with ``proposers`` one can do without the draft or the n-grams."""

    masks = NO_MASKS

    def __init__(
        self, request: Request, drafter: Drafter | None, experience: Experience, device: torch.device | str = "cpu"
    ) -> None:
        sources = options_of(request, BestFirstOptions).proposers
        self.hits = 0
        self.misses = 0
        self._prompt_length = len(request.prompt_token_ids)
        self._controller = experience.controller(request)
        self._drafter = drafter if "draft" in sources else None
        self._ngrams = NgramProposer(request.prompt_token_ids, device) if "ngrams" in sources else None
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
        self._root_waits = False  # for its entry

    def prefill(self, token_ids: Tensor) -> None:
        if self._drafter is not None:
            self._drafter.prefill(token_ids, self._prompt_length)

    def draft(self) -> None:
        """As many forwards as the controller allows."""
        for _ in range(self._controller.forwards if self._controller.is_speculating else 0):
            tree, rows = self._injection.tree, self._injection.undrafted(DRAFTED_ROWS)
            if not len(rows):
                return
            choices = Choices.merged(rows, [proposer.propose(tree, rows) for proposer in self._proposers])
            self._injection.add(choices, self._acceptance.log_chances(choices))

    def apply(self, verdict: Verdict) -> None:
        learn(self._injection, verdict.tokens, self._acceptance, self._controller)
        self._controller.accepted(len(verdict.tokens))
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
        self._root_waits = not has_entered
        if not advance.hit:
            self._injection.plant(verdict.tokens[-1])

    def propose(self) -> Step | None:
        """The likeliest rows; without speculation, the root alone."""
        if not self._controller.is_speculating:
            step = self._injection.enter(1)[0] if self._root_waits else None
        else:
            step, chances = self._injection.enter(self._controller.width)
            self._controller.entered(chances)
        self._root_waits = False
        return step

    def observe(self, beat: Beat) -> None:
        self._controller.timestep(beat)


def learn(injection: InjectionTree, tokens: Sequence[int], acceptance: Acceptance, controller: Controller) -> None:
    """Every accepted token says which choice of a drafted row was the right one."""
    tree, choices = injection.tree, injection.choices
    row = 0 if tree.num_rows else None
    for token in tokens:
        if row is None or choices is None:
            return
        named = acceptance.observe(choices, row, token)
        if named is not None:
            controller.named(named)
        row = tree.child(row, token)
