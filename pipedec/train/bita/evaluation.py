"""How well masks predict tokens ahead, behind every position of held-out answers."""

from __future__ import annotations

from typing import Any

import torch
from rich.progress import track
from torch import Tensor, nn

from pipedec.model.bita import BitaWeights
from pipedec.train.bita.learned import mask_pass, token_pass
from pipedec.train.bita.mask_rows import TOKENS_PER_FORWARD, MaskRows, mask_rows, places_of, sample_batches
from pipedec.train.continuations import Continuation
from pipedec.train.report import bita_cells, print_table

_TREE_CANDIDATES = 5  # BiTA §4.1: candidates of each mask


@torch.no_grad()
def evaluate(
    target: Any, weights: BitaWeights, answered: dict[str, list[Continuation]], most: int = TOKENS_PER_FORWARD
) -> dict[str, dict[str, Any]]:
    """How well the masks predict behind every place of the samples, per set: ``guess_figures``.

    Args:
        most: tokens and mask rows of a forward pass.
    """
    report = {}
    for name, samples in track(answered.items(), "held out"):
        drawn = [(sample, places_of(sample)) for sample in samples]
        ranks, losses = [], []
        for part in sample_batches(drawn, weights.num_masks, most):
            rows = mask_rows(*part, weights.num_masks, weights.prompt.shape[3]).on(target.device)
            logits = mask_pass(target, weights.prompt, weights.masks, rows, token_pass(target, rows.tokens))
            labels = rows.labels[rows.labelled]
            of_label = logits.gather(1, labels[:, None])
            ranks.append(_by_group(rows, (logits > of_label).sum(1).float(), weights.num_masks))
            losses.append(_by_group(rows, nn.functional.cross_entropy(logits, labels, reduction="none"), weights.num_masks))
        if ranks:
            report[name] = guess_figures(torch.cat(ranks).cpu(), torch.cat(losses).cpu())
    return report


def _by_group(rows: MaskRows, values: Tensor, num_masks: int) -> Tensor:
    """Values of the rows with a label, one line per group, NaN without a label: [groups, M]."""
    spread = torch.full(rows.labels.shape, torch.nan, device=values.device)
    spread[rows.labelled] = values
    groups = spread.view(-1, num_masks)
    return groups[~groups.isnan().all(1)]


def guess_figures(ranks_GM: Tensor, losses_GM: Tensor) -> dict[str, Any]:
    """Figures of the predictions of G groups of masks.

    For each mask ``top1``, ``top5`` and ``loss``; and the mean number of tokens per pass, the target's own included:
    ``chain_tokens`` with the top prediction of each mask, ``tree_tokens`` with its top five, of which only the first has children
    (BiTA Figure 5). Tokens per pass count only groups in which every mask has a label.

    Args:
        ranks_GM: number of tokens that a mask ranks above its label; NaN if it has none.
        losses_GM: NaN likewise.
    """
    has_label = ~ranks_GM.isnan()
    whole = ranks_GM[has_label.all(1)]
    is_first = whole == 0
    run = is_first.long().cumprod(1).sum(1)
    then = torch.cat((whole, torch.full_like(whole[:, :1], torch.inf)), 1).gather(1, run[:, None])[:, 0]
    shares = {
        f"top{k}": [round(float((ranks[has] < k).float().mean()), 4) for ranks, has in zip(ranks_GM.T, has_label.T, strict=True)]
        for k in (1, 5)
    }
    return {
        **shares,
        "loss": [round(loss, 4) for loss in losses_GM.nanmean(0).tolist()],
        "chain_tokens": round(1 + float(run.float().mean()), 4),
        "tree_tokens": round(1 + float((run + (then < _TREE_CANDIDATES)).float().mean()), 4),
        "groups": len(ranks_GM),
    }


def print_bita(report: dict[str, Any]) -> None:
    """Print how well the masks predict the target's own answers."""
    print_table(
        "Held-out prompts: predictions of each mask, tokens per pass",
        ("prompts", "top 1", "top 5", "loss", "chain", "tree", "groups"),
        [(name, *bita_cells(row)) for name, row in report["held_out"].items()],
    )
