"""Qwen 2 and 3: a LLaMA with biases of queries, keys and values (2), or with norms of each head's queries and keys (3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pipedec.core.errors import BadValue
from pipedec.families.base import Size
from pipedec.families.llama import LlamaConfig, LlamaDecoder
from pipedec.families.parts import Decoder, Heads, RMSNorm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Qwen2Config(LlamaConfig):
    """Attributes:
    use_sliding_window, sliding_window, layer_types, max_window_layers: see ``windows``.
    """

    num_key_value_heads: Size | None = 32
    max_position_embeddings: Size = 32_768
    eos_token_id: int | list[int] | None = None
    use_sliding_window: bool = False
    sliding_window: Size | None = 4096
    max_window_layers: int = 28
    layer_types: list[Literal["full_attention", "sliding_attention"]] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer_types is not None and len(self.layer_types) != self.num_hidden_layers:
            raise BadValue(f"layer_types must name {self.num_hidden_layers} layers, not {len(self.layer_types)}")

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return True, False, False

    @property
    def windows(self) -> tuple[int | None, ...]:
        """If windows are used at all: for the layers that ``layer_types`` marks, or else from ``max_window_layers`` on."""
        layers = range(self.num_hidden_layers)
        if not self.use_sliding_window:
            return (None,) * len(layers)
        if self.layer_types is not None:
            return tuple(self.sliding_window if kind == "sliding_attention" else None for kind in self.layer_types)
        return tuple(self.sliding_window if layer >= self.max_window_layers else None for layer in layers)


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Qwen2Config):
    head_dim: Size | None = 128

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False

    def decoder(self, layer: int) -> Decoder:
        return Qwen3Decoder(self)


class Qwen3Decoder(LlamaDecoder):
    """Queries and keys are normed head by head before they are rotated."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.query_norm = RMSNorm("self_attn.q_norm", config.head_size, config.rms_norm_eps)
        self.key_norm = RMSNorm("self_attn.k_norm", config.head_size, config.rms_norm_eps)

    def attention(self, rows_RE: Tensor, heads: Heads) -> Tensor:
        return self.output(heads.attend(*heads.split(self.qkv(rows_RE)), (self.query_norm, self.key_norm)))
