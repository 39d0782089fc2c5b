"""BiTA's parameters beside a frozen target, and the two forward passes that train and measure them.

Knows transformers' models and caches; knows nothing of data, steps or files. Shapes: L layers, K key-value heads, Q prompt
tokens, D head size, M masks, E hidden size, V vocabulary; B, T and R as in ``MaskRows``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from pipedec.model.bita import BitaWeights
from pipedec.train.bita.mask_rows import MaskRows

Past = list[tuple[Tensor, Tensor]]  # keys and values of every layer, [B, K, T, D] each


class Learned(nn.Module):
    """Mask embeddings and a prompt, in float32.

    The prompt is keys and values of every layer (``deep``), or input embeddings from which the layers compute them (``shallow``).
    Initial values are normal noise of standard deviation ``start_std``.
    """

    def __init__(self, target: Any, num_masks: int, num_prompt_tokens: int, prompting: str, start_std: float, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        hidden = target.config.hidden_size
        self.is_deep = prompting != "shallow"
        shape = prompt_shape(target, num_prompt_tokens) if self.is_deep else (num_prompt_tokens, hidden)
        self.masks = nn.Parameter(torch.randn(num_masks, hidden, generator=generator) * start_std)
        self.prompt = nn.Parameter(torch.randn(shape, generator=generator) * start_std)

    def prompt_of(self, target: Any) -> Tensor:
        """[L, 2, K, Q, D], with gradients."""
        return self.prompt if self.is_deep else folded(target, self.prompt)

    @torch.no_grad()
    def rounded(self, target: Any) -> BitaWeights:
        """The weights as they are stored: in the format of decoding, in bfloat16."""
        return BitaWeights(self.prompt_of(target).to(torch.bfloat16), self.masks.detach().to(torch.bfloat16))


def prompt_shape(target: Any, num_prompt_tokens: int) -> tuple[int, ...]:
    """[L, 2, K, Q, D] of this target."""
    config = target.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_hidden_layers, 2, config.num_key_value_heads, num_prompt_tokens, head_dim


def folded(target: Any, embeddings_QE: Tensor) -> Tensor:
    """Keys and values that the layers compute from prompt embeddings, with causal attention, all at position 0.

    The rotary embedding is the identity at position 0, so these keys are like those of a ``deep`` prompt.
    """
    num_tokens = len(embeddings_QE)
    if not num_tokens:
        return embeddings_QE.new_zeros(prompt_shape(target, 0))
    cache = DynamicCache()
    visible = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=embeddings_QE.device).tril()
    _decoder(target)(
        inputs_embeds=embeddings_QE[None].to(target.dtype),
        position_ids=torch.zeros(1, num_tokens, dtype=torch.int64, device=embeddings_QE.device),
        attention_mask=visible[None, None],
        past_key_values=cache,
        use_cache=True,
    )
    return torch.stack([torch.stack((layer.keys[0], layer.values[0])) for layer in cache.layers])


@torch.no_grad()
def token_pass(target: Any, tokens_BT: Tensor) -> Past:
    """Keys and values of the ordinary rows. They attend to neither masks nor prompt, so training does not change them."""
    cache = DynamicCache()
    _decoder(target)(input_ids=tokens_BT, past_key_values=cache, use_cache=True)
    return [(layer.keys, layer.values) for layer in cache.layers]


def mask_pass(target: Any, prompt: Tensor, masks_ME: Tensor, rows: MaskRows, past: Past) -> Tensor:
    """Logits of the rows with a label, in order: [labelled, V]. Gradients flow into ``prompt`` and ``masks_ME``."""
    batch = len(rows.tokens)
    learned = prompt.to(target.dtype)[:, :, None].expand(-1, -1, batch, -1, -1, -1)
    layers = [
        (torch.cat((mine[0], keys), 2), torch.cat((mine[1], values), 2))
        for mine, (keys, values) in zip(learned, past, strict=True)
    ]
    hidden = _decoder(target)(
        inputs_embeds=masks_ME.to(target.dtype)[rows.masks],
        position_ids=rows.positions,
        attention_mask=rows.visible[:, None],
        past_key_values=DynamicCache(layers),
        use_cache=True,
    ).last_hidden_state
    logits: Tensor = target.get_output_embeddings()(hidden[rows.labelled]).float()
    return logits


def _decoder(target: Any) -> Any:
    """The model without its head."""
    return target.get_decoder()
