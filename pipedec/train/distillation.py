"""The distribution of a frozen target at every token of fixed rows, from which its draft learns.

The target's last hidden states are computed once and kept on disk (the part of the head that makes logits of the draft's tokens
is cheap), so that a draft can see the rows several times. Shapes: R rows, T tokens of a row, B rows of a step, E hidden size of
the target, D tokens of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipedec.core import UserError
from pipedec.model import DraftVocabulary
from pipedec.train.continuations import Model
from pipedec.train.run import replacing
from pipedec.transport.replicas import ALONE, Replicas

_HIDDEN_ROWS = 64  # per file


@dataclass(frozen=True)
class TargetMemory:
    """The predictions of a target at each token of some rows."""

    hidden: Tensor  # [R, T, E], last hidden states
    totals: Tensor  # float32 [R, T], log-sum-exp of the logits of all of the target's tokens
    greedy: Tensor  # int64 [R, T], the target's most likely token

    @classmethod
    def joined(cls, parts: Sequence[TargetMemory]) -> TargetMemory:
        """The rows of several, in order."""
        return cls(*(torch.cat([getattr(part, name) for part in parts]) for name in ("hidden", "totals", "greedy")))


@dataclass(frozen=True)
class DistillationRows:
    """Rows of tokens, the target's predictions at each of them, and the head that makes the logits of the draft's tokens."""

    ids: Tensor  # int64 [R, T], of the target
    weights: Tensor  # [R, T], of each token's loss
    memory: TargetMemory  # of the same rows
    head: Tensor  # [D, E], on the device of the training; the first row is unused if the draft has a vocabulary of its own
    vocabulary: DraftVocabulary | None = None  # of the draft, on the same device; None if it has the target's

    def losses(self, model: Callable[..., Any], rows: Tensor, greedy_share: float) -> Tensor:
        """The weighted sum of the tokens' losses.

        A token's loss is the cross-entropy between the draft's distribution and (1 − ``greedy_share``) of the target's
        distribution plus ``greedy_share`` of the target's greedy token.
        """
        with torch.no_grad():
            wanted_BTD = self._probabilities(rows) * (1 - greedy_share)
            greedy_BT1 = self._of_draft(self._at(self.memory.greedy, rows))[..., None]
            wanted_BTD.scatter_add_(-1, greedy_BT1, torch.full_like(wanted_BTD[..., :1], greedy_share))
        draft_BTD = model(input_ids=self._of_draft(self._at(self.ids, rows))).logits.float()
        losses = nn.functional.cross_entropy(draft_BTD.flatten(0, 1), wanted_BTD.flatten(0, 1), reduction="none")
        return (losses * self.weights_of(rows).flatten()).sum()

    def weights_of(self, rows: Tensor) -> Tensor:
        """[B, T]."""
        return self._at(self.weights, rows)

    def _probabilities(self, rows: Tensor) -> Tensor:
        """The target's, of the draft's tokens, [B, T, D]: its first token has what is left for tokens that it does not know."""
        logits_BTD = nn.functional.linear(self._at(self.memory.hidden, rows), self.head).float()
        if self.vocabulary is None:
            return logits_BTD.softmax(-1)
        probabilities_BTD = (logits_BTD - self._at(self.memory.totals, rows)[..., None]).exp()
        probabilities_BTD[..., 0] = (1 - probabilities_BTD[..., 1:].sum(-1)).clamp(min=0)
        return probabilities_BTD

    def _at(self, values: Tensor, rows: Tensor) -> Tensor:
        """Rows of a tensor that lies on the host, on the head's device."""
        return values[rows.to(values.device)].to(self.head.device)

    def _of_draft(self, token_ids: Tensor) -> Tensor:
        return token_ids if self.vocabulary is None else self.vocabulary.draft_ids[token_ids]


def head_of(target: Model, vocabulary: DraftVocabulary | None) -> Tensor:
    """The rows of the target's head for the draft's tokens, [D, E]."""
    head: Tensor = target.get_output_embeddings().weight.detach()
    return head.clone() if vocabulary is None else head[vocabulary.tokens.clamp(min=0)]


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
def remember(target: Model, ids_RT: Tensor, store: Path, replicas: Replicas = ALONE) -> TargetMemory:
    """The target's predictions at all tokens of the rows; ``store`` keeps one file per 64 rows, which several processes share.
    Raises UserError if it holds other rows, or files of an earlier version.
    """
    store.mkdir(parents=True, exist_ok=True)
    pieces = [(store / f"{number:04}.safetensors", ids) for number, ids in enumerate(ids_RT.split(_HIDDEN_ROWS))]
    for number, (path, ids) in enumerate(track(pieces, f"hidden states: {store.name}", disable=not replicas.is_first)):
        if replicas.shares(number) and not path.exists():
            found = TargetMemory.joined([_predictions(target, part) for part in ids.split(8)])
            with replacing(path) as unfinished:
                save_file({"ids": ids.clone(), **vars(found)}, unfinished)
    replicas.wait()
    parts = []
    for path, ids in pieces:
        stored = load_file(path)
        if "greedy" not in stored or not torch.equal(stored.pop("ids"), ids):
            raise UserError(f"{path} comes from other text: give another --work, or remove it")
        parts.append(TargetMemory(**stored))
    return TargetMemory.joined(parts)


def _predictions(target: Model, ids_BT: Tensor) -> TargetMemory:
    hidden_BTE = target.get_decoder()(input_ids=ids_BT.to(target.device), use_cache=False).last_hidden_state
    totals, greedy = [], []
    for hidden_TE in hidden_BTE:  # one by one: V is large
        logits_TV = target.get_output_embeddings()(hidden_TE).float()
        totals.append(logits_TV.logsumexp(-1))
        greedy.append(logits_TV.argmax(-1))
    return TargetMemory(hidden_BTE.cpu(), torch.stack(totals).cpu(), torch.stack(greedy).cpu())
