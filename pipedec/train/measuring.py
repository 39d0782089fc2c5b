"""How well a draft predicts its target: on the target's own greedy continuations, and on held-out text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedec.model import DraftVocabulary
from pipedec.train.continuations import Continuation
from pipedec.train.run import Row, print_table, top_k_cells
from pipedec.train.targets import Model
from pipedec.verify.reference import load_transformers

TOP_K = (1, 2, 4, 8, 16)
DEPTHS = (1, 2, 4, 8, 16)
OnText = Callable[["MeasuredDraft"], dict[str, Row]]  # figures of a draft and its target on text, by family of text


class MeasuredDraft:
    """A draft, and which of the target's tokens it knows: all without ``vocabulary``."""

    def __init__(self, model: Model, vocabulary: DraftVocabulary | None = None) -> None:
        self._model, self._vocabulary = model, vocabulary

    @classmethod
    def load(cls, directory: Path, vocab_size: int, device: torch.device | str = "cpu") -> MeasuredDraft:
        """A draft as it is stored, computed in float32, of a target with ``vocab_size`` tokens."""
        model = load_transformers(directory, torch.float32, device)
        return cls(model, DraftVocabulary.between(directory, model.config.vocab_size, vocab_size, device))

    def logits(self, token_ids: Tensor) -> Tensor:
        """[B, T, D], after each of the target's tokens, int64 [B, T]."""
        logits_BTD: Tensor = self._model(input_ids=self.ids(token_ids)).logits.float()
        return logits_BTD

    def ids(self, token_ids: Tensor) -> Tensor:
        """The draft's ids of the target's tokens, also for those that it does not know (see ``DraftVocabulary``)."""
        return token_ids if self._vocabulary is None else self._vocabulary.draft_ids[token_ids]

    def top_ranks(self, logits_BTD: Tensor, token_ids: Tensor) -> Tensor:
        """For each token its rank among the draft's predictions, from 0 on; as many as there are tokens for an unknown one."""
        wanted = self.ids(token_ids)
        if self._vocabulary is not None:
            logits_BTD = logits_BTD.masked_fill(self._vocabulary.tokens < 0, -torch.inf)
        ranks = (logits_BTD > logits_BTD.gather(-1, wanted[..., None])).sum(-1)
        if self._vocabulary is None:
            return ranks
        return ranks.masked_fill(self._vocabulary.tokens[wanted] != token_ids, logits_BTD.shape[-1])


@torch.no_grad()
def on_policy_agreement(draft: MeasuredDraft, answered: dict[str, list[Continuation]], device: str = "cpu") -> dict[str, dict]:
    """How often the draft's top k holds the next token of the target's greedy continuation, by set.

    ``chains`` has, by k, the share of positions after which the next 1, 2, 4, 8 and 16 tokens are all among the top k: what a
    tree of that width accepts at that depth.
    """
    report: dict[str, dict] = {}
    for name, continuations in answered.items():
        ranks = []  # each token's rank among the draft's predictions, by answer
        for continuation in continuations:
            ids, first = torch.tensor([continuation.ids], device=device), continuation.prompt_length
            ranks.append(draft.top_ranks(draft.logits(ids)[:, first - 1 : -1], ids[:, first:])[0].cpu())
        found = torch.cat(ranks) if ranks else torch.empty(0)
        if not len(found):
            continue
        report[name] = {f"top{k}": _share(found < k) for k in TOP_K} | {
            "chains": {str(k): [_share(_runs(ranks, k, depth)) for depth in DEPTHS] for k in TOP_K},
            "tokens": len(found),
        }
    return report


def acceptance(draft: MeasuredDraft, answered: dict[str, list[Continuation]], device: str = "cpu") -> float:
    """The share of positions after which all of the next 4, 8 and 16 tokens are among the draft's top 4, in the mean over these
    depths and the sets: what fills a pipeline.
    """
    rows = on_policy_agreement(draft, answered, device).values()
    shares = [share for row in rows for share in row["chains"]["4"][DEPTHS.index(4) :]]
    return sum(shares) / max(len(shares), 1)


def _runs(ranks: list[Tensor], k: int, depth: int) -> Tensor:
    """For each position that ``depth`` tokens follow, whether all of them are among the top k: bool."""
    windows = [(of_answer < k).unfold(0, depth, 1).all(-1) for of_answer in ranks if len(of_answer) >= depth]
    return torch.cat(windows) if windows else torch.zeros(0, dtype=torch.bool)


def _share(hits: Tensor) -> float:
    return round(hits.float().mean().item(), 4) if len(hits) else 0.0


@dataclass(frozen=True)
class HeldOut:
    """Measures a draft, before and after training, on answered prompts by set, and on text if there is any."""

    vocab_size: int  # of the target
    answered: dict[str, list[Continuation]]
    on_text: OnText | None
    device: torch.device

    def measure(self, draft_path: Path) -> dict[str, dict]:
        """Loss and agreement of the draft as it is stored, computed in float32."""
        draft = MeasuredDraft.load(draft_path, self.vocab_size, self.device)
        return {
            "held_out": {} if self.on_text is None else self.on_text(draft),
            "on_policy": on_policy_agreement(draft, self.answered, str(self.device)),
        }


def print_draft(report: dict[str, Any]) -> None:
    """Print how well a draft agrees with its target, before and after."""
    before = report["continuations"][-1]["before"]
    for title, key in (("Held-out text", "held_out"), ("The target's own continuations", "on_policy")):
        print_agreement(f"{title}, before", before[key])
        print_agreement(title, report[key])
    _print_chains("Share of positions whose next tokens are all among the top k, before", before["on_policy"])
    _print_chains("Share of positions whose next tokens are all among the top k", report["on_policy"])


def print_agreement(title: str, rows: dict[str, Row]) -> None:
    """Print losses and agreement by family of text; nothing if there are none."""
    lines = []
    for family, row in rows.items():
        losses = [f"{row[key]:.3f}" if key in row else "" for key in ("target_loss", "draft_loss")]
        lines.append((family, *losses, *top_k_cells(row)))
    if lines:
        print_table(title, ("text", "target loss", "draft loss", "top 1", "top 4", "top 16"), lines)


def _print_chains(title: str, rows: dict[str, Row]) -> None:
    """Print acceptance by rank and depth; nothing if there is none."""
    lines = [
        (family, k, *(f"{share:.1%}" for share in shares))
        for family, row in rows.items()
        for k, shares in row.get("chains", {}).items()
    ]
    if lines:
        print_table(title, ("text", "k", *(f"{depth} tokens" for depth in DEPTHS)), lines)
