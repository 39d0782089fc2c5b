"""Scores the proposals of all draft sources below rows of many requests together, with a few operations for all.

Between ``submit`` and ``score``, methods wait until all others have submitted, too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from pipedec.decoding.acceptance import AcceptanceModel
from pipedec.decoding.choices import NO_TOKEN, Choices, Line
from pipedec.decoding.injection import InjectionTree
from pipedec.decoding.proposers import MAX_MATCH, MAX_PROPOSED, DraftProposal, Occurrences, write_ngrams
from pipedec.tree import Candidates


class _Submission(NamedTuple):
    """Proposals below rows of one tree, see ``Scoring.submit``."""

    acceptance: AcceptanceModel
    tree: InjectionTree
    rows: Sequence[int]
    candidates: Candidates | None
    occurrences: Sequence[Occurrences] | None

    @property
    def kind(self) -> tuple[int, int, bool]:
        """A key that is equal for proposals that can be scored together."""
        children = 0 if self.candidates is None else self.candidates.token_ids.shape[1]
        return id(self.acceptance), children, self.occurrences is not None


class Scoring:
    """Collects proposals, and scores them on the host: a device would take longer over so few numbers."""

    def __init__(self) -> None:
        self._submitted: list[_Submission] = []

    def submit(
        self,
        acceptance: AcceptanceModel,
        tree: InjectionTree,
        rows: Sequence[int],
        candidates: Candidates | None,
        occurrences: Sequence[Occurrences] | None,
    ) -> None:
        """Queue one tree's proposals for batched scoring; there must be at least one source.

        Args:
            candidates: of the draft model, if it is a source.
            occurrences: of n-grams, for each row, if they are a source.
        """
        self._submitted.append(_Submission(acceptance, tree, rows, candidates, occurrences))

    def score(self) -> None:
        """Score the proposals submitted since the last call, and add them to the trees."""
        kinds: defaultdict[tuple[int, int, bool], list[_Submission]] = defaultdict(list)
        for each in self._submitted:
            kinds[each.kind].append(each)
        self._submitted = []
        for several in kinds.values():
            lines = _lines(_merged(several), several[0].acceptance)
            for each in several:
                each.tree.add(each.rows, [next(lines) for _ in each.rows])


def _merged(submitted: Sequence[_Submission]) -> Choices:
    """The proposals of all sources, by kind: the draft model's children, then other tokens after n-grams."""
    drafted = [each.candidates for each in submitted if each.candidates is not None]
    draft = DraftProposal.joined(drafted) if drafted else None
    occurrences = [one for each in submitted if each.occurrences is not None for one in each.occurrences]
    num_rows = sum(len(each.rows) for each in submitted)
    children, width = (0, 0) if draft is None else (draft.token_ids.shape[1], len(draft.prior))
    proposed, further = (MAX_PROPOSED, 2 * MAX_MATCH) if occurrences else (0, 0)
    token_ids = torch.full((num_rows, children + proposed), NO_TOKEN)
    features = torch.zeros(num_rows, children + proposed + 1, width + further)
    ids, values = token_ids.numpy(), features.numpy()
    if draft is not None:
        ids[:, :children] = draft.token_ids
        draft.write(values[..., :width])
    if occurrences:
        write_ngrams(occurrences, ids, values)
    return Choices(token_ids, features)


def _lines(choices: Choices, acceptance: AcceptanceModel) -> Iterator[Line]:
    """The choices of each row, best first."""
    ranked = acceptance.log_chances(choices).sort(descending=True)
    token_ids = choices.token_ids.gather(1, ranked.indices).tolist()
    for place, (tokens, chances) in enumerate(zip(token_ids, ranked.values.tolist(), strict=True)):
        yield Line(tokens[: len(tokens) - tokens.count(NO_TOKEN)], chances, choices, place)
