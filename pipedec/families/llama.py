"""LLaMA, and Mistral, which is a LLaMA with a sliding window: x + attention(norm(x)), then x + mlp(norm(x)).

The norms are root mean square norms, keys and values are shared by groups of query heads, and the MLP is gated (SwiGLU).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta

from pipedec.core.errors import BadValue
from pipedec.families.base import DecoderConfig, Size, rope_type
from pipedec.families.parts import Activation, Decoder, Heads, Linear, RMSNorm
from pipedec.families.shapes import LayerShape, Reach

if TYPE_CHECKING:
    from torch import Tensor

_STRETCHED = ("llama3", "yarn", "longrope")  # rope types with an original context length
_LLAMA3_NUMBERS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """The keys of ``config.json``, with transformers' defaults.

    Attributes:
        num_key_value_heads, head_dim: None for as many as query heads; for the hidden size over the number of query heads.
        rope_parameters, rope_scaling, rope_theta, partial_rotary_factor, original_max_position_embeddings: see ``rope``.
    """

    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Annotated[float, Meta(ge=0)] = 1e-6
    hidden_act: str = "silu"
    attention_bias: bool = False
    mlp_bias: bool = False
    eos_token_id: int | list[int] | None = 2
    rope_parameters: dict[str, Any] | None = None
    rope_scaling: dict[str, Any] | None = None
    rope_theta: float = 10_000.0
    partial_rotary_factor: float | None = None
    original_max_position_embeddings: Size | None = None

    def __post_init__(self) -> None:
        heads, kv_heads = self.num_attention_heads, self.kv_heads
        if self.head_dim is None and self.hidden_size % heads:
            raise BadValue(f"num_attention_heads {heads} must divide hidden_size {self.hidden_size}")
        if heads % kv_heads:
            raise BadValue(f"num_key_value_heads {kv_heads} must divide num_attention_heads {heads}")
        numbers = ("rope_theta", *(_LLAMA3_NUMBERS if self.rope["rope_type"] == "llama3" else ()))
        for name in numbers:
            if not isinstance(value := self.rope.get(name), int | float) or value <= 0:
                raise BadValue(f"rope_parameters.{name} must be a positive number")

    @property
    def kv_heads(self) -> int:
        return self.num_key_value_heads or self.num_attention_heads

    @property
    def head_size(self) -> int:
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        """Whether there are biases of queries, keys and values, of the attention's output, and in the MLP."""
        return self.attention_bias, self.attention_bias, self.mlp_bias

    @property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, the number of positions that a row sees, its own included; None for all."""
        return (None,) * self.num_hidden_layers

    @property
    def layers(self) -> tuple[LayerShape, ...]:
        heads, size = (self.num_attention_heads, self.kv_heads), self.head_size
        return tuple(LayerShape(*heads, size, size, None if window is None else Reach(window)) for window in self.windows)

    @property
    def rope(self) -> dict[str, Any]:
        """Older files keep ``rope_theta`` beside the other parameters, and these in ``rope_scaling``."""
        rope = dict(self.rope_scaling or self.rope_parameters or {})
        rope.setdefault("rope_theta", self.rope_theta)
        rope["rope_type"] = rope_type(rope)
        if self.partial_rotary_factor is not None:
            rope.setdefault("partial_rotary_factor", self.partial_rotary_factor)
        if rope["rope_type"] in _STRETCHED:
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)
            if self.original_max_position_embeddings is not None:
                rope["original_max_position_embeddings"] = self.original_max_position_embeddings
        return rope

    @property
    def final_norm(self) -> RMSNorm:
        return RMSNorm("model.norm", self.hidden_size, self.rms_norm_eps)

    def decoder(self, layer: int) -> Decoder:
        return LlamaDecoder(self)


@dataclass(frozen=True, kw_only=True)
class MistralConfig(LlamaConfig):
    """One window for all layers, and no biases."""

    num_key_value_heads: Size | None = 8
    max_position_embeddings: Size = 131_072
    sliding_window: Size | None = 4096

    @property
    def biases(self) -> tuple[bool, bool, bool]:
        return False, False, False

    @property
    def windows(self) -> tuple[int | None, ...]:
        return (self.sliding_window,) * self.num_hidden_layers


class LlamaDecoder(Decoder):
    def __init__(self, config: LlamaConfig) -> None:
        hidden, inner, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        qkv_bias, output_bias, mlp_bias = config.biases
        queries, keys = config.num_attention_heads * config.head_size, config.kv_heads * config.head_size
        projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.input_norm = RMSNorm("input_layernorm", hidden, eps)
        self.qkv = Linear(projections, hidden, (queries, keys, keys), qkv_bias)
        self.output = Linear(("self_attn.o_proj",), queries, (hidden,), output_bias)
        self.post_norm = RMSNorm("post_attention_layernorm", hidden, eps)
        self.gate_up = Linear(("mlp.gate_proj", "mlp.up_proj"), hidden, (inner, inner), mlp_bias)
        self.activation = Activation(config.hidden_act)
        self.down = Linear(("mlp.down_proj",), inner, (hidden,), mlp_bias)

    def forward(self, rows_RE: Tensor, residual_RE: Tensor | None, heads: Heads) -> tuple[Tensor, Tensor | None]:
        rows_RE, residual_RE = self.input_norm.added(rows_RE, residual_RE)
        rows_RE, residual_RE = self.post_norm.added(self.attention(rows_RE, heads), residual_RE)
        return self.mlp(rows_RE), residual_RE

    def attention(self, rows_RE: Tensor, heads: Heads) -> Tensor:
        return self.output(heads.attend(*heads.split(self.qkv(rows_RE))))

    def mlp(self, rows_RE: Tensor) -> Tensor:
        return self.down(self.activation.gated(self.gate_up(rows_RE)))
