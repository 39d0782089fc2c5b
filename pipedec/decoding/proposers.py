"""Draft sources for best-first injection: the draft model, and n-grams that recur in the prompt and the answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from math import log
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipedec.decoding.choices import NO_TOKEN
from pipedec.grammar import Bitmask
from pipedec.tree import Candidates

MAX_MATCH = 8  # longest n-gram that is compared
_MIN_MATCH = 2  # shortest n-gram after which a token is proposed
_MAX_OCCURRENCES = 32  # occurrences considered for each row
_MAX_PROPOSED = 4  # tokens that n-grams propose for a row
_MIN_REST = 1e-4  # minimum probability assumed for all tokens that the draft model does not propose together
_UNKNOWN = 0.01  # probability assumed for tokens where the draft model says nothing


@dataclass(frozen=True)
class DraftProposal:
    """The draft model's most probable children, on the host. Features: the log-probability; 1 for tokens that are not among the
    children.
    """

    prior = (1.0, 0.0)
    children: Candidates

    @classmethod
    def joined(cls, several: Sequence[Candidates]) -> DraftProposal:
        """Of candidates of several trees, with as many children for each row. Asks their device once."""
        rows, token_ids, log_probs = zip(*((each.rows, each.token_ids, each.log_probs) for each in several), strict=True)
        both = torch.cat((torch.cat(token_ids).double(), torch.cat(log_probs).double()), 1).cpu()
        ids, chances = both.chunk(2, dim=1)
        return cls(Candidates(torch.cat(rows), ids.long(), chances.to(log_probs[0].dtype)))

    @property
    def token_ids(self) -> Tensor:
        return self.children.token_ids

    def features(self, token_ids: Tensor) -> Tensor:
        """[F, K + 1, 2]. A token that is not among the children gets the log-probability of the least probable child."""
        log_probs = self.children.log_probs.float()
        if not log_probs.shape[1]:
            guess = torch.tensor((log(_UNKNOWN), 1.0), device=log_probs.device).expand(*token_ids.shape, 2)
            return pad(guess, (0, 0, 0, 1))
        is_same = token_ids[:, :, None] == self.token_ids[:, None]
        estimated = torch.where(is_same, log_probs[:, None], log_probs[:, -1:, None]).amax(-1)
        rest = (1 - log_probs.exp().sum(1, keepdim=True)).clamp_(min=_MIN_REST).log_()
        not_child = is_same.any(-1).logical_not_().float()
        return torch.stack((torch.cat((estimated, rest), 1), pad(not_child, (0, 1))), -1)


class Occurrences(NamedTuple):
    """Earlier occurrences of the n-grams at the end of a row's path, the longest first, of equally long ones the latest.

    Attributes:
        next_ids: the token after each.
        lengths: of the n-gram at each.
    """

    next_ids: list[int]
    lengths: list[int]

    def proposed(self) -> list[int]:
        """The first distinct tokens after long enough n-grams, at most ``_MAX_PROPOSED``."""
        tokens = (token for token, length in zip(self.next_ids, self.lengths, strict=True) if length >= _MIN_MATCH)
        return list(islice(dict.fromkeys(tokens), _MAX_PROPOSED))

    def within(self, allowed: Bitmask) -> Occurrences:
        """Those after which the text went on with a token that is allowed."""
        kept = [place for place, token in enumerate(self.next_ids) if token in allowed]
        return Occurrences([self.next_ids[place] for place in kept], [self.lengths[place] for place in kept])


def possible(candidates: Candidates) -> Candidates:
    """The candidates with NO_TOKEN for those whose log-probability is −∞: a structure does not allow them."""
    log_probs = candidates.log_probs
    token_ids = candidates.token_ids.masked_fill(log_probs == -torch.inf, NO_TOKEN)
    return Candidates(candidates.rows, token_ids, log_probs.clamp(min=log(_MIN_REST)))


@dataclass(frozen=True)
class NgramProposal:
    """Tokens that followed earlier occurrences of the n-grams at the end of the rows' paths.

    Features: the length of the longest n-gram that the token followed, one-hot; the same again, but 0 unless the token followed
    the longest n-gram of all.

    Attributes:
        token_ids: int64 [F, k], proposed tokens.
        next_ids: int64 [F, P], tokens after the P best occurrences, best first, padded with NO_TOKEN.
        lengths: int64 [F, P], length of the n-gram at each occurrence.
    """

    token_ids: Tensor
    next_ids: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, rows: Sequence[Occurrences]) -> NgramProposal:
        """Of the occurrences for each of F rows."""
        most = max(1, *(len(row.lengths) for row in rows))
        proposed = [_padded(row.proposed(), _MAX_PROPOSED, NO_TOKEN) for row in rows]
        next_ids = [_padded(row.next_ids, most, NO_TOKEN) for row in rows]
        lengths = [_padded(row.lengths, most, 0) for row in rows]
        columns = [[*first, *second, *third] for first, second, third in zip(proposed, next_ids, lengths, strict=True)]
        return cls(*torch.tensor(columns).split((_MAX_PROPOSED, most, most), 1))

    def features(self, token_ids: Tensor) -> Tensor:
        is_same = token_ids[:, :, None] == self.next_ids[:, None]
        lengths = (is_same * self.lengths[:, None]).amax(-1)
        both = torch.stack((lengths, lengths * is_same[:, :, 0]), -1)
        one_hot = both[..., None] == torch.arange(1, MAX_MATCH + 1, device=lengths.device)
        return pad(one_hot.flatten(2).float(), (0, 0, 0, 1))


def _padded(values: list[int], count: int, value: int) -> list[int]:
    return values + [value] * (count - len(values))


class NgramProposer:
    """N-grams of the prompt and the answer so far. Needs no forward.

    Args:
        text: token ids of the prompt and of all other text to search.
    """

    prior = tuple(0.5 * min(length, 4) for length in range(1, MAX_MATCH + 1)) + (1.0,) * MAX_MATCH

    def __init__(self, text: Iterable[int]) -> None:
        self._text: list[int] = []
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)  # by n-gram: where it ends, and text follows
        self.accept(text)

    def accept(self, tokens: Iterable[int]) -> None:
        """Append accepted tokens; the last one is the tree's root."""
        text, places = self._text, self._places
        for token in tokens:
            end = len(text)
            for length in range(1, min(MAX_MATCH, end) + 1):
                places[tuple(text[end - length :])].append(end)
            text.append(token)

    def find(self, path: Sequence[int]) -> Occurrences:
        """The best occurrences of the n-grams at the end of the text and ``path``, the tokens below the root up to a row."""
        context = [*self._text[-MAX_MATCH:], *path][-MAX_MATCH:]
        found, seen = Occurrences([], []), set[int]()
        for length in range(len(context), 0, -1):
            places = self._places.get(tuple(context[-length:]), ())
            for place in reversed(places) if len(places) > len(seen) else ():
                if place not in seen:
                    seen.add(place)
                    found.next_ids.append(self._text[place])
                    found.lengths.append(length)
                    if len(seen) == _MAX_OCCURRENCES:
                        return found
        return found
