"""OLMo 2: x + norm(attention(x)), then x + norm(mlp(x)), with norms over all queries and over all keys of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipedec.families.llama import LlamaConfig, LlamaDecoder
from pipedec.families.parts import Decoder, Heads, RMSNorm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Olmo2Config(LlamaConfig):
    rms_norm_eps: float = 1e-5
    eos_token_id: int | list[int] | None = 50279

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return self.attention_bias, self.attention_bias, False

    def decoder(self, layer: int) -> Decoder:
        return Olmo2Decoder(self)


class Olmo2Decoder(LlamaDecoder):
    def __init__(self, config: Olmo2Config) -> None:
        super().__init__(config)
        eps, (queries, keys, _) = config.rms_norm_eps, self.qkv.outputs
        del self.input_norm
        self.post_attention_norm = self.post_norm
        self.query_norm = RMSNorm("self_attn.q_norm", queries, eps)
        self.key_norm = RMSNorm("self_attn.k_norm", keys, eps)
        self.post_norm = RMSNorm("post_feedforward_layernorm", config.hidden_size, eps)

    def forward(self, rows_RE: Tensor, residual_RE: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor | None]:
        hidden_RE = self.post_attention_norm.added_to(rows_RE, self.attention(rows_RE, heads))
        return self.post_norm.added_to(hidden_RE, self.mlp(hidden_RE)), None

    def attention(self, rows_RE: Tensor, heads: Heads) -> Tensor:
        qkv_RX, (queries, keys, _) = self.qkv(rows_RE), self.qkv.outputs
        self.query_norm.replace(qkv_RX[:, :queries])
        self.key_norm.replace(qkv_RX[:, queries : queries + keys])
        return self.output(heads.attend(*heads.split(qkv_RX)))
