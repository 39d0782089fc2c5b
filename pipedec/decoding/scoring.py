"""What the draft sources have proposed below rows of many requests, scored together: a few tensors for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, islice

from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.choices import NO_TOKEN, Choices, Line, Proposal
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.proposers import DraftProposal, NgramProposal, Occurrences
from pipedec.tree import Candidates


@dataclass(frozen=True)
class _Submitted:
    """Proposals below rows of one tree: of the draft model, and occurrences of n-grams for each row, if these are sources."""

    acceptance: Acceptance
    tree: InjectionTree
    rows: Sequence[int]
    candidates: Candidates | None
    occurrences: Sequence[Occurrences] | None

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Equal for those that can be scored together."""
        children = 0 if self.candidates is None else self.candidates.token_ids.shape[1]
        return id(self.acceptance), children, self.occurrences is not None


class Scoring:
    """Collects proposals, and scores them on the host: a device would take longer over so few numbers."""

    def __init__(self) -> None:
        self._submitted: list[_Submitted] = []

    def submit(
        self, acceptance: Acceptance, tree: InjectionTree, rows: Sequence[int], candidates: Candidates | None,
        occurrences: Sequence[Occurrences] | None,
    ) -> None:  # fmt: skip
        """Proposals below rows of one tree, of one source at least: the draft model's, and n-grams for each row."""
        self._submitted.append(_Submitted(acceptance, tree, rows, candidates, occurrences))

    def score(self) -> None:
        """Score all that was submitted, and add the choices to the trees."""
        submitted, self._submitted = sorted(self._submitted, key=lambda each: each.kind), []
        for _, several in groupby(submitted, key=lambda each: each.kind):
            self._score(list(several))

    def _score(self, submitted: list[_Submitted]) -> None:
        """Score proposals of one kind with a few operations."""
        proposals: list[Proposal] = []
        drafted = [each.candidates for each in submitted if each.candidates is not None]
        if drafted:
            proposals.append(DraftProposal.joined(drafted))
        occurrences = [one for each in submitted if each.occurrences is not None for one in each.occurrences]
        if occurrences:
            proposals.append(NgramProposal.of(occurrences))
        choices = Choices.merged(proposals)
        lines = iter(_lines(choices, submitted[0].acceptance))
        for each in submitted:
            each.tree.add(each.rows, list(islice(lines, len(each.rows))))


def _lines(choices: Choices, acceptance: Acceptance) -> list[Line]:
    """The choices of each row, best first."""
    ranked = acceptance.log_chances(choices).sort(descending=True)
    token_ids = choices.token_ids.gather(1, ranked.indices).tolist()
    return [
        Line(tokens[: len(tokens) - tokens.count(NO_TOKEN)], chances, choices, place)
        for place, (tokens, chances) in enumerate(zip(token_ids, ranked.values.tolist(), strict=True))
    ]
