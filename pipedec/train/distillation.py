"""The distribution of a frozen target at every token of fixed rows, from which its draft learns.

The target's most likely tokens are computed once and kept on disk, so that drafts of any vocabulary can see the rows several
times. Shapes: R rows, T tokens of a row, B rows of a step, K most likely tokens, D tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.model import DraftVocabulary
from pipedec.train.replicas import ALONE, Replicas
from pipedec.train.run import replacing
from pipedec.train.targets import FrozenTarget

MOST_LIKELY = 64  # tokens of the target that are kept; the others are noise to a draft
_ROWS = 64  # per file


@dataclass(frozen=True)
class TargetMemory:
    """The predictions of a target after each token of some rows: its most likely tokens, the most likely one first."""

    tokens: Tensor  # int32 [R, T, K]
    probabilities: Tensor  # float16 [R, T, K]

    @classmethod
    def joined(cls, parts: Sequence[TargetMemory]) -> TargetMemory:
        """The rows of several, in order."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("tokens", "probabilities")))


@dataclass(frozen=True)
class DistillationRows:
    """Rows of tokens, and the target's predictions after each of them; all on the host."""

    ids: Tensor  # int64 [R, T], of the target
    weights: Tensor  # [R, T], of each token's loss
    memory: TargetMemory  # the target's predictions for these rows
    vocabulary: DraftVocabulary | None = None  # the draft's, on the device of the training; None if it has the target's

    def losses(self, model: Callable[..., Any], rows: Tensor, greedy_share: float) -> Tensor:
        """The weighted sum of the tokens' losses.

        A token's loss is the cross-entropy between the draft's distribution and (1 − ``greedy_share``) of the target's
        distribution over its most likely tokens plus ``greedy_share`` of the target's greedy token. A token that the draft does
        not know counts as its first token, which stands for all of them.
        """
        probabilities_BTK = _at(self.memory.probabilities, rows).float()
        wanted_BTK = probabilities_BTK * ((1 - greedy_share) / probabilities_BTK.sum(-1, keepdim=True))
        wanted_BTK[..., 0] += greedy_share
        tokens_BTK = self._of_draft(_at(self.memory.tokens, rows).long())
        logits_BTD = model(input_ids=self._of_draft(_at(self.ids, rows))).logits.float()
        losses_BT = logits_BTD.logsumexp(-1) - (logits_BTD.gather(-1, tokens_BTK) * wanted_BTK).sum(-1)
        return (losses_BT * self.weights_of(rows)).sum()

    def weights_of(self, rows: Tensor) -> Tensor:
        """[B, T]."""
        return _at(self.weights, rows)

    def _of_draft(self, token_ids: Tensor) -> Tensor:
        return token_ids if self.vocabulary is None else self.vocabulary.draft_ids[token_ids]


def _at(values: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor on the host, on the device of ``rows``."""
    return values[rows.to(values.device)].to(rows.device)


def mean_loss(
    model: Callable[..., Any], rows: Tensor, short: DistillationRows, long: DistillationRows, num_long: int, greedy_share: float,
    replicas: Replicas = ALONE,
) -> Tensor:  # fmt: skip
    """This process's part of the weighted mean loss of the tokens of ``rows``: the last ``num_long`` are rows of ``long``, the
    others of ``short``. The parts of all processes add up to the mean.
    """
    parts = (short, rows[: len(rows) - num_long]), (long, rows[len(rows) - num_long :])
    own = [(lesson, part[replicas.rank :: replicas.size]) for lesson, part in parts]
    losses = [lesson.losses(model, part, greedy_share) for lesson, part in own if len(part)]
    weights = [lesson.weights_of(part).sum() for lesson, part in parts if len(part)]
    return torch.stack(losses).sum() / torch.stack(weights).sum()


@torch.no_grad()
def remember(
    target: FrozenTarget, head: Callable[[Tensor], Tensor], ids_RT: Tensor, store: Path, replicas: Replicas = ALONE
) -> TargetMemory:
    """The target's predictions after all tokens of the rows, by its output embeddings (``head``). ``store`` keeps one file per 64
    rows, which several processes share.

    Raises UserError if it holds other rows, or files of an earlier version.
    """
    store.mkdir(parents=True, exist_ok=True)
    pieces = [(store / f"{number:04}.safetensors", ids) for number, ids in enumerate(ids_RT.split(_ROWS))]
    for number, (path, ids) in enumerate(track(pieces, f"predictions: {store.name}", disable=not replicas.is_first)):
        if replicas.shares(number) and not path.exists():
            found = TargetMemory.joined([_predictions(target.hidden_states(part), head) for part in ids.split(8)])
            with replacing(path) as unfinished:
                save_file({"ids": ids.clone(), **vars(found)}, unfinished)
    replicas.wait()
    parts = []
    for path, ids in pieces:
        stored = load_file(path)
        if "tokens" not in stored or not torch.equal(stored.pop("ids"), ids):
            raise UserError(f"{path} comes from other text: give another --work, or remove it")
        parts.append(TargetMemory(**stored))
    return TargetMemory.joined(parts)


def _predictions(hidden_BTE: Tensor, head: Callable[[Tensor], Tensor]) -> TargetMemory:
    tokens, probabilities = [], []
    for hidden_TE in hidden_BTE:  # one by one: V is large
        logits_TV = head(hidden_TE).float()
        top = logits_TV.topk(min(MOST_LIKELY, logits_TV.shape[-1]))
        tokens.append(top.indices.int())
        probabilities.append((top.values - logits_TV.logsumexp(-1, keepdim=True)).exp().half())
    return TargetMemory(torch.stack(tokens).cpu(), torch.stack(probabilities).cpu())
