"""Who says what may follow a row of the tree: the draft model, and the text itself where it repeats itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import one_hot, pad

from pipedec.decoding.choices import NO_TOKEN, is_repeated
from pipedec.decoding.interface import Drafter
from pipedec.tree import Candidates, PredictionTree

MAX_MATCH = 8  # tokens before a place that are compared
_MIN_MATCH = 2  # tokens that must read alike for a token to be named
_PLACES = 32  # best places of each row that are looked at
_NAMED = 4  # tokens that the text names for a row
_LEAST = 1e-4  # probability that is always left for tokens the draft does not name


@dataclass(frozen=True)
class DraftProposal:
    """The draft's likeliest children. Features: log-probability; 1 for a token that is not among them."""

    children: Candidates

    @property
    def token_ids(self) -> Tensor:
        return self.children.token_ids

    def features(self, token_ids: Tensor) -> Tensor:
        """A token that the draft did not name is taken for as likely as the last one that it did."""
        log_probs = self.children.log_probs.float()
        is_same = token_ids[:, :, None] == self.token_ids[:, None]
        is_named = is_same.any(-1)
        named = torch.where(is_same, log_probs[:, None], 0.0).sum(-1)
        rest = (1 - log_probs.exp().sum(1)).clamp(min=_LEAST).log()
        likely = torch.where(is_named, named, log_probs[:, -1:])
        unnamed = (~is_named).to(likely.dtype)
        return torch.stack((torch.cat((likely, rest[:, None]), 1), pad(unnamed, (0, 1))), -1)


class DraftProposer:
    """The draft model: one forward for every proposal."""

    prior = (1.0, 0.0)

    def __init__(self, drafter: Drafter, children: int) -> None:
        self._drafter = drafter
        self._children = children

    def propose(self, tree: PredictionTree, rows: Tensor) -> DraftProposal:
        return DraftProposal(self._drafter.expand(tree, rows, self._children))


@dataclass(frozen=True)
class NgramProposal:
    """Tokens that came next at places of the text that read like the rows' paths.

    Features, one-hot: how many tokens read alike at the best place where a token came next; once more, for the token of the best
    place of all.

    Attributes:
        token_ids: int64 [F, k].
        next_ids: int64 [F, P], tokens that came next, from the best place to the worst.
        lengths: int64 [F, P], how many tokens read alike there.
    """

    token_ids: Tensor
    next_ids: Tensor
    lengths: Tensor

    def features(self, token_ids: Tensor) -> Tensor:
        is_same = token_ids[:, :, None] == self.next_ids[:, None]
        lengths = pad((is_same * self.lengths[:, None]).amax(-1), (0, 1))
        is_best = pad(is_same[:, :, 0], (0, 1))
        alike = one_hot(lengths, MAX_MATCH + 1)[..., 1:].float()
        return torch.cat((alike, alike * is_best[..., None]), -1)


class NgramProposer:
    """The prompt and the answer so far. Costs no forward."""

    prior = tuple(0.5 * min(length, 4) for length in range(1, MAX_MATCH + 1)) + (1.0,) * MAX_MATCH

    def __init__(self, text: tuple[int, ...], device: torch.device | str) -> None:
        self._text = torch.tensor(text, dtype=torch.int64, device=device)

    def accept(self, tokens: tuple[int, ...]) -> None:
        """The text goes on with ``tokens``, the last of which is the tree's root."""
        self._text = torch.cat((self._text, self._text.new_tensor(tokens)))

    def propose(self, tree: PredictionTree, rows: Tensor) -> NgramProposal:
        lengths_FL = self._matches(self._context(tree, rows))
        num_places = lengths_FL.shape[1]
        merit_FL = lengths_FL * num_places + torch.arange(num_places, device=rows.device)  # the latest of equal places
        places_FP = merit_FL.topk(min(_PLACES, num_places), dim=1).indices
        missing = (0, _PLACES - places_FP.shape[1])  # of a short text
        next_ids = pad(self._text[places_FP + 1], missing, value=NO_TOKEN)
        lengths = pad(lengths_FL.gather(1, places_FP), missing)
        return NgramProposal(self._named(next_ids, lengths), next_ids, lengths)

    def _named(self, next_ids: Tensor, lengths: Tensor) -> Tensor:
        """int64 [F, k], the first distinct tokens after long enough matches."""
        is_named = (lengths >= _MIN_MATCH) & ~is_repeated(next_ids)
        order = is_named.int().sort(dim=1, descending=True, stable=True).indices[:, :_NAMED]
        return next_ids.masked_fill(~is_named, NO_TOKEN).gather(1, order)

    def _context(self, tree: PredictionTree, rows: Tensor) -> Tensor:
        """int64 [F, MAX_MATCH]: each row's token and the tokens before it, the nearest first; NO_TOKEN before the text."""
        tokens = []
        row, behind_root = rows, torch.zeros_like(rows)
        for _ in range(MAX_MATCH):
            place = len(self._text) - 1 - behind_root
            in_text = torch.where(place >= 0, self._text[place.clamp(min=0)], NO_TOKEN)
            tokens.append(torch.where(row > 0, tree.token_ids[row], in_text))
            behind_root = behind_root + (row == 0)
            row = torch.where(row > 0, tree.parents[row], 0)
        return torch.stack(tokens, 1)

    def _matches(self, context_FM: Tensor) -> Tensor:
        """int64 [F, L − 1]: how many tokens up to each place of the text, but its last, read like each context."""
        num_places = len(self._text) - 1
        is_alike = torch.ones(len(context_FM), num_places, dtype=torch.bool, device=context_FM.device)
        lengths = torch.zeros_like(is_alike, dtype=torch.int64)
        for distance in range(min(MAX_MATCH, num_places)):
            is_alike[:, :distance] = False
            is_alike[:, distance:] &= self._text[: num_places - distance] == context_FM[:, distance, None]
            lengths += is_alike
        return lengths
