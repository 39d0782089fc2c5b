"""What the masks behind a text say, by transformers: one group at a time, the learned prompt as the oldest keys and values."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pipedec.model import BitaWeights


class NaiveBita:
    """A target in transformers, and a BiTA of all its layers in the same dtype."""

    def __init__(self, model: PreTrainedModel, weights: BitaWeights) -> None:
        self.model = model
        dtype = model.get_input_embeddings().weight.dtype
        self._weights = BitaWeights(weights.prompt.to(dtype), weights.masks.to(dtype))

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], num_masks: int | None = None) -> Tensor:
        """[M, V]: of a group of masks behind the last of ``tokens``; by default of all the masks there are."""
        masks = self._weights.masks[:num_masks]
        cache = self._with_prompt(torch.tensor([list(tokens)]))
        positions = torch.arange(len(tokens), len(tokens) + len(masks))[None]
        bias = self._bias(len(tokens), len(masks))
        output = self.model(
            inputs_embeds=masks[None], position_ids=positions, attention_mask=bias, past_key_values=cache, use_cache=True
        )
        return output.logits[0]

    def _with_prompt(self, token_ids: Tensor) -> DynamicCache:
        of_tokens = self.model(token_ids, past_key_values=DynamicCache(), use_cache=True).past_key_values
        cache = DynamicCache()
        for index, (layer, prompt) in enumerate(zip(of_tokens.layers, self._weights.prompt, strict=True)):
            cache.update(torch.cat((prompt[:1], layer.keys), 2), torch.cat((prompt[1:], layer.values), 2), index)
        return cache

    def _bias(self, num_tokens: int, num_masks: int) -> Tensor:
        """[1, 1, M, Q + T + M]: the prompt for all, then causal, within the sliding window if there is one."""
        positions_M1 = torch.arange(num_tokens, num_tokens + num_masks)[:, None]
        slots = torch.arange(num_tokens + num_masks)
        seen = slots <= positions_M1
        window = getattr(self.model.config, "sliding_window", None)
        if window is not None:
            seen &= slots > positions_M1 - window
        seen = torch.cat((seen.new_ones(num_masks, self._weights.prompt.shape[3]), seen), 1)
        return torch.zeros(seen.shape, dtype=self._weights.masks.dtype).masked_fill_(~seen, -torch.inf)[None, None]
