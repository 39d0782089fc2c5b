"""The draft sources of one thread: what they propose below rows of its tree, and what they learn from accepted tokens.

``DraftSources`` scores tokens by their learned chance to be accepted, ``DraftAlone`` by the draft model's own probabilities.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from math import inf

from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.decoding.acceptance import NO_TOKEN, AcceptanceModel, Line
from pipedec.decoding.injection import InjectionTree, Lesson
from pipedec.decoding.method import Method
from pipedec.decoding.proposers import (
    DRAFT_PRIOR,
    MAX_OCCURRENCES,
    PIECE,
    MatchRates,
    NgramProposer,
    Occurrences,
    Proposals,
    SeenTokens,
    draft_log_chances,
    possible,
)
from pipedec.grammar import Bitmask
from pipedec.tree import Candidates

LogChances = Callable[[Tensor], Tensor]  # see ``Growth``


class DraftAlone:
    """The draft model, whose probabilities count as chances; nothing is learned."""

    @property
    def log_chances(self) -> LogChances:
        return lambda log_probs: log_probs

    def index_text(self, most: int) -> int:
        """Nothing depends on the text."""
        return 0

    def propose(self, tree: InjectionTree, rows: Sequence[int], candidates: Candidates | None) -> None:
        """Add the choices below ``rows``, which were drafted."""
        assert candidates is not None
        best = candidates.log_probs.sort(dim=1, descending=True, stable=True)
        token_ids, lines = candidates.token_ids.gather(1, best.indices.to(candidates.token_ids.device)), list[Line]()
        for tokens, chances in zip(token_ids.tolist(), best.values.tolist(), strict=True):
            count = len(chances) - chances.count(-inf)  # a structure forbids the others
            lines.append(Line(tokens[:count], chances[:count], None, 0))
        tree.add(rows, lines)

    def copied(self, path: Sequence[int]) -> tuple[float, int]:
        """No token follows earlier ones."""
        return 0.0, NO_TOKEN

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Nothing to learn."""

    def append(self, tokens: Sequence[int]) -> None:
        """Nothing depends on the text."""


class DraftSources:
    """``proposers`` (names of ``methods.PROPOSERS``), of which the draft model only if ``has_draft``.

    Raises UserError if none is left.
    """

    def __init__(self, method: Method, proposers: Sequence[str], has_draft: bool) -> None:
        request, experience = method.request, method.resources.experience
        self._method = method
        self._ngrams: NgramProposer | None = None
        self._seen: SeenTokens | None = None
        self._tenant = None
        if "ngrams" in proposers:
            text = self._text()
            self._ngrams, self._seen, self._tenant = NgramProposer(text), SeenTokens(text), request.tenant
        self._texts = [] if self._ngrams is None else ["ngrams"] if self._tenant is None else ["ngrams", "suffixes"]
        prior = {
            **({"draft": DRAFT_PRIOR} if has_draft else {}),
            **{text: NgramProposer.prior for text in self._texts},
            **({"seen": SeenTokens.prior} if self._texts else {}),
        }
        if not prior:
            raise UserError(f"method {request.method} has no proposer: give --draft DIR, or let the n-grams propose")
        self._controller, self._shared = experience.controller, experience.shared_texts
        self._acceptance = experience.learned(request, AcceptanceModel, prior)
        self._rates = experience.learned(request, MatchRates)

    @property
    def log_chances(self) -> LogChances | None:
        """``Growth.log_chances``; None if another source than the draft model proposes: it looks at tokens on the host."""
        return None if self._texts else partial(draft_log_chances, self._acceptance)

    def _text(self) -> Sequence[int]:
        """The tokens of the other threads, of the prompt, and those that the thread attends to, also from before a pause."""
        sequence, number = self._method.sequence, self._method.thread
        threads = sequence.threads
        seen = [token for other, count in threads[number].context() for token in threads[other].token_ids[:count]]
        others = [] if number == 0 else [t for thread in threads if thread.number != number for t in thread.token_ids]
        own = threads[0].token_ids if number == 0 else []
        return *others, *self._method.request.prompt_token_ids, *seen, *own

    def propose(self, tree: InjectionTree, rows: Sequence[int], candidates: Candidates | None) -> Proposals:
        """The proposals below ``rows``, which were drafted; those of all requests are then scored together."""
        grammar, found = self._method.grammar, list[list[Occurrences]]()
        if candidates is not None and grammar is not None:
            candidates = possible(candidates)
        if self._texts:
            paths = [tree.path(row) for row in rows]
            found = [list(of_text) for of_text in zip(*map(self._find, paths), strict=True)]
            if grammar is not None:
                allowed = [grammar.allowed(path) for path in paths]
                found = [list(map(_those_in, of_text, allowed)) for of_text in found]
        proposes_seen = self._controller.proposes_seen and grammar is None
        return Proposals(self._acceptance, tree, rows, candidates, found, self._seen, proposes_seen)

    def index_text(self, most: int) -> int:
        """Index up to ``most`` tokens of a long text, of which more than a piece is left. Returns how many."""
        if self._ngrams is None or self._ngrams.num_unindexed <= PIECE:
            return 0
        self._ngrams.index(most)
        return most

    def _find(self, path: Sequence[int], most: int = MAX_OCCURRENCES) -> list[Occurrences]:
        """The tokens after n-grams at the end of ``path``, by text: the request's own and, with a tenant, earlier answers."""
        if self._ngrams is None:
            return []
        context = self._ngrams.ending(path)
        own = self._ngrams.find_after(context, most)
        return [own] if self._tenant is None else [own, self._shared.find(self._tenant, context, most)]

    def copied(self, path: Sequence[int]) -> tuple[float, int]:
        """The token that is most likely to follow ``path`` as it followed the same tokens before, and the rate at which such
        tokens are accepted; 0 if there is none.
        """
        found = [
            (self._rates.rate(text, match.length), token)
            for text, occurrences in zip(self._texts, self._find(path, most=1), strict=True)
            for token, match in islice(occurrences.items(), 1)
        ]
        return max(found, default=(0.0, NO_TOKEN))

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Learn from accepted tokens, each after a drafted row."""
        for choices, place, token in lessons:
            self._controller.record_proposed(self._acceptance.observe(choices, place, token))

    def append(self, tokens: Sequence[int]) -> None:
        """Add accepted tokens to the text, and learn whether they could have been copied."""
        if self._ngrams is None or self._seen is None:
            return
        for count, token in enumerate(tokens):
            for text, found in zip(self._texts, self._find(tokens[:count], most=1), strict=True):
                self._rates.observe(text, found, token)
        self._ngrams.append(tokens)
        self._seen.append(tokens)


def _those_in(found: Occurrences, allowed: Bitmask) -> Occurrences:
    return {token: match for token, match in found.items() if token in allowed}


def fixed_sources(method: Method, proposers: Sequence[str]) -> DraftAlone | DraftSources:
    """The sources of published trees: the draft model as it is or, if n-grams propose too, the sources of the default method."""
    return DraftAlone() if tuple(proposers) == ("draft",) else DraftSources(method, proposers, has_draft=True)
