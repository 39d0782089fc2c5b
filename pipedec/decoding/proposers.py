"""Draft sources for best-first injection: the draft model, n-grams that recur in a text, and tokens that recur in it. A text is
the request's own, or earlier answers (see ``shared_texts``).

Every source proposes tokens, and has *features* of all tokens that any source proposed; the weights of the features are learned
(see ``acceptance``). Shapes: F rows that were drafted, K tokens of all sources together, W features of all sources, c children
of each row from the draft model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from math import log
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipedec.decoding.acceptance import NO_TOKEN, AcceptanceModel, Choices, IntArray, Line
from pipedec.decoding.injection import InjectionTree
from pipedec.device import to_device
from pipedec.tree import Candidates

FloatArray = NDArray[np.float32]
DRAFT_PRIOR = {"log probability": 1.0, "not proposed": 0.0}  # weights of its features

_INDEXED = 8  # longest n-gram that is found by its number; longer ones are compared token by token
# Of n-grams that are distinguished; one between two of them counts as shorter.
LENGTHS = (*range(1, _INDEXED + 1), 12, 16, 24, 32)
_PLACES = {length: place for place, length in enumerate(LENGTHS)}
MAX_OCCURRENCES = 8  # occurrences considered for each row
MAX_PROPOSED = 8  # tokens that n-grams propose for a row
_RATE_WEIGHT = 0.1  # of a new observation in ``MatchRates``
_INITIAL_RATES = {length: 1 - 0.5 ** (1 + length / 4) for length in LENGTHS}
MAX_SEEN = 64  # tokens that are proposed because they occur somewhere in the text
_MIN_REST = 1e-4  # minimum probability assumed for all tokens that the draft model does not propose together
_UNKNOWN = 0.01  # probability assumed for tokens where the draft model proposes nothing
_EMPTY = 1  # an n-gram is a number: this, and the bits of its tokens, the last one first
PIECE = 1024  # tokens of a text that are indexed at once
SEPARATOR = 2**32 - 1  # between texts: larger than any token, and never proposed
_LARGER = 2**63 - 1  # than any token: a search in a table that ends with it finds a place


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


def draft_log_chances(acceptance: AcceptanceModel, log_probs: Tensor) -> Tensor:
    """The logarithms of the chances of the draft model's children of F rows, [F, c], from their log-probabilities: as ``score``
    computes them from what ``write_drafted`` has written, but on the device of ``log_probs``.
    """
    weights = to_device(acceptance.weights, log_probs.device)
    log_probs = log_probs.float()
    features = log_probs.new_zeros(len(log_probs), log_probs.shape[1] + 1, len(DRAFT_PRIOR))
    features[:, :-1, 0] = log_probs
    features[:, -1, 0] = (1 - log_probs.exp().sum(1)).clamp_(min=_MIN_REST).log_()
    scores = features @ weights[:-1]
    scores[:, -1] += weights[-1]
    return scores.log_softmax(-1)[:, :-1]


def possible(candidates: Candidates) -> Candidates:
    """The candidates, with NO_TOKEN for those whose log-probability is −∞, which a structure forbids."""
    log_probs = candidates.log_probs
    token_ids = candidates.token_ids.masked_fill(log_probs == -torch.inf, NO_TOKEN)
    return Candidates(candidates.rows, token_ids, log_probs.clamp(min=log(_MIN_REST)))


class Match(NamedTuple):
    """Earlier occurrences of the tokens at the end of a row's path."""

    length: int  # of the longest n-gram that occurred there, one of LENGTHS
    occurrences: int  # those after which the token followed, as far as they were looked at


# By token that followed an earlier occurrence of an n-gram at the end of a row's path. The longest n-grams come first; of equally
# long ones, the latest.
Occurrences = dict[int, Match]


class NgramProposer:
    """N-grams of ``text``, by default the prompt and the answer so far. Needs no forward.

    ``shortest``: the shortest n-gram that counts as an occurrence.

    Features: the length of the longest n-gram that the token followed, one-hot; the same again for the first of the row's
    ``Occurrences``, 0 for the others; and the logarithm of 1 + the number of occurrences.
    """

    prior: ClassVar[dict[str, float]] = {
        **{f"length {length}": 0.5 * min(length, 4) for length in LENGTHS},
        **{f"first, length {length}": 1.0 for length in LENGTHS},
        "log occurrences": 0.2,
    }

    def __init__(self, text: Iterable[int] = (), shortest: int = 1) -> None:
        self._text = list(text)
        self._shortest = shortest
        self._indexed = 0  # tokens of it that are in ``_places``
        self._places: dict[int, list[int]] = {}  # by n-gram, up to the first unique length: indices of the tokens after it

    def append(self, tokens: Iterable[int]) -> None:
        """Append accepted tokens; the last one is the tree's root."""
        self._text += tokens

    @property
    def num_unindexed(self) -> int:
        """Tokens of the text that are not indexed yet."""
        return len(self._text) - self._indexed

    def index(self, most: int) -> None:
        """Index up to ``most`` of the tokens that are not indexed yet."""
        text, known = self._text, self._places
        stop = min(self._indexed + most, len(text))
        for end in range(self._indexed, stop):
            if text[end] == SEPARATOR:
                continue
            ngram = _EMPTY
            for length in range(1, min(_INDEXED, end) + 1):
                ngram = ngram << 32 | text[end - length]
                places = known.get(ngram)
                if places is None:
                    known[ngram] = [end]
                    break
                if len(places) == 1 and length < min(_INDEXED, places[0]):
                    known[ngram << 32 | text[places[0] - length - 1]] = places[:]
                places.append(end)
        self._indexed = stop

    def __len__(self) -> int:
        return len(self._text)

    def find(self, path: Sequence[int]) -> Occurrences:
        """The best occurrences of the n-grams at the end of the text and ``path``, the tokens below the root up to a row."""
        return self.find_after(self.ending(path))

    def ending(self, path: Sequence[int]) -> list[int]:
        """The last tokens of the text and ``path``, as many as are compared."""
        return [*self._text[-LENGTHS[-1] :], *path][-LENGTHS[-1] :]

    def find_after(self, context: list[int], most: int = MAX_OCCURRENCES) -> Occurrences:
        """As ``find``, for n-grams at the end of any text, as ``ending`` returns it; ``most`` occurrences are considered. Finds
        nothing while a long text is being indexed in pieces (``index``).
        """
        if self.num_unindexed > PIECE:
            return {}
        if self.num_unindexed:
            self.index(PIECE)
        text = self._text
        ranked = self._ranked(context, most)
        tokens = [text[place] for _, place in ranked]
        found: Occurrences = {}
        for token, (length, _) in zip(tokens, ranked, strict=True):
            if token not in found:
                found[token] = Match(length, tokens.count(token))
        return found

    def _ranked(self, context: list[int], most: int) -> list[tuple[int, int]]:
        """Lengths of n-grams at the end of ``context``, and the places after them in the text: the longest n-grams first, and of
        equally long ones the latest; at most ``most``.
        """
        matches: list[list[int]] = []  # places by length of the n-gram
        ngram = _EMPTY
        for token in context[: -_INDEXED - 1 : -1]:
            ngram = ngram << 32 | token
            places = self._places.get(ngram)
            if places is None:
                break
            matches.append(places)
        ranked, seen = list[tuple[int, int]](), set[int]()
        for length in range(len(matches), 0, -1):
            if length < self._shortest and (seen or len(matches[length - 1]) > 1):
                break
            if len(matches[length - 1]) == len(seen):
                continue  # every n-gram of this length was part of a longer one
            latest = matches[length - 1][: -MAX_OCCURRENCES - 1 : -1]
            if not seen and (length == _INDEXED or len(latest) == 1):  # else no n-gram is longer
                ranked = sorted([(self._length(context, length, place), place) for place in latest], reverse=True)
            else:
                ranked += [(length, place) for place in latest if place not in seen]
            if len(ranked) >= most:
                break
            seen.update(latest)
        if ranked and ranked[0][0] < self._shortest:
            return []
        return ranked[:most]

    def _length(self, context: list[int], length: int, place: int) -> int:
        """The length of the n-gram before ``place`` that is equal to the end of ``context``, of which ``length`` are known."""
        text, most = self._text, min(len(context), place)
        for longer in LENGTHS[length:]:
            if longer > most or text[place - longer : place] != context[-longer:]:
                break
            length = longer
        return length


class MatchRates:
    """The share of tokens after the longest n-gram of a source that were accepted, by its length: moving averages."""

    name = "matches"

    def __init__(self) -> None:
        self._rates: dict[str, dict[int, float]] = {}  # by source and length

    @property
    def learned(self) -> dict[str, dict[str, float]]:
        """The rates by source and length of the n-gram."""
        return {source: {str(length): rate for length, rate in rates.items()} for source, rates in self._rates.items()}

    def start_from(self, learned: Mapping[str, Mapping[str, float]]) -> None:
        """Continue with rates that were learned before."""
        for source, rates in learned.items():
            self._rates[source] = {length: rates.get(str(length), rate) for length, rate in _INITIAL_RATES.items()}

    def rate(self, source: str, length: int) -> float:
        """The probability that the first of the source's ``Occurrences`` is accepted if its n-gram has this length."""
        return self._rates.get(source, _INITIAL_RATES)[length]

    def observe(self, source: str, found: Occurrences, accepted: int) -> None:
        """Learn from an accepted token, before which the source's n-grams ``found`` ended."""
        rates = self._rates.setdefault(source, dict(_INITIAL_RATES))
        for token, match in islice(found.items(), 1):
            rates[match.length] += _RATE_WEIGHT * ((token == accepted) - rates[match.length])


def write_ngrams(occurrences: Sequence[Occurrences], token_ids: IntArray, features: FloatArray, first: int) -> None:
    """Write the tokens that n-grams of one text propose below F rows, and their features of all tokens.

    At most ``MAX_PROPOSED`` tokens are proposed. For so few, a loop is faster than operations on arrays.

    Args:
        token_ids: [F, K], the tokens of earlier sources and NO_TOKEN.
        features: [F, K + 1, W], zeros. Must be a view whose last dimension is contiguous.
        first: column of the first token that is proposed here.
    """
    for row, (found, known) in enumerate(zip(occurrences, token_ids[:, :first].tolist(), strict=True)):
        for rank, (token, (length, count)) in enumerate(found.items()):
            if token in known:
                column = known.index(token)
            elif rank < MAX_PROPOSED:
                column = first + rank
                token_ids[row, column] = token
            else:
                continue
            of_token = features[row, column]
            of_token[_PLACES[length]] = 1.0
            if not rank:
                of_token[len(LENGTHS) + _PLACES[length]] = 1.0
            of_token[-1] = log(1 + count)


class SeenTokens:
    """The distinct tokens of the prompt and the answer so far: one may recur although nothing before it does.

    Features: 1 for every token that has occurred; the logarithm of 1 + how often; and of 1 + how long ago, in tokens; and 1 for a
    token that no other source proposes.
    """

    prior: ClassVar[dict[str, float]] = {"seen": 0.0, "log count": 0.3, "log age": 0.0, "not proposed": -0.5}

    def __init__(self, text: Sequence[int]) -> None:
        backwards = np.array(text[::-1], np.int64)
        self._tokens, latest, counts = np.unique(backwards, return_index=True, return_counts=True)  # [T] each, tokens ascending
        self._counts = counts.astype(np.float32)
        self._last = len(text) - latest  # the place after the last occurrence
        self._length = len(text)
        self._table: tuple[IntArray, FloatArray, IntArray] | None = None

    def append(self, tokens: Iterable[int]) -> None:
        """Append accepted tokens."""
        for token in tokens:
            self._length += 1
            place = int(self._tokens.searchsorted(token))
            if place == len(self._tokens) or self._tokens[place] != token:
                self._tokens = np.insert(self._tokens, place, token)
                self._counts, self._last = np.insert(self._counts, place, 0), np.insert(self._last, place, 0)
            self._counts[place] += 1
            self._last[place] = self._length
        self._table = None

    def table(self) -> tuple[IntArray, FloatArray, IntArray]:
        """The T tokens, ascending, and a larger number [T + 1]; their features, without the last one [T, 3]; and their places,
        the most frequent first and of equally frequent ones the latest [T].
        """
        if self._table is None:
            counts, ages = self._counts, (self._length - self._last).astype(np.float32)
            features = np.stack((np.ones_like(counts), np.log1p(counts), np.log1p(ages)), axis=1)
            self._table = np.append(self._tokens, _LARGER), features, np.lexsort((ages, -counts))
        return self._table


def write_seen(seen: SeenTokens, token_ids: IntArray, features: FloatArray, first: int) -> None:
    """Write up to ``MAX_SEEN`` tokens below F rows of one tree that no other source proposes, and the features of all tokens.

    Args:
        token_ids: [F, K], the tokens of all other sources and NO_TOKEN.
        features: [F, K + 1, 4], zeros.
        first: column of the first token that is proposed here; if it is K, none is.
    """
    tokens, values, ranked = seen.table()
    known = token_ids[:, :first]
    places = tokens.searchsorted(known)
    rows, columns = (tokens[places] == known).nonzero()
    seen_places = places[rows, columns]
    features[rows, columns, :3] = values[seen_places]
    if first == token_ids.shape[1]:
        return
    is_new = np.ones((len(known), len(values)), bool)
    is_new[rows, seen_places] = False
    for row, new in enumerate(is_new[:, ranked]):
        found = ranked[new.nonzero()[0][:MAX_SEEN]]
        columns = slice(first, first + len(found))
        token_ids[row, columns] = tokens[found]
        features[row, columns, :3] = values[found]
        features[row, columns, 3] = 1.0


class Proposals(NamedTuple):
    """The proposals of at least one source below rows of one tree."""

    acceptance: AcceptanceModel
    tree: InjectionTree
    rows: Sequence[int]
    candidates: Candidates | None  # of the draft model, if it is a source
    found: Sequence[Sequence[Occurrences]] = ()  # n-grams, by text and then by row
    seen: SeenTokens | None = None  # None if they are no source
    proposes_seen: bool = False  # whether they propose tokens; else they only have features of those of other sources


def score(proposals: Iterable[Proposals]) -> None:
    """Score the proposals of all requests, and add them to their trees. Few operations serve many requests, on the host, which is
    faster for so few numbers. No tree is changed if anything raises.
    """
    scored: list[tuple[Proposals, list[Line]]] = []
    kinds: defaultdict[tuple[int, int, int, bool, bool], list[Proposals]] = defaultdict(list)
    for each in proposals:
        children = 0 if each.candidates is None else each.candidates.token_ids.shape[1]
        kinds[id(each.acceptance), children, len(each.found), each.seen is not None, each.proposes_seen].append(each)
    for several in kinds.values():
        choices = _joined(several)
        ranked = several[0].acceptance.log_chances(choices).sort(descending=True)
        token_ids = choices.token_ids.gather(1, ranked.indices).tolist()
        lines = [
            Line(tokens[: len(tokens) - tokens.count(NO_TOKEN)], chances, choices, place)
            for place, (tokens, chances) in enumerate(zip(token_ids, ranked.values.tolist(), strict=True))
        ]
        for each in several:
            scored.append((each, lines[: len(each.rows)]))
            del lines[: len(each.rows)]
    for each, lines in scored:
        each.tree.add(each.rows, lines)


def _joined(several: Sequence[Proposals]) -> Choices:
    """The proposals of all sources, by kind: the draft model's children, tokens after n-grams of each text, other seen tokens."""
    drafted = [each.candidates for each in several if each.candidates is not None]
    texts = [[one for rows in parts for one in rows] for parts in zip(*(each.found for each in several), strict=True)]
    num_rows = sum([len(each.rows) for each in several])
    children, place = (drafted[0].token_ids.shape[1], len(DRAFT_PRIOR)) if drafted else (0, 0)
    num_seen = MAX_SEEN if several[0].proposes_seen else 0
    width = place + len(texts) * len(NgramProposer.prior) + (0 if several[0].seen is None else len(SeenTokens.prior))
    token_ids = torch.full((num_rows, children + len(texts) * MAX_PROPOSED + num_seen), NO_TOKEN)
    features = torch.zeros(num_rows, token_ids.shape[1] + 1, width)
    ids, values = token_ids.numpy(), features.numpy()
    if drafted:
        write_drafted(drafted, ids, values[..., :place])
    for occurrences in texts:
        write_ngrams(occurrences, ids, values[..., place : place + len(NgramProposer.prior)], children)
        place += len(NgramProposer.prior)
        children += MAX_PROPOSED
    row = 0
    for each in several:
        rows = slice(row, row + len(each.rows))
        row += len(each.rows)
        if each.seen is not None:
            write_seen(each.seen, ids[rows], values[rows, :, place:], children)
    return Choices(token_ids, features)
