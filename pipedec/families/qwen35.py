"""The shape of Qwen 3.5 and 3.6, for plans: recurrent layers with a gated delta rule, and gated attention in every fourth.

Checkpoints of the family are read through transformers' modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipedec.families.base import ModelConfig, Size
from pipedec.families.shapes import Layer, LayerShape, RecurrentShape, Shape


@dataclass(frozen=True, kw_only=True)
class Qwen35Shape(ModelConfig):
    """The sizes in ``config.json``.

    Attributes:
        full_attention_interval: the last of so many layers attends, the others are recurrent.
    """

    intermediate_size: Size
    num_attention_heads: Size
    num_key_value_heads: Size = 4
    head_dim: Size = 256
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_conv_kernel_dim: Size = 4
    full_attention_interval: Size = 4
    max_position_embeddings: Size = 262_144

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(self.attention if self._attends(layer) else self.recurrence for layer in range(self.num_hidden_layers))

    @property
    def attention(self) -> LayerShape:
        return LayerShape(self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.head_dim)

    @property
    def recurrence(self) -> RecurrentShape:
        key_heads, heads = self.linear_num_key_heads, self.linear_num_value_heads
        key_dim, value_dim = self.linear_key_head_dim, self.linear_value_head_dim
        channels = 2 * key_heads * key_dim + heads * value_dim
        return RecurrentShape(heads, key_heads, key_dim, value_dim, 1, channels, self.linear_conv_kernel_dim)

    @property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        return ({"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},)

    def layer_tensors(self, layer: int) -> dict[str, Shape]:
        size, inner = self.hidden_size, self.intermediate_size
        tensors: dict[str, Shape] = {
            **(self._attention_tensors() if self._attends(layer) else self._recurrence_tensors()),
            "mlp.gate_proj.weight": (inner, size),
            "mlp.up_proj.weight": (inner, size),
            "mlp.down_proj.weight": (size, inner),
            "input_layernorm.weight": (size,),
            "post_attention_layernorm.weight": (size,),
        }
        return {f"model.layers.{layer}.{name}": shape for name, shape in tensors.items()}

    def norm_tensors(self) -> dict[str, Shape]:
        return {"model.norm.weight": (self.hidden_size,)}

    def _attends(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    def _attention_tensors(self) -> dict[str, Shape]:
        """Queries come with as many gates."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (2 * queries, self.hidden_size),
            "self_attn.k_proj.weight": (keys, self.hidden_size),
            "self_attn.v_proj.weight": (keys, self.hidden_size),
            "self_attn.o_proj.weight": (self.hidden_size, queries),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
        }

    def _recurrence_tensors(self) -> dict[str, Shape]:
        shape = self.recurrence
        values = shape.num_heads * shape.value_dim
        return {
            "linear_attn.in_proj_qkv.weight": (shape.channels, self.hidden_size),
            "linear_attn.in_proj_z.weight": (values, self.hidden_size),
            "linear_attn.in_proj_b.weight": (shape.num_heads, self.hidden_size),
            "linear_attn.in_proj_a.weight": (shape.num_heads, self.hidden_size),
            "linear_attn.out_proj.weight": (self.hidden_size, values),
            "linear_attn.norm.weight": (shape.value_dim,),
            "linear_attn.conv1d.weight": (shape.channels, 1, shape.kernel),
            "linear_attn.A_log": (shape.num_heads,),
            "linear_attn.dt_bias": (shape.num_heads,),
        }
