"""Draft sources for best-first injection: the draft model, and n-grams that recur in the prompt and the answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from pipedec.decoding.choices import NO_TOKEN, is_repeated
from pipedec.tree import Candidates, PredictionTree

if TYPE_CHECKING:
    from pipedec.decoding.method import Drafter

MAX_MATCH = 8  # longest n-gram that is compared
_MIN_MATCH = 2  # shortest n-gram after which a token is proposed
_MAX_OCCURRENCES = 32  # occurrences considered for each row
_MAX_PROPOSED = 4  # tokens that n-grams propose for a row
_MIN_REST = 1e-4  # minimum probability assumed for all tokens that the draft model does not propose together


@dataclass(frozen=True)
class DraftProposal:
    """The draft model's most probable children. Features: the log-probability; 1 for tokens that are not among the children."""

    children: Candidates

    @property
    def token_ids(self) -> Tensor:
        return self.children.token_ids

    def features(self, token_ids: Tensor) -> Tensor:
        """[F, K + 1, 2]. A token that is not among the children gets the log-probability of the least probable child."""
        log_probs = self.children.log_probs.float()
        is_same = token_ids[:, :, None] == self.token_ids[:, None]
        is_child = is_same.any(-1)
        of_children = torch.where(is_same, log_probs[:, None], 0.0).sum(-1)
        rest = (1 - log_probs.exp().sum(1)).clamp(min=_MIN_REST).log()
        estimated = torch.where(is_child, of_children, log_probs[:, -1:])
        not_child = (~is_child).to(estimated.dtype)
        return torch.stack((torch.cat((estimated, rest[:, None]), 1), pad(not_child, (0, 1))), -1)


class DraftProposer:
    """The draft model as a draft source: one forward for every proposal."""

    prior = (1.0, 0.0)

    def __init__(self, drafter: Drafter, children: int) -> None:
        self._drafter = drafter
        self._children = children

    def propose(self, tree: PredictionTree, rows: Tensor) -> DraftProposal:
        return DraftProposal(self._drafter.expand(tree, rows, self._children))


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
        lengths = pad((is_same * self.lengths[:, None]).amax(-1), (0, 1))
        is_best = pad(is_same[:, :, 0], (0, 1))
        by_length = one_hot(lengths, MAX_MATCH + 1)[..., 1:].float()
        return torch.cat((by_length, by_length * is_best[..., None]), -1)


class NgramProposer:
    """N-grams of the prompt and the answer so far. Needs no forward.

    Args:
        text: token ids of the prompt and of all other text to search.
    """

    prior = tuple(0.5 * min(length, 4) for length in range(1, MAX_MATCH + 1)) + (1.0,) * MAX_MATCH

    def __init__(self, text: tuple[int, ...], device: torch.device | str) -> None:
        self._text = torch.tensor(text, dtype=torch.int64, device=device)

    def accept(self, tokens: tuple[int, ...]) -> None:
        """Append accepted tokens; the last one is the tree's root."""
        self._text = torch.cat((self._text, self._text.new_tensor(tokens)))

    def propose(self, tree: PredictionTree, rows: Tensor) -> NgramProposal:
        lengths_FL = self._match_lengths(self._context(tree, rows))
        num_indices = lengths_FL.shape[1]
        rank_FL = lengths_FL * num_indices + torch.arange(num_indices, device=rows.device)  # of equal lengths the latest
        indices_FP = rank_FL.topk(min(_MAX_OCCURRENCES, num_indices), dim=1).indices
        padding = (0, _MAX_OCCURRENCES - indices_FP.shape[1])  # if the text is short
        next_ids = pad(self._text[indices_FP + 1], padding, value=NO_TOKEN)
        lengths = pad(lengths_FL.gather(1, indices_FP), padding)
        return NgramProposal(self._proposed(next_ids, lengths), next_ids, lengths)

    def _proposed(self, next_ids: Tensor, lengths: Tensor) -> Tensor:
        """int64 [F, k], the first distinct tokens after long enough n-grams."""
        is_proposed = (lengths >= _MIN_MATCH) & ~is_repeated(next_ids)
        order = is_proposed.int().sort(dim=1, descending=True, stable=True).indices[:, :_MAX_PROPOSED]
        return next_ids.masked_fill(~is_proposed, NO_TOKEN).gather(1, order)

    def _context(self, tree: PredictionTree, rows: Tensor) -> Tensor:
        """int64 [F, MAX_MATCH], each row's token and those before it, nearest first; NO_TOKEN before the start of the text."""
        tokens = []
        row, steps_in_text = rows, torch.zeros_like(rows)
        for _ in range(MAX_MATCH):
            index = len(self._text) - 1 - steps_in_text
            in_text = torch.where(index >= 0, self._text[index.clamp(min=0)], NO_TOKEN)
            tokens.append(torch.where(row > 0, tree.token_ids[row], in_text))
            steps_in_text = steps_in_text + (row == 0)
            row = torch.where(row > 0, tree.parents[row], 0)
        return torch.stack(tokens, 1)

    def _match_lengths(self, context_FM: Tensor) -> Tensor:
        """int64 [F, L − 1], length of the n-gram ending at each index of the text (L tokens) that ends each context, too.

        The last index of the text is left out, since nothing follows it.
        """
        num_indices = len(self._text) - 1
        is_match = torch.ones(len(context_FM), num_indices, dtype=torch.bool, device=context_FM.device)
        lengths = torch.zeros_like(is_match, dtype=torch.int64)
        for distance in range(min(MAX_MATCH, num_indices)):
            is_match[:, :distance] = False
            is_match[:, distance:] &= self._text[: num_indices - distance] == context_FM[:, distance, None]
            lengths += is_match
        return lengths
