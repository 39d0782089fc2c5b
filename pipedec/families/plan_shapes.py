"""Shapes of models for plans: Qwen 3 as a mixture of experts, Qwen 3.5 and 3.6 with recurrent layers, gpt-oss.

Names of tensors are those of checkpoints, which are read through transformers' modules.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pipedec.families.base import ModelConfig, Size
from pipedec.families.shapes import ExpertsShape, Layer, LayerShape, Reach, RecurrentShape, Shape


@dataclass(frozen=True, kw_only=True)
class PlanShape(ModelConfig):
    """Layers that end with a gated MLP, or with routed experts of which each is one.

    Attributes:
        intermediate_size: of the MLP, or of each expert.
        num_experts, num_experts_per_tok: of a layer, and of a row; 0 for an MLP.
        shared_expert_intermediate_size: of an expert of every row, with a gate of its own; 0 for none.
    """

    intermediate_size: Size
    num_experts: int = 0
    num_experts_per_tok: int = 0
    shared_expert_intermediate_size: int = 0
    num_attention_heads: Size
    num_key_value_heads: Size = 4
    head_dim: Size = 128
    max_position_embeddings: Size = 262_144

    @property
    def layers(self) -> tuple[Layer, ...]:
        return (self.attention,) * self.num_hidden_layers

    @property
    def attention(self) -> LayerShape:
        return LayerShape(self.num_attention_heads, self.num_key_value_heads, self.head_dim, self.head_dim)

    @property
    def experts(self) -> tuple[ExpertsShape | None, ...]:
        shape = ExpertsShape(self.num_experts, self.num_experts_per_tok) if self.num_experts else None
        return (shape,) * self.num_hidden_layers

    @property
    def routers(self) -> Collection[str]:
        shared = {name for layer in range(self.num_hidden_layers) for name in self._named(layer, self._shared_tensors())}
        return {name for name in shared if name.endswith(("mlp.gate.weight", "mlp.router.weight"))}

    def layer_tensors(self, layer: int) -> dict[str, Shape]:
        norms = {f"{name}_layernorm.weight": (self.hidden_size,) for name in ("input", "post_attention")}
        return self._named(layer, self._mixer_tensors(layer) | self._shared_tensors() | norms) | self.expert_tensors(layer)

    def expert_tensors(self, layer: int) -> dict[str, Shape]:
        return self._named(layer, self._routed_tensors())

    def norm_tensors(self) -> dict[str, Shape]:
        return {"model.norm.weight": (self.hidden_size,)}

    @abstractmethod
    def _mixer_tensors(self, layer: int) -> dict[str, Shape]:
        """The tensors of a layer's attention, or of its recurrence."""

    def _shared_tensors(self) -> dict[str, Shape]:
        """The tensors of what every row computes with after attention."""
        if not self.num_experts:
            return self._mlp_tensors("mlp", self.intermediate_size)
        tensors: dict[str, Shape] = {"mlp.gate.weight": (self.num_experts, self.hidden_size)}
        if inner := self.shared_expert_intermediate_size:
            tensors |= self._mlp_tensors("mlp.shared_expert", inner) | {"mlp.shared_expert_gate.weight": (1, self.hidden_size)}
        return tensors

    def _routed_tensors(self) -> dict[str, Shape]:
        """The tensors of a layer's routed experts: three for each."""
        tensors: dict[str, Shape] = {}
        for expert in range(self.num_experts):
            tensors |= self._mlp_tensors(f"mlp.experts.{expert}", self.intermediate_size)
        return tensors

    def _mlp_tensors(self, name: str, inner: int) -> dict[str, Shape]:
        size = self.hidden_size
        return {
            f"{name}.gate_proj.weight": (inner, size),
            f"{name}.up_proj.weight": (inner, size),
            f"{name}.down_proj.weight": (size, inner),
        }

    def _projections(self, gates: int = 0) -> dict[str, Shape]:
        """The matrices of attention, whose queries may come with gates."""
        queries, keys = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return {
            "self_attn.q_proj.weight": (queries + gates, self.hidden_size),
            "self_attn.k_proj.weight": (keys, self.hidden_size),
            "self_attn.v_proj.weight": (keys, self.hidden_size),
            "self_attn.o_proj.weight": (self.hidden_size, queries),
        }

    def _named(self, layer: int, tensors: Mapping[str, Shape]) -> dict[str, Shape]:
        return {f"model.layers.{layer}.{name}": shape for name, shape in tensors.items()}


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeShape(PlanShape):
    """Qwen 3 with routed experts: queries and keys are normed."""

    @property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        return ({"rope_type": "default", "rope_theta": 1_000_000.0},)

    def _mixer_tensors(self, layer: int) -> dict[str, Shape]:
        del layer
        return self._projections() | {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}


@dataclass(frozen=True, kw_only=True)
class Qwen35Shape(PlanShape):
    """Qwen 3.5 and 3.6: recurrent layers with a gated delta rule, and gated attention in every fourth.

    Attributes:
        full_attention_interval: the last of so many layers attends, the others are recurrent.
    """

    head_dim: Size = 256
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_conv_kernel_dim: Size = 4
    full_attention_interval: Size = 4

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(self.attention if self._attends(layer) else self.recurrence for layer in range(self.num_hidden_layers))

    @property
    def recurrence(self) -> RecurrentShape:
        key_heads, heads = self.linear_num_key_heads, self.linear_num_value_heads
        key_dim, value_dim = self.linear_key_head_dim, self.linear_value_head_dim
        channels = 2 * key_heads * key_dim + heads * value_dim
        return RecurrentShape(heads, key_heads, key_dim, value_dim, 1, channels, self.linear_conv_kernel_dim)

    @property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        return ({"rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25},)

    def _attends(self, layer: int) -> bool:
        return (layer + 1) % self.full_attention_interval == 0

    def _mixer_tensors(self, layer: int) -> dict[str, Shape]:
        """Attention has as many gates as queries."""
        if not self._attends(layer):
            return self._recurrence_tensors()
        norms = {f"self_attn.{name}_norm.weight": (self.head_dim,) for name in "qk"}
        return self._projections(gates=self.num_attention_heads * self.head_dim) | norms

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


@dataclass(frozen=True, kw_only=True)
class GptOssShape(PlanShape):
    """gpt-oss: biases everywhere, a sink for each head, and a window in every second layer, from the first on.

    Attributes:
        sliding_window: tokens that a row sees there, with its own.
    """

    num_key_value_heads: Size = 8
    head_dim: Size = 64
    sliding_window: Size = 128
    max_position_embeddings: Size = 131_072

    @property
    def layers(self) -> tuple[Layer, ...]:
        kinds = replace(self.attention, reach=Reach(self.sliding_window)), self.attention
        return tuple(kinds[layer % 2] for layer in range(self.num_hidden_layers))

    @property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        return ({"rope_type": "yarn", "rope_theta": 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096},)

    def _mixer_tensors(self, layer: int) -> dict[str, Shape]:
        del layer
        matrices = self._projections()
        biases = {name.replace(".weight", ".bias"): shape[:1] for name, shape in matrices.items()}
        return matrices | biases | {"self_attn.sinks": (self.num_attention_heads,)}

    def _shared_tensors(self) -> dict[str, Shape]:
        return {"mlp.router.weight": (self.num_experts, self.hidden_size), "mlp.router.bias": (self.num_experts,)}

    def _routed_tensors(self) -> dict[str, Shape]:
        """The experts of a layer together."""
        experts, size, inner = self.num_experts, self.hidden_size, self.intermediate_size
        return {
            "mlp.experts.gate_up_proj": (experts, 2 * inner, size),
            "mlp.experts.gate_up_proj_bias": (experts, 2 * inner),
            "mlp.experts.down_proj": (experts, size, inner),
            "mlp.experts.down_proj_bias": (experts, size),
        }
