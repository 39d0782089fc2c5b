"""The draft sources of one thread: what they propose below rows of its tree, and what they learn from accepted tokens.

``DraftSources`` scores tokens by their learned chance to be accepted, ``DraftAlone`` by the draft model's own probabilities.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from pipedec.core import UserError
from pipedec.decoding.acceptance import AcceptanceModel, Line
from pipedec.decoding.injection import InjectionTree, Lesson
from pipedec.decoding.method import MethodContext
from pipedec.decoding.proposers import DRAFT_PRIOR, NgramProposer, Occurrences, Proposals, SeenTokens, possible
from pipedec.tree import Candidates


class DraftAlone:
    """The draft model, whose probabilities count as chances; nothing is learned."""

    ngrams: NgramProposer | None = None

    def propose(self, tree: InjectionTree, rows: Sequence[int], candidates: Candidates | None) -> None:
        """Add the choices below ``rows``, which were drafted."""
        assert candidates is not None
        best = candidates.log_probs.sort(dim=1, descending=True, stable=True)
        token_ids, lines = candidates.token_ids.gather(1, best.indices.to(candidates.token_ids.device)), list[Line]()
        for tokens, chances in zip(token_ids.tolist(), best.values.tolist(), strict=True):
            count = len(chances) - chances.count(-inf)  # a structure forbids the others
            lines.append(Line(tokens[:count], chances[:count], None, 0))
        tree.add(rows, lines)

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Nothing to learn."""

    def append(self, tokens: Sequence[int]) -> None:
        """Nothing depends on the text."""


class DraftSources:
    """``proposers`` (names of ``methods.PROPOSERS``), of which the draft model only if ``has_draft``.

    Raises UserError if none is left.
    """

    def __init__(self, context: MethodContext, thread: int, proposers: Sequence[str], has_draft: bool) -> None:
        self._context = context
        self._thread = thread
        self.ngrams: NgramProposer | None = None
        self._seen: SeenTokens | None = None
        if "ngrams" in proposers:
            text = self._text()
            self.ngrams, self._seen = NgramProposer(text), SeenTokens(text)
        prior = {
            **({"draft": DRAFT_PRIOR} if has_draft else {}),
            **({"ngrams": NgramProposer.prior, "seen": SeenTokens.prior} if self.ngrams else {}),
        }
        if not prior:
            method = context.request.method
            raise UserError(f"method {method} has no proposer: give --draft DIR, or let the n-grams propose")
        self._controller = context.experience.controller
        self._acceptance = context.experience.learned(context.request, AcceptanceModel, prior)

    def _text(self) -> Sequence[int]:
        """The tokens of the other threads, of the prompt, and those that the thread attends to, also from before a pause."""
        sequence, number = self._context.sequence, self._thread
        threads = sequence.threads
        seen = [token for other, count in threads[number].context() for token in threads[other].token_ids[:count]]
        others = [] if number == 0 else [t for thread in threads if thread.number != number for t in thread.token_ids]
        own = threads[0].token_ids if number == 0 else []
        return *others, *self._context.request.prompt_token_ids, *seen, *own

    def propose(self, tree: InjectionTree, rows: Sequence[int], candidates: Candidates | None) -> None:
        """Collect the proposals below ``rows``, which were drafted; those of all requests are then scored together."""
        grammar, found = self._context.grammar, list[list[Occurrences]]()
        if candidates is not None and grammar is not None:
            candidates = possible(candidates)
        if self.ngrams is not None:
            paths = [tree.path(row) for row in rows]
            found.append([self.ngrams.find(path) for path in paths])
            if grammar is not None:
                allowed = [grammar.allowed(path) for path in paths]
                pairs = zip(found[0], allowed, strict=True)
                found = [[{token: match for token, match in one.items() if token in may} for one, may in pairs]]
        proposes_seen = self._controller.proposes_seen and grammar is None
        self._context.proposals.append(Proposals(self._acceptance, tree, rows, candidates, found, self._seen, proposes_seen))

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Learn from accepted tokens, each after a drafted row."""
        for choices, place, token in lessons:
            self._controller.record_proposed(self._acceptance.observe(choices, place, token))

    def append(self, tokens: Sequence[int]) -> None:
        """Add accepted tokens to the text."""
        if self.ngrams is not None and self._seen is not None:
            self.ngrams.accept(tokens)
            self._seen.accept(tokens)


def fixed_sources(context: MethodContext, thread: int, proposers: Sequence[str]) -> DraftAlone | DraftSources:
    """The sources of published trees: the draft model as it is or, if n-grams propose too, the sources of the default method."""
    return DraftAlone() if tuple(proposers) == ("draft",) else DraftSources(context, thread, proposers, has_draft=True)
