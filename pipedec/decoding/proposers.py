"""Draft sources for best-first injection: the draft model, and n-grams that recur in the prompt and the answer.

Every source proposes tokens, and has *features* of all tokens that any source proposed; the weights of the features are learned
(see ``acceptance``). Shapes: F rows that were drafted, K tokens of all sources together, W features of all sources, c children
of each row from the draft model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import log
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pipedec.decoding.acceptance import NO_TOKEN, AcceptanceModel, Choices, IntArray, Line
from pipedec.decoding.injection import InjectionTree
from pipedec.tree import Candidates

FloatArray = NDArray[np.float32]
DRAFT_PRIOR = (1.0, 0.0)  # weights of its features

MAX_MATCH = 8  # longest n-gram that is compared
_MIN_MATCH = 2  # shortest n-gram after which a token is proposed
_MAX_OCCURRENCES = 32  # occurrences considered for each row
MAX_PROPOSED = 4  # tokens that n-grams propose for a row
_MIN_REST = 1e-4  # minimum probability assumed for all tokens that the draft model does not propose together
_UNKNOWN = 0.01  # probability assumed for tokens where the draft model proposes nothing
_EMPTY = 1  # an n-gram is a number: this, and the bits of its tokens, the last one first


def write_drafted(candidates: Sequence[Candidates], token_ids: IntArray, features: FloatArray) -> None:
    """Write the draft model's children of F rows, and its features of all tokens. Reads from the device once.

    Features: the log-probability of the token, or of the least probable child if it is not a child; and 1 if it is not.

    Args:
        candidates: of several trees, with equal numbers of children per row.
        token_ids: [F, K], of which the first c are written.
        features: [F, K + 1, 2], zeros; the last entry of a row stands for "none of the choices".
    """
    children = candidates[0].token_ids.shape[1]
    features[:, children:-1, 1] = 1.0
    if not children:
        features[:, :-1, 0] = log(_UNKNOWN)
        return
    columns = torch.cat([each.token_ids for each in candidates]), torch.cat([each.log_probs for each in candidates])
    ids, chances = torch.cat((columns[0].double(), columns[1].double()), 1).cpu().chunk(2, dim=1)
    token_ids[:, :children] = ids.long()
    log_probs = chances.float()
    features[:, :children, 0] = log_probs
    features[:, children:-1, 0] = log_probs[:, -1:]
    features[:, -1, 0] = (1 - log_probs.exp().sum(1)).clamp_(min=_MIN_REST).log_()


def possible(candidates: Candidates) -> Candidates:
    """The candidates, with NO_TOKEN for those whose log-probability is −∞, which a structure forbids."""
    log_probs = candidates.log_probs
    token_ids = candidates.token_ids.masked_fill(log_probs == -torch.inf, NO_TOKEN)
    return Candidates(candidates.rows, token_ids, log_probs.clamp(min=log(_MIN_REST)))


# For each token that followed an earlier occurrence of an n-gram at the end of a row's path: the length of the longest of these.
# The longest come first; of equally long ones, the latest.
Occurrences = dict[int, int]


class NgramProposer:
    """N-grams of ``text``, the prompt and the answer so far. Needs no forward.

    Features: the length of the longest n-gram that the token followed, one-hot; and the same again for the first of the row's
    ``Occurrences``, 0 for the others.
    """

    prior = tuple(0.5 * min(length, 4) for length in range(1, MAX_MATCH + 1)) + (1.0,) * MAX_MATCH

    def __init__(self, text: Iterable[int]) -> None:
        self._text = list(text)
        self._indexed = 0  # tokens of it that are in ``_places``
        self._places: dict[int, list[int]] = {}  # by n-gram, up to the first unique length: indices of the tokens after it

    def accept(self, tokens: Iterable[int]) -> None:
        """Append accepted tokens; the last one is the tree's root."""
        self._text += tokens

    def _index(self) -> None:
        """Index the tokens appended since the last call. Runs while the stages compute."""
        text, known = self._text, self._places
        for end in range(self._indexed, len(text)):
            ngram = _EMPTY
            for length in range(1, min(MAX_MATCH, end) + 1):
                ngram = ngram << 32 | text[end - length]
                places = known.get(ngram)
                if places is None:
                    known[ngram] = [end]
                    break
                if len(places) == 1 and length < min(MAX_MATCH, places[0]):
                    known[ngram << 32 | text[places[0] - length - 1]] = places[:]
                places.append(end)
        self._indexed = len(text)

    def find(self, path: Sequence[int]) -> Occurrences:
        """The best occurrences of the n-grams at the end of the text and ``path``, the tokens below the root up to a row."""
        if self._indexed < len(self._text):
            self._index()
        text, known = self._text, self._places
        context = [*text[-MAX_MATCH:], *path][: -MAX_MATCH - 1 : -1]  # the last token first
        matches: list[list[int]] = []
        ngram = _EMPTY
        for token in context:
            ngram = ngram << 32 | token
            places = known.get(ngram)
            if places is None:
                break
            matches.append(places)
        found: Occurrences = {}
        seen = set[int]()
        if matches and len(matches[-1]) == 1:
            length, (place,) = len(matches), matches.pop()
            while length < min(len(context), place) and text[place - length - 1] == context[length]:
                length += 1
            seen.add(place)
            found[text[place]] = length
        for length in range(len(matches), 0, -1):
            places = matches[length - 1]
            for place in reversed(places) if len(places) > len(seen) else ():
                if place not in seen:
                    seen.add(place)
                    found.setdefault(text[place], length)
                    if len(seen) == _MAX_OCCURRENCES:
                        return found
        return found


def write_ngrams(occurrences: Sequence[Occurrences], token_ids: IntArray, features: FloatArray) -> None:
    """Write the tokens that n-grams propose below F rows, and the n-grams' features of all tokens.

    The first tokens after n-grams of at least ``_MIN_MATCH`` are proposed, at most ``MAX_PROPOSED``. For so few, a loop is faster
    than operations on arrays.

    Args:
        token_ids: [F, c + MAX_PROPOSED], the draft model's children and NO_TOKEN.
        features: [F, c + MAX_PROPOSED + 1, W], zeros; the last 2 · MAX_MATCH are those of n-grams.
    """
    first = token_ids.shape[1] - MAX_PROPOSED
    _, columns, width = features.shape
    new: list[int] = []
    new_places: list[int] = []
    found_places: list[int] = []
    for row, (found, known) in enumerate(zip(occurrences, token_ids.tolist(), strict=True)):
        for rank, (token, length) in enumerate(found.items()):
            if token in known:
                column = known.index(token)
            elif length >= _MIN_MATCH and rank < MAX_PROPOSED:
                column = first + rank
                new.append(token)
                new_places.append(row * (columns - 1) + column)
            else:
                continue
            place = (row * columns + column + 1) * width - 2 * MAX_MATCH + length - 1
            found_places.append(place)
            if not rank:
                found_places.append(place + MAX_MATCH)
    token_ids.put(new_places, new)
    features.put(found_places, 1.0)


class Proposals(NamedTuple):
    """The proposals of at least one source below rows of one tree."""

    acceptance: AcceptanceModel
    tree: InjectionTree
    rows: Sequence[int]
    candidates: Candidates | None  # of the draft model, if it is a source
    occurrences: Sequence[Occurrences] | None  # of n-grams, for each row, if they are a source


def score(proposals: Iterable[Proposals]) -> None:
    """Score the proposals of all requests, and add them to their trees. Few operations serve many requests, on the host, which is
    faster for so few numbers.
    """
    kinds: defaultdict[tuple[int, int, bool], list[Proposals]] = defaultdict(list)
    for each in proposals:
        children = 0 if each.candidates is None else each.candidates.token_ids.shape[1]
        kinds[id(each.acceptance), children, each.occurrences is not None].append(each)
    for several in kinds.values():
        choices = _joined(several)
        ranked = several[0].acceptance.log_chances(choices).sort(descending=True)
        token_ids = choices.token_ids.gather(1, ranked.indices).tolist()
        lines = [
            Line(tokens[: len(tokens) - tokens.count(NO_TOKEN)], chances, choices, place)
            for place, (tokens, chances) in enumerate(zip(token_ids, ranked.values.tolist(), strict=True))
        ]
        for each in several:
            each.tree.add(each.rows, lines[: len(each.rows)])
            del lines[: len(each.rows)]


def _joined(several: Sequence[Proposals]) -> Choices:
    """The proposals of all sources, by kind: the draft model's children, then other tokens after n-grams."""
    drafted = [each.candidates for each in several if each.candidates is not None]
    occurrences = [one for each in several if each.occurrences is not None for one in each.occurrences]
    num_rows = sum([len(each.rows) for each in several])
    children, width = (drafted[0].token_ids.shape[1], len(DRAFT_PRIOR)) if drafted else (0, 0)
    proposed, further = (MAX_PROPOSED, 2 * MAX_MATCH) if occurrences else (0, 0)
    token_ids = torch.full((num_rows, children + proposed), NO_TOKEN)
    features = torch.zeros(num_rows, children + proposed + 1, width + further)
    ids, values = token_ids.numpy(), features.numpy()
    if drafted:
        write_drafted(drafted, ids, values[..., :width])
    if occurrences:
        write_ngrams(occurrences, ids, values)
    return Choices(token_ids, features)
