"""The architectures of GGUF files: a table of how each differs from the others.

An entry has what llama.cpp keeps in its code, not in the file, and what its converter does to tensors, which ``index`` undoes.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pipedec.core.errors import UserError
from pipedec.gguf.orders import BlockOrder, by_part, interleaved

FREQUENCIES, LONG, SHORT = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"  # no tensors of a model
_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_ATTENTION = (*_QKV, "self_attn.o_proj")
_QK_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
_MLP = ("mlp.up_proj", "mlp.down_proj")
_GATED = ("mlp.gate_proj", *_MLP)
_FUSED = ("mlp.gate_up_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_POST_NORMS = ("post_attention_layernorm", "post_feedforward_layernorm")
_OUT, _QKVZ = "linear_attn.out_proj", "linear_attn.in_proj_qkvz"
_SPLIT_QKVZ = ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z")
_LINEAR = (*_SPLIT_QKVZ, "linear_attn.conv1d", "linear_attn.norm", _OUT)
DECAY = "linear_attn.A_log"
_PARTS = ("gate_proj", "up_proj", "down_proj")
_MIXED = ("mlp.gate", *(f"mlp.experts.{part}" for part in _PARTS))
_SHARED_EXPERT = (*(f"mlp.shared_expert.{part}" for part in _PARTS), "mlp.shared_expert_gate")
_STACKED = {
    f"mlp.experts.{part}{ending}": f"ffn_{part.removesuffix('_proj')}_exps.{kind}"
    for part in _PARTS
    for ending, kind in (("", "weight"), ("_bias", "bias"))
}
_IN_TURN = {
    f"mlp.experts.gate_up_proj{end}": (f"mlp.experts.gate_proj{end}", f"mlp.experts.up_proj{end}") for end in ("", "_bias")
}
_USED = {"num_experts_per_tok": "expert_used_count"}
_LOCAL_EXPERTS = {"num_local_experts": "expert_count"} | _USED
_SMALL_EXPERTS = _USED | {"moe_intermediate_size": "expert_feed_forward_length"}
_QWEN_EXPERTS = {"num_experts": "expert_count"} | _SMALL_EXPERTS
_BESIDE_SHARED = _QWEN_EXPERTS | {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
_SOFTMAX, _SIGMOID, _SOFTMAX_OF_CHOSEN = 1, 2, 3
_BIASES = {"attention_bias": "attn_output.bias", "mlp_bias": "ffn_down.bias"}
_QKV_BIASES = {"attention_bias": "attn_q.bias"}


@dataclass(frozen=True)
class Windows:
    """Layers that attend to a window.

    Attributes:
        period: every so many-th layer attends to all positions; None if all layers have the same window.
        usual: the window, if the file has none.
    """

    period: int | None = None
    usual: int | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """One architecture of GGUF, as a model of transformers.

    Attributes:
        modules: of a layer, by their names below it.
        base, embedding, norm, head: names of the model without head, of its parts, and of the head in a checkpoint.
        epsilon: the key of ``config.json`` for that of norms; None if it has none.
        fields, optional: by key of ``config.json``, a field of the file.
        flags: by key of ``config.json``, the tensor of the first layer that the file has if the key is true.
        constants: of ``config.json``.
        gating: the number that llama.cpp has for the function of routers; None for dense models.
        yarn: what the scaling of that name has besides.
        windows: None if all layers attend to all positions.
        partial: whether rotary embeddings may turn only a part of a head.
        local: whether layers with windows have their own rotary embedding, without scaling.
        local_theta: its base, if the file has none; None if it is that of the other layers.
        rope_fields: as ``fields``, of ``rope_parameters``.
        more: the keys of ``config.json`` that need computing.
        interleaved: whether the two halves of each head of queries and keys are interleaved in the file, row by row.
        fused: the module with the rows of queries, keys and values, which are in turn for each head in the checkpoint.
        added: to all values of norms in the file, except that of linear attention.
        tiled: whether the file has the value heads of linear attention by their number within a group, not group by group.
        joined: by tensor of a layer, those that files have instead, as they are called below the layer: queries, keys and values
            of all groups of linear attention, and gates; the rows of experts that are gates in a checkpoint, and those between
            them.
        parameters: by parameter of a layer, its name in the file, for those that are not a module's weight or bias.
        squeezed: by module, the dimension of length 1 that its weight has in a checkpoint and may lack in the file.
        sections: whether rotary embeddings have sections, which differ only for images.
        predicts: whether files may have further layers that predict more tokens, which are left out.
        values: by tensor of a layer, the field with a number for each layer, and the tensor's shape.
        with_field: the architecture of files with this field.
    """

    model_type: str
    class_name: str
    modules: tuple[str, ...]
    base: str = "model"
    embedding: str = "embed_tokens"
    norm: str = "norm"
    head: str = "lm_head"
    epsilon: str | None = "rms_norm_eps"
    fields: Mapping[str, str] = field(default_factory=dict)
    optional: Mapping[str, str] = field(default_factory=dict)
    flags: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    gating: int | None = None
    yarn: Mapping[str, Any] = field(default_factory=dict)
    windows: Windows | None = None
    partial: bool = False
    local: bool = False
    local_theta: float | None = None
    rope_fields: Mapping[str, str] = field(default_factory=dict)
    more: Callable[[File], dict[str, Any]] | None = None
    interleaved: bool = False
    fused: str | None = None
    added: float = 0.0
    tiled: bool = False
    joined: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    squeezed: Mapping[str, int] = field(default_factory=dict)
    sections: bool = False
    predicts: bool = False
    values: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    with_field: Mapping[str, Architecture] = field(default_factory=dict)

    @property
    def known_fields(self) -> set[str]:
        """The fields that change what a model computes and that it has a use for."""
        more = {
            "attention.sliding_window": self.windows is not None,
            "rope.dimension_sections": self.sections,
            "nextn_predict_layers": self.predicts,
        }
        own = {*self.fields.values(), *self.optional.values(), *self.rope_fields.values()}
        return own | {name for name, is_known in more.items() if is_known}

    def row_order(self, module: str, config: Mapping[str, Any]) -> BlockOrder | None:
        """The order of the rows of a module of a layer; None if it is the checkpoint's."""
        if module == self.fused:
            return by_part(config["num_attention_heads"], (config["head_dim"],) * 3)
        if self.interleaved and module in _QKV[:2]:
            return interleaved(config["head_dim"])
        return self._value_heads(module, config) if module != _OUT else None

    def column_order(self, module: str, config: Mapping[str, Any]) -> BlockOrder | None:
        """As ``row_order``."""
        return self._value_heads(module, config) if module == _OUT else None

    def _value_heads(self, module: str, config: Mapping[str, Any]) -> BlockOrder | None:
        """The order of value heads where they are tiled."""
        if not self.tiled or not module.startswith("linear_attn.") or module == "linear_attn.norm":
            return None
        groups, heads, key_dim, value_dim = _linear_heads(config)
        if groups == heads:
            return None
        has_dim = module in _LINEAR
        keys = 2 * groups * key_dim if module in ("linear_attn.in_proj_qkv", "linear_attn.conv1d") else 0
        return by_part(groups, (value_dim if has_dim else 1,) * (heads // groups), keys)

    def joined_order(self, joined: str, config: Mapping[str, Any]) -> tuple[BlockOrder | None, tuple[int, int]]:
        """The order of the rows of the first of two tensors, and how many of each are in turn where they are joined."""
        if ".experts." in joined:
            return None, (1, 1)
        groups, heads, key_dim, value_dim = _linear_heads(config)
        values = heads // groups * value_dim
        return by_part(groups, (key_dim, key_dim, values)), (2 * key_dim + values, values)

    def added_to(self, module: str) -> float:
        """The number to add to the values of a module."""
        return self.added if module.endswith("norm") and module != "linear_attn.norm" else 0.0

    def shape(self, module: str, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in the checkpoint of a module's weight in the file."""
        place = self.squeezed.get(module)
        return stored if place is None or stored[place] == 1 else (*stored[:place], 1, *stored[place:])


def _linear_heads(config: Mapping[str, Any]) -> tuple[int, int, int, int]:
    """Groups and value heads of linear attention, and the dimensions of keys and values."""
    names = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")
    groups, heads, key_dim, value_dim = (int(config[f"linear_{name}"]) for name in names)
    return groups, heads, key_dim, value_dim


@dataclass(frozen=True)
class File:
    """A GGUF file without its weights.

    Attributes:
        metadata: all fields.
        shapes: of all tensors, as in a checkpoint.
        factors: the values of ``FREQUENCIES``, ``LONG`` and ``SHORT``, if it has them.
    """

    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    factors: Mapping[str, Sequence[float]]

    @property
    def name(self) -> str:
        return str(self.metadata["general.architecture"])

    def value(self, name: str) -> Any:
        """The value of a field of the architecture, or None."""
        return self.metadata.get(f"{self.name}.{name}")

    def number(self, name: str, default: float | None = None) -> Any:
        """The value of a field that is one number. UserError if it is something else, or missing without a default."""
        value = self.value(name)
        value = default if value is None else value
        if value is None:
            raise UserError(f"it has no field {self.name}.{name}; convert the model again")
        if not isinstance(value, int | float):
            raise UserError(f"its {self.name}.{name} is not one number for all layers, which is not supported")
        return shortest(value) if isinstance(value, float) else value

    @property
    def num_layers(self) -> int:
        """Layers without those that predict more tokens. UserError if there are no others."""
        layers = int(self.number("block_count") - self.number("nextn_predict_layers", 0))
        if layers < 1:
            raise UserError(f"it has no layers before the {self.name}.nextn_predict_layers; convert the whole model")
        return layers

    @property
    def head_dim(self) -> int:
        return int(self.number("attention.key_length", self.number("embedding_length") // self.number("attention.head_count")))

    def kinds(self, name: str, period: int, kind: str) -> list[str]:
        """The kind of each layer: ``kind``, but every so many-th attends to all positions.

        ``name``: a field with a period in place of ``period``, or with whether each layer is of this kind. UserError if it has
        another number of values than there are layers.
        """
        pattern, layers = self.value(name), self.number("block_count")
        if not isinstance(pattern, list):
            pattern = [(layer + 1) % (pattern or period) != 0 for layer in range(layers)]
        if len(pattern) != layers:
            raise UserError(f"its {self.name}.{name} has {len(pattern)} values for {layers} layers")
        return [kind if is_of_kind else "full_attention" for is_of_kind in pattern[: self.num_layers]]


def shortest(value: float) -> float:
    """The number with the fewest digits that is this one in float32, in which files keep it."""
    exact = struct.pack("f", value)
    return next((short for digits in range(1, 10) if struct.pack("f", short := float(f"{value:.{digits}g}")) == exact), value)


def _gemma_scale(file: File, layers: int) -> dict[str, Any]:
    """Models of 27 billion parameters, which have so many layers, scale queries otherwise than the others."""
    is_largest = file.number("block_count") == layers
    size = file.number("embedding_length") // file.number("attention.head_count") if is_largest else file.head_dim
    return {"query_pre_attn_scalar": size}


def _phi3_window(file: File) -> dict[str, Any]:
    """Older files of models with 4096 positions do not have it."""
    usual = 2047 if file.number("context_length") == 4096 else 0
    return {"sliding_window": file.number("attention.sliding_window", usual) or None}


def latents(file: File) -> dict[str, Any]:
    rotated = file.number("rope.dimension_count")
    _, columns = file.shapes.get("blk.0.attn_output.weight", (0, 0))
    return {
        "head_dim": rotated,
        "qk_rope_head_dim": rotated,
        "qk_nope_head_dim": file.head_dim - rotated,
        "v_head_dim": columns // file.number("attention.head_count"),
    }


def _linear(file: File) -> dict[str, Any]:
    heads = file.number("ssm.time_step_rank")
    interval = file.number("full_attention_interval", 4)
    return {
        "linear_value_head_dim": file.number("ssm.inner_size") // heads,
        "layer_types": file.kinds("attention.recurrent_layers", interval, "linear_attention"),
    }


_MIXTRAL = Architecture(
    model_type="mixtral", class_name="MixtralForCausalLM", interleaved=True, gating=_SOFTMAX,
    modules=(*_ATTENTION, *_NORMS, *(f"block_sparse_moe.{part}" for part in ("gate", "experts.w1", "experts.w2", "experts.w3"))),
    fields=_LOCAL_EXPERTS,
)  # fmt: skip
_LLAMA = Architecture(
    model_type="llama", class_name="LlamaForCausalLM", modules=(*_ATTENTION, *_GATED, *_NORMS), flags=_BIASES, interleaved=True,
    with_field={"expert_count": _MIXTRAL},
)  # fmt: skip
_OLMO3 = Architecture(
    model_type="olmo3", class_name="Olmo3ForCausalLM", modules=(*_ATTENTION, *_QK_NORMS, *_GATED, *_POST_NORMS),
    flags=_BIASES, windows=Windows(period=4), local=True,
)  # fmt: skip
_LINEAR_FIELDS = {
    "linear_conv_kernel_dim": "ssm.conv_kernel", "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count", "linear_num_value_heads": "ssm.time_step_rank",
}  # fmt: skip
_HYBRID = Architecture(
    model_type="qwen3_5_text", class_name="Qwen3_5ForCausalLM", fields=_LINEAR_FIELDS, more=_linear, added=-1.0, partial=True,
    modules=(*_ATTENTION, *_QK_NORMS, *_GATED, *_NORMS, *_LINEAR, "linear_attn.in_proj_a", "linear_attn.in_proj_b"),
    parameters={DECAY: "ssm_a", "linear_attn.dt_bias": "ssm_dt.bias"}, tiled=True, sections=True, predicts=True,
    squeezed={"linear_attn.conv1d": 1, "mlp.shared_expert_gate": 0},
)  # fmt: skip
_FUSED_EXPERTS = {"mlp.experts.gate_up_proj": "ffn_gate_up_exps.weight"}
_GELU = {"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"}
_GEMMA_NORMS = (*_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}

ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,  # Mistral, too
    "qwen2": Architecture(model_type="qwen2", class_name="Qwen2ForCausalLM", modules=_LLAMA.modules),
    "qwen3": Architecture(
        model_type="qwen3", class_name="Qwen3ForCausalLM", modules=(*_LLAMA.modules, *_QK_NORMS), flags=_BIASES
    ),
    "qwen2moe": Architecture(
        model_type="qwen2_moe", class_name="Qwen2MoeForCausalLM", modules=(*_ATTENTION, *_NORMS, *_MIXED, *_SHARED_EXPERT),
        fields=_BESIDE_SHARED, flags={"qkv_bias": "attn_q.bias"}, constants={"norm_topk_prob": False},
        gating=_SOFTMAX, squeezed={"mlp.shared_expert_gate": 0},
    ),
    "qwen3moe": Architecture(
        model_type="qwen3_moe", class_name="Qwen3MoeForCausalLM", modules=(*_ATTENTION, *_QK_NORMS, *_NORMS, *_MIXED),
        fields=_QWEN_EXPERTS, flags=_QKV_BIASES, constants={"norm_topk_prob": True}, gating=_SOFTMAX,
    ),
    "gpt-oss": Architecture(
        model_type="gpt_oss", class_name="GptOssForCausalLM", modules=(*_ATTENTION, *_NORMS, "mlp.router"), flags=_QKV_BIASES,
        fields=_LOCAL_EXPERTS | {"intermediate_size": "expert_feed_forward_length"},
        gating=_SOFTMAX_OF_CHOSEN, windows=Windows(period=2), yarn={"truncate": False}, joined=_IN_TURN,
        parameters={"self_attn.sinks": "attn_sinks.weight", **_STACKED},
    ),
    "glm4moe": Architecture(
        model_type="glm4_moe", class_name="Glm4MoeForCausalLM", partial=True, predicts=True, gating=_SIGMOID,
        modules=(
            *_ATTENTION, *_QK_NORMS, *_NORMS, *_GATED, *_MIXED, *(f"mlp.shared_experts.{part}" for part in _PARTS),
        ),
        fields=_SMALL_EXPERTS | {
            "n_routed_experts": "expert_count", "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
        },
        optional={"n_group": "expert_group_count", "topk_group": "expert_group_used_count"},
        flags=_QKV_BIASES | {"use_qk_norm": "attn_q_norm.weight"},
        parameters={"mlp.gate.e_score_correction_bias": "exp_probs_b.bias"},
    ),
    "qwen35": _HYBRID,
    "qwen35moe": replace(
        _HYBRID, model_type="qwen3_5_moe_text", class_name="Qwen3_5MoeForCausalLM", gating=_SOFTMAX,
        modules=(*(module for module in _HYBRID.modules if module not in _GATED), *_MIXED, *_SHARED_EXPERT),
        fields=_LINEAR_FIELDS | _BESIDE_SHARED, parameters={**_HYBRID.parameters, **_FUSED_EXPERTS},
    ),
    "qwen3next": replace(
        _HYBRID, model_type="qwen3_next", class_name="Qwen3NextForCausalLM", tiled=False, sections=False, gating=_SOFTMAX,
        modules=(
            *_ATTENTION, *_QK_NORMS, *_NORMS, *_LINEAR, _QKVZ, "linear_attn.in_proj_ba", *_MIXED, *_SHARED_EXPERT,
        ),
        fields=_LINEAR_FIELDS | _BESIDE_SHARED, parameters={**_HYBRID.parameters, **_FUSED_EXPERTS},
        joined={f"{_QKVZ}.weight": (f"{_SPLIT_QKVZ[0]}.weight", f"{_SPLIT_QKVZ[1]}.weight")},
    ),
    "gemma": Architecture(
        model_type="gemma", class_name="GemmaForCausalLM", modules=_LLAMA.modules, flags=_BIASES, constants=_GELU, added=-1.0
    ),
    "gemma2": Architecture(
        model_type="gemma2", class_name="Gemma2ForCausalLM", modules=(*_ATTENTION, *_GATED, *_GEMMA_NORMS), flags=_BIASES,
        optional=_SOFTCAPS, windows=Windows(period=2, usual=4096), more=partial(_gemma_scale, layers=46), constants=_GELU,
        added=-1.0,
    ),
    "gemma3": Architecture(
        model_type="gemma3_text", class_name="Gemma3ForCausalLM", modules=(*_ATTENTION, *_QK_NORMS, *_GATED, *_GEMMA_NORMS),
        flags=_BIASES, optional={"final_logit_softcapping": "final_logit_softcapping"}, windows=Windows(period=6), local=True,
        local_theta=10_000.0, more=partial(_gemma_scale, layers=62), constants=_GELU, added=-1.0,
    ),
    "phi2": Architecture(
        model_type="phi", class_name="PhiForCausalLM", norm="final_layernorm", epsilon="layer_norm_eps", partial=True,
        modules=(*_QKV, "self_attn.dense", "mlp.fc1", "mlp.fc2", "input_layernorm"), constants={"hidden_act": "gelu_new"},
    ),
    "phi3": Architecture(
        model_type="phi3", class_name="Phi3ForCausalLM", modules=("self_attn.qkv_proj", "self_attn.o_proj", *_FUSED, *_NORMS),
        windows=Windows(), partial=True, more=_phi3_window,
    ),
    "starcoder2": Architecture(
        model_type="starcoder2", class_name="Starcoder2ForCausalLM", modules=(*_ATTENTION, "mlp.c_fc", "mlp.c_proj", *_NORMS),
        epsilon="norm_epsilon", flags={"use_bias": "attn_output.bias"}, constants={"hidden_act": "gelu_pytorch_tanh"},
        windows=Windows(usual=4096),
    ),
    "olmo": Architecture(
        model_type="olmo", class_name="OlmoForCausalLM", modules=(*_ATTENTION, *_GATED), epsilon=None, flags=_BIASES,
        optional={"clip_qkv": "attention.clamp_kqv"}, interleaved=True,
    ),
    "olmo2": Architecture(
        model_type="olmo2", class_name="Olmo2ForCausalLM", modules=_OLMO3.modules, flags=_BIASES,
        with_field={"attention.sliding_window": _OLMO3},
    ),
    "command-r": Architecture(
        model_type="cohere", class_name="CohereForCausalLM", modules=(*_ATTENTION, *_QK_NORMS, *_GATED, "input_layernorm"),
        epsilon="layer_norm_eps", fields={"logit_scale": "logit_scale"}, flags={**_BIASES, "use_qk_norm": "attn_q_norm.weight"},
    ),
    "cohere2": Architecture(
        model_type="cohere2", class_name="Cohere2ForCausalLM", modules=(*_ATTENTION, *_GATED, "input_layernorm"),
        epsilon="layer_norm_eps", fields={"logit_scale": "logit_scale"}, flags=_BIASES, windows=Windows(period=4),
    ),
    "granite": Architecture(
        model_type="granite", class_name="GraniteForCausalLM", modules=_LLAMA.modules, flags=_BIASES, interleaved=True,
        fields={
            "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale", "logits_scaling": "logit_scale",
        },
    ),
    "glm4": Architecture(
        model_type="glm4", class_name="Glm4ForCausalLM", flags=_QKV_BIASES, partial=True,
        modules=(*_ATTENTION, *_FUSED, *_NORMS, "post_self_attn_layernorm", "post_mlp_layernorm"),
    ),
    "exaone4": Architecture(
        model_type="exaone4", class_name="Exaone4ForCausalLM", modules=(*_ATTENTION, *_QK_NORMS, *_GATED, *_POST_NORMS),
        windows=Windows(period=4),
    ),
    "smollm3": Architecture(
        model_type="smollm3", class_name="SmolLM3ForCausalLM", modules=_LLAMA.modules, flags=_BIASES, interleaved=True,
        constants={"no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    "arcee": Architecture(
        model_type="arcee", class_name="ArceeForCausalLM", modules=(*_ATTENTION, *_MLP, *_NORMS), flags=_BIASES,
        constants={"hidden_act": "relu2"}, interleaved=True,
    ),
    "ernie4_5": Architecture(
        model_type="ernie4_5", class_name="Ernie4_5ForCausalLM", modules=_LLAMA.modules, flags={"use_bias": "attn_output.bias"}
    ),
    "seed_oss": Architecture(
        model_type="seed_oss", class_name="SeedOssForCausalLM", modules=_LLAMA.modules,
        flags={"attention_bias": "attn_q.bias", "attention_out_bias": "attn_output.bias", "mlp_bias": "ffn_down.bias"},
    ),
    "apertus": Architecture(
        model_type="apertus", class_name="ApertusForCausalLM", flags=_BIASES, constants={"hidden_act": "xielu"},
        modules=(*_ATTENTION, *_QK_NORMS, *_MLP, "attention_layernorm", "feedforward_layernorm"),
        values={
            "mlp.act_fn.alpha_p": ("xielu.alpha_p", (1,)), "mlp.act_fn.alpha_n": ("xielu.alpha_n", (1,)),
            "mlp.act_fn.beta": ("xielu.beta", ()), "mlp.act_fn.eps": ("xielu.eps", ()),
        },
    ),
    "gptneox": Architecture(
        model_type="gpt_neox", class_name="GPTNeoXForCausalLM", base="gpt_neox", embedding="embed_in", norm="final_layer_norm",
        modules=("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h", *_NORMS),
        head="embed_out", epsilon="layer_norm_eps", fields={"use_parallel_residual": "use_parallel_residual"},
        constants={"hidden_act": "gelu"}, flags=_BIASES, partial=True, fused="attention.query_key_value",
    ),
    "minicpm3": Architecture(
        model_type="minicpm3", class_name="MiniCPM3ForCausalLM", flags=_BIASES, more=latents,
        modules=(
            "self_attn.q_a_proj", "self_attn.q_a_layernorm", "self_attn.q_b_proj", "self_attn.kv_a_proj_with_mqa",
            "self_attn.kv_a_layernorm", "self_attn.kv_b_proj", "self_attn.o_proj", *_GATED, *_NORMS,
        ),
        fields={"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"},
        constants={"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256},
    ),
    "jais2": Architecture(
        model_type="jais2", class_name="Jais2ForCausalLM", modules=(*_ATTENTION, *_MLP, *_NORMS), epsilon="layer_norm_eps",
        flags=_BIASES, constants={"hidden_act": "relu2"},
    ),
    "mistral3": Architecture(
        model_type="mistral", class_name="MistralForCausalLM", modules=_LLAMA.modules, interleaved=True,
        constants={"sliding_window": None},
        with_field={
            "attention.temperature_scale": Architecture(
                model_type="ministral3", class_name="Ministral3ForCausalLM", modules=_LLAMA.modules, interleaved=True,
                constants={"sliding_window": None}, rope_fields={"llama_4_scaling_beta": "attention.temperature_scale"},
            )
        },
    ),
}  # fmt: skip


def architecture_of(metadata: Mapping[str, Any]) -> Architecture:
    """The entry for a file. Raises UserError if there is none."""
    name = metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise UserError(f"its architecture {name!r} is not supported; use one of {', '.join(ARCHITECTURES)}")
    found = ARCHITECTURES[name]
    return next((other for key, other in found.with_field.items() if metadata.get(f"{name}.{key}")), found)
