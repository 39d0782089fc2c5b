"""What a draft learns from its frozen target: the target's distribution at every token of fixed rows.

The target's last hidden states are computed once and kept on disk (the head that makes logits from them is cheap), so that a
draft can see the rows several times. Shapes: R rows, T tokens of a row, B rows of a step, E hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from pipedec.core import UserError
from pipedec.train.continuations import Model

_HIDDEN_ROWS = 64  # per file


@dataclass(frozen=True)
class RememberedTarget:
    """Rows of tokens, the target's last hidden state at each of them, and its head, which makes the logits from it.

    Attributes:
        ids: int64 [R, T].
        weights: [R, T], of each token's loss.
        hidden: [R, T, E].
        head: [V, E].
    """

    ids: Tensor
    weights: Tensor
    hidden: Tensor
    head: Tensor

    def losses(self, model: Callable[..., Any], rows: Tensor, greedy_share: float) -> tuple[Tensor, Tensor]:
        """The weighted sum of the tokens' losses, and the sum of their weights.

        A token's loss is the cross-entropy between the draft's distribution and (1 − ``greedy_share``) of the target's
        distribution plus ``greedy_share`` of the target's greedy token.
        """
        with torch.no_grad():
            logits_BTV = nn.functional.linear(self.hidden[rows], self.head)
            greedy_BT1 = logits_BTV.argmax(-1, keepdim=True)
            wanted_BTV = logits_BTV.float().softmax(-1) * (1 - greedy_share)
            wanted_BTV.scatter_add_(-1, greedy_BT1, torch.full_like(wanted_BTV[..., :1], greedy_share))
        draft_BTV = model(input_ids=self.ids[rows]).logits.float()
        losses = nn.functional.cross_entropy(draft_BTV.flatten(0, 1), wanted_BTV.flatten(0, 1), reduction="none")
        weights = self.weights[rows].flatten()
        return (losses * weights).sum(), weights.sum()


def mean_loss(
    model: Callable[..., Any], rows: Tensor, short: RememberedTarget, long: RememberedTarget, num_long: int, greedy_share: float
) -> Tensor:
    """The weighted mean loss of the tokens of ``rows``: the last ``num_long`` are rows of ``long``, the others of ``short``."""
    sums = [
        memory.losses(model, part, greedy_share)
        for memory, part in ((short, rows[: len(rows) - num_long]), (long, rows[len(rows) - num_long :]))
        if len(part)
    ]
    return torch.stack([loss for loss, _ in sums]).sum() / torch.stack([weight for _, weight in sums]).sum()


@torch.no_grad()
def remember(target: Model, ids_RT: Tensor, store: Path) -> Tensor:
    """The last hidden states of the target for all rows, [R, T, E]; ``store`` keeps one file per 64 rows.

    Raises:
        UserError: ``store`` holds other rows.
    """
    store.mkdir(parents=True, exist_ok=True)
    hidden: list[Tensor] = []
    for number, ids in enumerate(track(ids_RT.split(_HIDDEN_ROWS), f"hidden states: {store.name}")):
        path = store / f"{number:04}.safetensors"
        if not path.exists():
            states = [target.get_decoder()(input_ids=part, use_cache=False).last_hidden_state for part in ids.split(16)]
            save_file({"ids": ids.clone(), "hidden": torch.cat(states)}, path.with_suffix(".partial"))
            path.with_suffix(".partial").rename(path)
        stored = load_file(path)
        if not torch.equal(stored["ids"], ids):
            raise UserError(f"{path} comes from other text: give another --work, or remove it")
        hidden.append(stored["hidden"])
    return torch.cat(hidden)
