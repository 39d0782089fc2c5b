"""What the draft sources have proposed below rows of many requests, scored together: a few tensors for all of them.

Between ``submit`` and the first use of what it returns, methods wait until all others have submitted, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.choices import NO_TOKEN, Choices, Line, Proposal
from pipedec.decoding.proposers import DraftProposal, NgramProposal, Occurrences
from pipedec.tree import Candidates


class Submitted:
    """Proposals below F rows of one tree.

    Args:
        candidates: of the draft model, if it is a source.
        occurrences: of n-grams, for each row, if they are a source.
    """

    def __init__(
        self,
        scoring: Scoring,
        acceptance: Acceptance,
        candidates: Candidates | None,
        occurrences: Sequence[Occurrences] | None,
    ) -> None:
        self.acceptance = acceptance
        self.candidates = candidates
        self.occurrences = occurrences
        self.found: list[Line] | None = None
        self._scoring = scoring

    @property
    def kind(self) -> tuple[int, int, bool]:
        """Equal for those that can be scored together."""
        children = 0 if self.candidates is None else self.candidates.token_ids.shape[1]
        return id(self.acceptance), children, self.occurrences is not None

    @property
    def lines(self) -> list[Line]:
        """The choices below each row."""
        if self.found is None:
            self._scoring.score()
        assert self.found is not None
        return self.found


class Scoring:
    """Collects proposals, and scores them on the host: a device would take longer over so few numbers."""

    def __init__(self) -> None:
        self._submitted: list[Submitted] = []

    def submit(
        self, acceptance: Acceptance, candidates: Candidates | None, occurrences: Sequence[Occurrences] | None
    ) -> Submitted:
        """Proposals for rows of one tree, of one source at least."""
        submitted = Submitted(self, acceptance, candidates, occurrences)
        self._submitted.append(submitted)
        return submitted

    def score(self) -> None:
        """Score all that was submitted."""
        submitted, self._submitted = sorted(self._submitted, key=lambda each: each.kind), []
        for _, several in groupby(submitted, key=lambda each: each.kind):
            self._score(list(several))

    def _score(self, submitted: list[Submitted]) -> None:
        """Score proposals of one kind with a few operations."""
        proposals: list[Proposal] = []
        drafted = [each.candidates for each in submitted if each.candidates is not None]
        if drafted:
            proposals.append(DraftProposal.joined(drafted))
        occurrences = [one for each in submitted if each.occurrences is not None for one in each.occurrences]
        if occurrences:
            proposals.append(NgramProposal.of(occurrences))
        choices = Choices.merged(proposals)
        lines = _lines(choices, submitted[0].acceptance)
        first = 0
        for each in submitted:
            rows = len(each.occurrences or ()) if each.candidates is None else len(each.candidates.token_ids)
            each.found = lines[first : first + rows]
            first += rows


def _lines(choices: Choices, acceptance: Acceptance) -> list[Line]:
    """The choices of each row, best first."""
    ranked = acceptance.log_chances(choices).sort(descending=True)
    token_ids = choices.token_ids.gather(1, ranked.indices).tolist()
    return [
        Line(tokens[: len(tokens) - tokens.count(NO_TOKEN)], chances, choices, place)
        for place, (tokens, chances) in enumerate(zip(token_ids, ranked.values.tolist(), strict=True))
    ]
