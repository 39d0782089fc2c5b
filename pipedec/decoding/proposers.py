"""Draft sources for best-first injection: the draft model, and n-grams that recur in the prompt and the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import log

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipedec.decoding.choices import NO_TOKEN, IntArray
from pipedec.grammar import Bitmask
from pipedec.tree import Candidates

FloatArray = NDArray[np.float32]

MAX_MATCH = 8  # longest n-gram that is compared
_MIN_MATCH = 2  # shortest n-gram after which a token is proposed
_MAX_OCCURRENCES = 32  # occurrences considered for each row
MAX_PROPOSED = 4  # tokens that n-grams propose for a row
_MIN_REST = 1e-4  # minimum probability assumed for all tokens that the draft model does not propose together
_UNKNOWN = 0.01  # probability assumed for tokens where the draft model proposes nothing
_EMPTY = 1  # an n-gram is a number: this, and the bits of its tokens, the last one first


@dataclass(frozen=True)
class DraftProposal:
    """The draft model's most probable children of F rows, on the host. Features: the log-probability; 1 for tokens that are not
    among the children.

    Attributes:
        token_ids: int64 [F, c], distinct within a row; NO_TOKEN marks unused entries.
        log_probs: float32 [F, c], descending.
    """

    prior = (1.0, 0.0)
    token_ids: IntArray
    log_probs: Tensor

    @classmethod
    def joined(cls, several: Sequence[Candidates]) -> DraftProposal:
        """Join candidates of several trees with equal numbers of children per row. Reads from the device once."""
        token_ids = torch.cat([each.token_ids for each in several])
        log_probs = torch.cat([each.log_probs for each in several])
        both = torch.cat((token_ids.double(), log_probs.double()), 1).cpu()
        ids, chances = both.chunk(2, dim=1)
        return cls(ids.long().numpy(), chances.float())

    def write(self, features: FloatArray) -> None:
        """Write the features of K tokens for each row, of which the first c are the children, and of "none of them".

        A token that is not among the children gets the log-probability of the least probable child.

        Args:
            features: [F, K + 1, 2], zeros.
        """
        children = self.token_ids.shape[1]
        features[:, children:-1, 1] = 1.0
        if not children:
            features[:, :-1, 0] = log(_UNKNOWN)
            return
        rest = (1 - self.log_probs.exp().sum(1)).clamp_(min=_MIN_REST).log_()
        log_probs = self.log_probs.numpy()
        features[:, :children, 0] = log_probs
        features[:, children:-1, 0] = log_probs[:, -1:]
        features[:, -1, 0] = rest.numpy()


def possible(candidates: Candidates) -> Candidates:
    """The candidates with NO_TOKEN for those whose log-probability is −∞: a structure does not allow them."""
    log_probs = candidates.log_probs
    token_ids = candidates.token_ids.masked_fill(log_probs == -torch.inf, NO_TOKEN)
    return Candidates(candidates.rows, token_ids, log_probs.clamp(min=log(_MIN_REST)))


Occurrences = dict[int, int]  # by token that followed an earlier occurrence of the n-grams at the end of a row's path: the length
# of the longest of these n-grams. The longest are first, of equally long ones the latest.


def within(occurrences: Occurrences, allowed: Bitmask) -> Occurrences:
    """Those after which the text went on with a token that is allowed."""
    return {token: length for token, length in occurrences.items() if token in allowed}


class NgramProposer:
    """N-grams of the prompt and the answer so far. Needs no forward.

    Features: the length of the longest n-gram that a token followed, one-hot; the same again, but 0 unless the token followed the
    longest n-gram of all.

    Args:
        text: token ids of the prompt and of all other text to search.
    """

    prior = tuple(0.5 * min(length, 4) for length in range(1, MAX_MATCH + 1)) + (1.0,) * MAX_MATCH

    def __init__(self, text: Iterable[int]) -> None:
        self._text = list(text)
        self._indexed = 0  # tokens of it that are in ``_places``
        self._places: dict[int, list[int]] = {}  # by n-gram, none longer than a unique one: where it ends, and text follows

    def accept(self, tokens: Iterable[int]) -> None:
        """Append accepted tokens; the last one is the tree's root."""
        self._text += tokens

    def _index(self) -> None:
        """Index the tokens appended since the last call. Called while the stages compute."""
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
    """Write the tokens that n-grams propose below F rows, and the features of all tokens.

    The first distinct tokens after long enough n-grams are proposed, at most ``MAX_PROPOSED``. They are few, so a loop takes less
    time than operations on arrays.

    Args:
        token_ids: [F, c + MAX_PROPOSED], tokens of another source, c for each row, and NO_TOKEN.
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
