"""An observed run of transformers' modules: it shows the cache, the attention, the recurrence and the experts of each layer.

The modules are made without memory, on the meta device, and run once with a cache and an attention function that note what they
are called with.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from pipedec.core.values import shortened
from pipedec.families.shapes import ExpertsShape, Layer, LayerShape, Reach, RecurrentShape, Shape
from pipedec.families.skeleton import ModuleNames, has_experts, is_recurrent, module_cache, replace_functions, skeleton

if TYPE_CHECKING:
    from torch import Tensor

_FUNCTIONS = "pipedec_observed"  # under which transformers knows the functions of this file
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class Unsupported(ValueError):
    """The reason why a model cannot run: what it is or has, as the rest of a sentence."""


@dataclass(frozen=True)
class _SeenMask:
    """Stands in for the mask of a kind of layer."""

    reach: Reach | None


class _Seen:
    """Notes of a run: by layer, the shapes of what it caches, and its attention or recurrence."""

    def __init__(self) -> None:
        self.cached: dict[int, tuple[Shape, Shape]] = {}
        self.attention: dict[int, LayerShape] = {}
        self.convolutions: dict[int, tuple[int, int]] = {}  # channels and tokens
        self.recurrent: dict[int, RecurrentShape] = {}
        self.routed: dict[str, ExpertsShape] = {}  # by path of the module
        self.rows: dict[tuple[str, str], Any] = {}  # what linear maps were called with, by parent and name


@dataclass(frozen=True)
class Observed:
    """The run of a model.

    Attributes:
        layers: the attention or recurrence of each layer.
        routed: by the path of a module with the matrices of experts, their number.
        returns_tuple: whether layers return tuples.
        fused: the names of linear maps that take the same rows.
    """

    layers: tuple[Layer, ...]
    routed: dict[str, ExpertsShape]
    returns_tuple: bool
    fused: tuple[tuple[str, ...], ...]


_seen: ContextVar[_Seen] = ContextVar("seen")  # what the observed run has shown so far


def observable(stated: Any) -> Any:
    """The model that a config describes, for ``observe``. Raises Unsupported if it cannot be made."""
    _register()
    try:
        return skeleton(stated, _FUNCTIONS)
    except Exception as error:  # of any type: it is the architecture's own code
        raise Unsupported(f"cannot be made without its weights ({_shown(error)})") from None


def observe(model: Any, names: ModuleNames) -> Observed:
    """Run a model once without memory. Raises Unsupported if it computes in another way than layers may."""
    import torch
    from torch import nn

    layers, seen, returned = model.get_submodule(names.layers), _Seen(), list[bool]()
    hooks = [layers[0].register_forward_hook(lambda module, inputs, output: returned.append(isinstance(output, tuple)))]
    for path, module in layers.named_modules():
        if type(module) is nn.Linear:
            parent, _, own = path.rpartition(".")
            hooks.append(module.register_forward_pre_hook(partial(_note_rows, seen, (parent, own))))
        elif has_experts(module):
            module.pipedec_path = f"{names.layers}.{path}"
        elif is_recurrent(module):
            number = int(module.layer_idx)
            replace_functions(module, partial(_observed_rule, seen, number), partial(_observed_convolution, seen, number))
    ids = torch.zeros(1, 3, dtype=torch.int64, device="meta")
    before = _seen.set(seen)
    try:
        model.to("meta")
        for module in model.modules():  # which would look at positions to choose their frequencies
            if any(path.endswith("inv_freq") for path, _ in module.named_buffers(recurse=False)):
                module.forward = partial(inspect.unwrap(type(module).forward), module)
        cache, decoder = module_cache(partial(_note_cached, seen)), model.get_submodule(names.decoder)
        decoder(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=True)
    except Unsupported:
        raise
    except Exception as error:  # of any type: it is the architecture's own code
        raise Unsupported(f"computes in a way that cannot be observed ({_shown(error)})") from None
    finally:
        _seen.reset(before)
        for hook in hooks:
            hook.remove()
    found = tuple(_layer(seen, number) for number in range(len(layers)))
    return Observed(found, seen.routed, returned[0], tuple(group for group in _GROUPS if _take_the_same_rows(seen, group)))


def _layer(seen: _Seen, number: int) -> Layer:
    """A layer of the model. Raises Unsupported for one without attention or recurrence, or with both."""
    has_attention = number in seen.cached and number in seen.attention
    if has_attention == (number in seen.recurrent):
        kinds = "both attention and a recurrent state" if has_attention else "neither attention nor a recurrent state"
        raise Unsupported(f"has layers with {kinds} of their own (layer {number})")
    return _with_latents(seen.attention[number], *seen.cached[number]) if has_attention else seen.recurrent[number]


def _observed_convolution(seen: _Seen, number: int, inputs: Tensor, weight: Tensor, *_: Any, **__: Any) -> Tensor:
    seen.convolutions[number] = weight.shape[0], weight.shape[-1]
    return inputs


def _observed_rule(
    seen: _Seen, number: int, query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not use_qk_l2norm_in_kernel:
        raise ValueError("queries and keys are not normalised")
    num_decays = g.shape[3] if g.dim() == 4 else 1
    seen.recurrent[number] = RecurrentShape(
        value.shape[2], key.shape[2], key.shape[3], value.shape[3], num_decays, *seen.convolutions[number]
    )
    return value.new_empty(value.shape), value.new_empty(0)


def _note_rows(seen: _Seen, place: tuple[str, str], module: Any, inputs: tuple[Any, ...]) -> None:
    seen.rows[place] = inputs[0]


def _take_the_same_rows(seen: _Seen, group: tuple[str, ...]) -> bool:
    """Whether linear maps of these names are called with one tensor wherever there are such, and there are some."""
    parents = {parent for parent, own in seen.rows if own in group}
    rows = [[seen.rows.get((parent, own)) for own in group] for parent in parents]
    return bool(rows) and all(one is of_parent[0] is not None for of_parent in rows for one in of_parent)


def _with_latents(layer: LayerShape, keys: Shape, values: Shape) -> LayerShape:
    """The attention of a layer that caches keys and values of these shapes, [1, K, R, D] each, or latents, [1, 1, R, X] each."""
    (_, heads, _, key_dim), (_, value_heads, _, value_dim) = keys, values
    if (heads, value_heads, key_dim, value_dim) == (layer.num_kv_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim):
        return layer
    if heads != 1 or value_heads != 1:
        raise Unsupported(f"caches keys of shape {keys}, but attends to {layer.num_kv_heads} heads of {layer.key_dim}")
    return LayerShape(
        layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.reach, layer.scale, layer.softcap,
        (key_dim, value_dim),
    )  # fmt: skip


def _note_cached(seen: _Seen, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    if layer in seen.cached:
        raise Unsupported(f"has a layer that caches twice (layer {layer})")
    seen.cached[layer] = tuple(keys.shape), tuple(values.shape)
    return keys, values


def _observed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    reach = attention_mask.reach if isinstance(attention_mask, _SeenMask) else None
    _seen.get().attention[int(module.layer_idx)] = LayerShape(
        query.shape[1], key.shape[1], key.shape[3], value.shape[3], reach, scaling, softcap
    )
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def _observed_experts(module: Any, hidden_RE: Tensor, expert_ids_RK: Tensor, *_: Any, **__: Any) -> Tensor:
    _seen.get().routed[module.pipedec_path] = ExpertsShape(len(module.down_proj), expert_ids_RK.shape[1])
    return hidden_RE.new_empty(hidden_RE.shape)


def _observed_mask(mask_function: Any, local_size: int | None = None, **_: Any) -> _SeenMask:
    """Whether positions are seen in windows or in chunks is found by asking for one pair of positions."""
    import torch

    if local_size is None:
        return _SeenMask(None)
    zero, last, first = (torch.tensor(number) for number in (0, local_size, 1))
    return _SeenMask(Reach(local_size, is_chunk=local_size > 1 and not bool(mask_function(zero, zero, last, first))))


@lru_cache(maxsize=1)
def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    AttentionInterface.register(_FUNCTIONS, _observed_attention)
    AttentionMaskInterface.register(_FUNCTIONS, _observed_mask)
    ALL_EXPERTS_FUNCTIONS.register(_FUNCTIONS, _observed_experts)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {shortened(' '.join(str(error).split()))}"
