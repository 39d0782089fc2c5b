"""Draft sources for best-first injection: the draft model, and n-grams that recur in the prompt and the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from pipedec.decoding.choices import NO_TOKEN
from pipedec.tree import Candidates, PredictionTree

MAX_MATCH = 8  # longest n-gram that is compared
_MIN_MATCH = 2  # shortest n-gram after which a token is proposed
_MAX_OCCURRENCES = 32  # occurrences considered for each row
_MAX_PROPOSED = 4  # tokens that n-grams propose for a row
_MIN_REST = 1e-4  # minimum probability assumed for all tokens that the draft model does not propose together


@dataclass(frozen=True)
class DraftProposal:
    """The draft model's most probable children. Features: the log-probability; 1 for tokens that are not among the children."""

    prior = (1.0, 0.0)
    children: Candidates

    @property
    def token_ids(self) -> Tensor:
        return self.children.token_ids

    def features(self, token_ids: Tensor) -> Tensor:
        """[F, K + 1, 2]. A token that is not among the children gets the log-probability of the least probable child."""
        log_probs = self.children.log_probs.float()
        is_same = token_ids[:, :, None] == self.token_ids[:, None]
        estimated = torch.where(is_same, log_probs[:, None], log_probs[:, -1:, None]).amax(-1)
        rest = (1 - log_probs.exp().sum(1, keepdim=True)).clamp_(min=_MIN_REST).log_()
        not_child = is_same.any(-1).logical_not_().float()
        return torch.stack((torch.cat((estimated, rest), 1), pad(not_child, (0, 1))), -1)


@dataclass(frozen=True)
class NgramProposal:
    """Tokens that followed earlier occurrences of the n-grams at the end of the rows' paths.

    Features: the length of the longest n-gram that the token followed, one-hot; the same again, but 0 unless the token followed
    the longest n-gram of all.

    Attributes:
        token_ids: int64 [F, k], proposed tokens.
        next_ids: int64 [F, P], tokens after the P best occurrences, best first.
        lengths: int64 [F, P], length of the n-gram at each occurrence.
    """

    token_ids: Tensor
    next_ids: Tensor
    lengths: Tensor

    def features(self, token_ids: Tensor) -> Tensor:
        is_same = token_ids[:, :, None] == self.next_ids[:, None]
        lengths = (is_same * self.lengths[:, None]).amax(-1)
        both = torch.stack((lengths, lengths * is_same[:, :, 0]), -1)
        one_hot = both[..., None] == torch.arange(1, MAX_MATCH + 1, device=lengths.device)
        return pad(one_hot.flatten(2).float(), (0, 0, 0, 1))


class _Occurrences:
    """All tokens of a text but the last, which nothing follows, in order of token id and then of position.

    Args:
        text: int64 [MAX_MATCH − 1 + L]; NO_TOKEN stands before its start.
        most: maximum occurrences of a token.
    """

    def __init__(self, text: Tensor, most: int) -> None:
        self.steps_back = torch.arange(1, most + 1, device=text.device)
        self.token_ids, self.positions = text[:-1].sort(stable=True)
        windows = text.unfold(0, MAX_MATCH, 1)
        self.n_grams = windows[(self.positions - (MAX_MATCH - 1)).clamp_(min=0)]  # up to each token
        self.n_grams[: MAX_MATCH - 1] = NO_TOKEN  # before the text
        self.next_ids = text[self.positions + 1]


class NgramProposer:
    """N-grams of the prompt and the answer so far. Needs no forward. Shapes: L tokens of text, J occurrences of a token.

    Args:
        text: token ids of the prompt and of all other text to search.
    """

    prior = tuple(0.5 * min(length, 4) for length in range(1, MAX_MATCH + 1)) + (1.0,) * MAX_MATCH

    def __init__(self, text: Iterable[int], device: torch.device | str) -> None:
        tokens = list(text)
        before = [NO_TOKEN] * (MAX_MATCH - 1)
        self._text = torch.tensor(before + tokens, dtype=torch.int64, device=device)  # [MAX_MATCH − 1 + L]
        self._counts = Counter(tokens)
        self._occurrences: _Occurrences | None = None  # None if the text has grown
        self._distances = torch.arange(1, MAX_MATCH + 1, device=device)

    def accept(self, tokens: Sequence[int]) -> None:
        """Append accepted tokens; the last one is the tree's root."""
        self._counts.update(tokens)
        self._text = torch.cat((self._text, self._text.new_tensor(tokens)))
        self._occurrences = None

    def propose(self, tree: PredictionTree, rows: Tensor) -> NgramProposal:
        """Tokens that may follow ``rows``: int64 [F], ascending."""
        if self._occurrences is None:
            self._occurrences = _Occurrences(self._text, max(_MAX_PROPOSED, *self._counts.values()))
        found, context_FM = self._occurrences, self._context(tree, rows)
        token_ids = context_FM[:, -1:].contiguous()
        places_FJ = (torch.searchsorted(found.token_ids, token_ids, right=True) - found.steps_back).clamp_(min=0)  # latest first
        n_grams = found.n_grams.index_select(0, places_FJ.view(-1)).view(*places_FJ.shape, MAX_MATCH)
        matched = MAX_MATCH - ((n_grams != context_FM[:, None]) * self._distances).amax(-1)
        # Places before a token's first occurrence hold other tokens or NO_TOKEN, which match nothing.
        ranks = matched * len(self._text) + found.positions.take(places_FJ)  # of equal lengths the latest
        best_FP = ranks.topk(min(_MAX_OCCURRENCES, ranks.shape[1])).indices
        next_ids, lengths = found.next_ids.take(places_FJ.gather(1, best_FP)), matched.gather(1, best_FP)
        return NgramProposal(self._proposed(next_ids, lengths), next_ids, lengths)

    def _proposed(self, next_ids: Tensor, lengths: Tensor) -> Tensor:
        """int64 [F, k], the first distinct tokens after long enough n-grams."""
        is_repeated = (next_ids[:, :, None] == next_ids[:, None]).tril_(-1).any(-1)
        is_proposed = (lengths >= _MIN_MATCH) & ~is_repeated
        countdown = torch.arange(next_ids.shape[1], 0, -1, device=next_ids.device)
        first = (is_proposed * countdown).topk(_MAX_PROPOSED)
        return next_ids.gather(1, first.indices).masked_fill_(first.values == 0, NO_TOKEN)

    def _context(self, tree: PredictionTree, rows: Tensor) -> Tensor:
        """int64 [F, MAX_MATCH], the tokens up to each row, the row's own last; NO_TOKEN before the start of the text."""
        above = MAX_MATCH - 1  # tokens of the text before the root; in front of the tree's rows they are a chain that leads to it
        token_ids = torch.cat((self._text[-MAX_MATCH:-1], tree.token_ids))
        parents = torch.cat((self._distances[:-1] - 2, tree.parents + above))
        path = [rows + above]
        for _ in range(above):
            path.append(parents.index_select(0, path[-1]))
        return token_ids.take(torch.stack(path[::-1], 1))
