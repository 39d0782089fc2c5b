"""Self-speculative decoding (Zhang et al. 2023, "Draft & Verify"): the target drafts for itself, without some of its layers.

Owns the draft, which shares the target's weights, and the search for the layers that it skips. Here whole layers are skipped, and
the search is greedy; theirs is Bayesian, over attention and MLP apart.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

SEARCH_TOKENS = 40  # of the target's answer to each prompt of the search
LEAST_AGREEMENT = 0.5  # at which the search ends
MOST_DRAFTED = 8  # tokens in a row that the search counts on
# Questions to search with, none of which is measured.
SEARCH_PROMPTS = ("Explain what an exception is.", "A box has 3 rows of 4 eggs. How many eggs are in 5 boxes?")


def without_layers(target: Any, skipped: Sequence[int]) -> Any:
    """A model with the target's weights, the same tensors, and without these layers."""
    draft = copy.deepcopy(target, {id(tensor): tensor for tensor in (*target.parameters(), *target.buffers())})
    decoder, config = draft.get_decoder(), draft.config.get_text_config()
    kept = [number for number in range(len(decoder.layers)) if number not in skipped]
    decoder.layers = nn.ModuleList(decoder.layers[number] for number in kept)
    for place, layer in enumerate(decoder.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):  # its place in the KV cache
                module.layer_idx = place
    config.num_hidden_layers = len(kept)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[number] for number in kept]
    return draft


@torch.inference_mode()
def search_skipped(target: Any, answers: Sequence[Tensor]) -> tuple[int, ...]:
    """The layers to skip: one more at a time, that without which the draft agrees most with the target on ``answers``; of the
    sets on this path the one by which the cost of a pass of the target is expected to yield most tokens.

    Args:
        answers: token ids of prompts with the target's greedy answers, int64 [1, T] each.
    """
    expected = [target(input_ids=ids, use_cache=False).logits.argmax(-1) for ids in answers]

    def agreement(skipped: tuple[int, ...]) -> float:
        draft = without_layers(target, skipped)
        found = [draft(input_ids=ids, use_cache=False).logits.argmax(-1) for ids in answers]
        return float(torch.cat([one == best for one, best in zip(found, expected, strict=True)], 1).float().mean())

    layers = range(len(target.get_decoder().layers))
    path: list[tuple[float, tuple[int, ...]]] = []
    skipped: tuple[int, ...] = ()
    for count in layers[1:]:
        rate, skipped = max((agreement((*skipped, layer)), (*skipped, layer)) for layer in layers if layer not in skipped)
        path.append((expected_gain(rate, 1 - count / len(layers)), skipped))
        if rate < LEAST_AGREEMENT:
            break
    return tuple(sorted(max(path)[1]))


def expected_gain(agreement: float, cost: float) -> float:
    """Tokens for the cost of one pass of the target, by the best number of drafted tokens (Leviathan et al. 2023, Theorem 3.8).

    ``cost`` is that of the draft's pass as a share of the target's.
    """
    return max(
        sum(agreement**place for place in range(drafted + 1)) / (drafted * cost + 1) for drafted in range(1, MOST_DRAFTED + 1)
    )
