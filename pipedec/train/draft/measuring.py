"""How well a draft predicts its target: on held-out text, and on the target's own greedy continuations."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from pipedec.train.continuations import Continuation, Model

TOP_K = (1, 4, 16)


@torch.no_grad()
def text_agreement(target: Model, draft: Model, rows_by_family: dict[str, Tensor], device: str = "cpu") -> dict[str, dict]:
    """Loss of both models on rows of text, and how often the draft's top k holds the target's greedy token, by family."""
    report = {}
    for family, rows in rows_by_family.items():
        if not len(rows):
            continue
        sums = {"target_loss": 0.0, "draft_loss": 0.0, "top1": 0.0, "top4": 0.0, "top16": 0.0}
        for ids in rows.split(8):
            ids = ids.to(device)
            target_logits, draft_logits = (model(input_ids=ids).logits[:, :-1].float() for model in (target, draft))
            next_ids = ids[:, 1:].flatten()
            sums["target_loss"] += nn.functional.cross_entropy(target_logits.flatten(0, 1), next_ids).item() * len(ids)
            sums["draft_loss"] += nn.functional.cross_entropy(draft_logits.flatten(0, 1), next_ids).item() * len(ids)
            is_greedy = draft_logits.topk(max(TOP_K)).indices == target_logits.argmax(-1, keepdim=True)
            for k in TOP_K:
                sums[f"top{k}"] += is_greedy[..., :k].any(-1).float().mean().item() * len(ids)
        report[family] = {name: round(value / len(rows), 4) for name, value in sums.items()} | {"tokens": rows.numel()}
    return report


@torch.no_grad()
def on_policy_agreement(draft: Model, answered: dict[str, list[Continuation]]) -> dict[str, dict]:
    """How often the draft's top k holds the next token of the target's greedy continuation, by set."""
    report: dict[str, dict] = {}
    for name, continuations in answered.items():
        hits = dict.fromkeys(TOP_K, 0)
        num_tokens = 0
        for continuation in continuations:
            ids = torch.tensor([continuation.ids])
            first = continuation.prompt_length
            most_likely_T16 = draft(input_ids=ids).logits[0, first - 1 : -1].topk(max(TOP_K)).indices
            is_next_T16 = most_likely_T16 == ids[0, first:, None]
            num_tokens += len(is_next_T16)
            for k in hits:
                hits[k] += int(is_next_T16[:, :k].any(-1).sum())
        if num_tokens:
            report[name] = {f"top{k}": round(count / num_tokens, 4) for k, count in hits.items()} | {"tokens": num_tokens}
    return report


@dataclass(frozen=True)
class HeldOut:
    """What a draft is measured on, before and after training: rows of text by family, and answered prompts by set."""

    target: Any
    rows: dict[str, Tensor]
    answered: dict[str, list[Continuation]]

    def measure(self, draft_path: Path) -> dict[str, dict]:
        """Loss and agreement of the draft as it is stored, computed in float32."""
        draft = AutoModelForCausalLM.from_pretrained(draft_path, dtype=torch.float32).eval()
        return {
            "held_out": text_agreement(self.target, draft, self.rows),
            "on_policy": on_policy_agreement(draft, self.answered),
        }
