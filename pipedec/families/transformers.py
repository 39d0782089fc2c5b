"""Models whose layers are transformers' own modules: any architecture with a pipeline plan and replaceable attention.

What caches, masks and plans need to know is observed: the modules are made without memory, on the meta device, and run once
with a cache and an attention function that note what they are called with. No code of a checkpoint is executed, and nothing is
downloaded. What cannot work is refused by name, with the reason. torch and transformers are loaded when the first such model is
read.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.families.base import ModelConfig, rope_sets
from pipedec.families.multimodal import auto_class, loaded_names, text_config, towers
from pipedec.families.shapes import Layer, LayerShape, Reach, RecurrentShape, Shape
from pipedec.formats import TensorFiles, known_files

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION = "pipedec"  # under which transformers knows the attention function of ``model.module_layers``
UNSUPPORTED = ", which is not supported: choose another target"
_OBSERVED = "pipedec_observed"  # under which it knows that of this file
_GROUPS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_PLANNED_AS = {"qwen3_vl_text": "qwen3"}  # architectures with the parts of another one, which has a pipeline plan
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")
RULES = ("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")  # functions of modules with a recurrent state
CONVOLUTION = "causal_conv1d_fn"  # that of the short convolution before them


@dataclass(frozen=True)
class ModuleNames:
    """Where a model of transformers keeps its parts, as paths of modules."""

    base: str  # the model without head
    decoder: str  # the text model in it, if there are others, else the same
    embedding: str
    layers: str
    norm: str
    head: str

    def layer(self, number: int) -> str:
        return f"{self.layers}.{number}"


@dataclass(frozen=True)
class Place:
    """Where a tensor of a checkpoint is in the model.

    Attributes:
        module, parameter: path and attribute.
        rows: which of the parameter's rows it is, where the checkpoint has several tensors for one parameter; None for all.
    """

    module: str
    parameter: str
    rows: tuple[int, int] | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.parameter}"


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """A model of transformers' modules.

    Attributes:
        names: of its parts.
        shapes: of all tensors, by their names in a checkpoint.
        places: of each of them, where it is in the model.
        observed: the attention, or the recurrence, of each layer.
        returns_tuple: whether layers return tuples that begin with the hidden state.
        stated_ropes: see ``ropes``.
        towers: where the names of tensors begin that are left out, since they are of other models than the text's.
        unused: patterns of transformers, see ``unused_tensors``.
        fused: names of linear maps that take the same rows, side by side in every layer.
    """

    names: ModuleNames
    shapes: dict[str, Shape] = field(repr=False, hash=False)
    places: dict[str, Place] = field(repr=False, hash=False)
    observed: tuple[Layer, ...]
    returns_tuple: bool
    stated_ropes: tuple[Mapping[str, Any], ...] = field(repr=False, hash=False)
    towers: tuple[str, ...] = field(repr=False)
    unused: tuple[str, ...] = field(repr=False)
    fused: tuple[tuple[str, ...], ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.observed

    @property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        return self.stated_ropes

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        return (*super().unused_tensors, *self.unused, *(rf"^{re.escape(tower)}(\.|$)" for tower in self.towers))

    def left_out(self, known: Collection[str]) -> dict[str, int]:
        counts = {tower: sum(f"{name}.".startswith(f"{tower}.") for name in known) for tower in self.towers}
        return {tower: count for tower, count in counts.items() if count}

    def layer_tensors(self, layer: int) -> dict[str, Shape]:
        return self._within(self.names.layer(layer))

    def embedding_tensors(self) -> dict[str, Shape]:
        return self._within(self.names.embedding)

    def norm_tensors(self) -> dict[str, Shape]:
        return self._within(self.names.norm)

    def head_tensors(self, known: Iterable[str] = ()) -> dict[str, Shape]:
        tensors = self._within(self.names.head)
        weight = next(name for name in tensors if self.places[name].parameter == "weight")
        if self.tie_word_embeddings and weight not in known:
            del tensors[weight]
            tensors |= self.embedding_tensors()
        return tensors

    def _within(self, module: str) -> dict[str, Shape]:
        return {name: shape for name, shape in self.shapes.items() if f"{self.places[name]}".startswith(module + ".")}


def transformers_config(directory: Path, end_tokens: dict[str, Any]) -> TransformersConfig:
    """The model in a checkpoint's directory. ``end_tokens``: of its generation_config.json.

    Raises UserError, before anything is loaded, if it is not supported.
    """
    ends = end_tokens.get("eos_token_id", ())
    ends = tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    path = directory / "config.json"
    try:
        return _described(directory, path.stat().st_mtime_ns, ends, known_files(directory))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


@lru_cache(maxsize=8)
def _described(directory: Path, changed_ns: int, end_tokens: tuple[int, ...], files: TensorFiles | None) -> TransformersConfig:
    stated = stated_config(directory)
    name, text = stated.model_type, text_config(stated)
    _check_kind(name, stated)
    try:
        model = skeleton(stated, _OBSERVED)
    except Exception as error:  # of any type: it is the architecture's own code
        raise _refusal(name, f"cannot be made without its weights ({_shown(error)})") from None
    names = _names(name, model)
    _check_modules(name, model, names)
    places, beside_text = _places(name, model, names), tuple[str, ...]()
    if text is not stated:
        known = () if files is None else files.file_of
        places, beside_text = _as_stored(model, places, known)
    parts = tuple(f"{path}." for path in (names.embedding, names.layers, names.norm, names.head))
    beside = [key for key in map(str, places.values()) if not key.startswith(parts)]
    if beside:
        raise _refusal(name, f"has tensors beside its embedding, layers, final norm and head ({beside[0]})")
    tensors = model.state_dict()
    observed, returns_tuple, fused = _observe(name, model, names)
    ends = end_tokens or getattr(stated, "eos_token_id", None) or getattr(text, "eos_token_id", None)
    return TransformersConfig(
        model_type=text.model_type,
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        num_hidden_layers=text.num_hidden_layers,
        tie_word_embeddings=any(getattr(one, "tie_word_embeddings", False) for one in (stated, text)),
        max_position_embeddings=text.max_position_embeddings,
        eos_token_id=list(ends) if isinstance(ends, tuple) else ends,
        location=str(directory),
        names=names,
        shapes={stored: _shape(tensors[str(place)].shape, place) for stored, place in places.items()},
        places=places,
        observed=observed,
        returns_tuple=returns_tuple,
        stated_ropes=rope_sets(getattr(text, "rope_parameters", None) or {}),
        towers=beside_text,
        unused=tuple(sorted(model._keys_to_ignore_on_load_unexpected)),
        fused=fused,
    )


def stated_config(directory: Path) -> Any:
    """The config that transformers makes of ``config.json``. Raises UserError for an unknown model, or if it refuses the file."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates with many exception types of its own
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"neither pipedec nor the installed transformers can read it: {reason}") from None


def skeleton(stated: Any, attention: str, dtype: Any = None) -> Any:
    """The model of transformers that a config describes, whose weights are on the meta device: they have shapes, but no memory.

    Buffers that are computed, such as frequencies, are real. ``attention``: the name of the text model's attention function.
    """
    import torch
    from torch.overrides import TorchFunctionMode
    from transformers.initialization import no_init_weights

    class WithoutWeights(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            is_weight = function in (torch.empty, torch.rand, torch.randn)
            return function(*args, **{**(kwargs or {}), **({"device": "meta"} if is_weight else {})})

    _register()
    own = attention if text_config(stated) is stated else {"text_config": attention}
    with WithoutWeights(), no_init_weights():
        model = auto_class(stated).from_config(
            stated, dtype=dtype or torch.float32, attn_implementation=own, trust_remote_code=False
        )
    for module in model.modules():  # weights made of zeros or ones, as frequencies may be
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, torch.nn.Parameter(parameter.to("meta"), requires_grad=False))
    return model.eval()


def _check_kind(name: str, stated: Any) -> None:
    """Raises UserError for what the config alone shows."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    text = text_config(stated)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING if text is stated else MODEL_FOR_MULTIMODAL_LM_MAPPING
    if type(stated) not in classes:
        raise _refusal(name, "is not a causal language model of transformers")
    if any(own.endswith("MambaMixer") for own in vars(sys.modules[classes[type(stated)].__module__])):
        raise _refusal(name, "has decays by channel and number of a state (Mamba-1), so rows of a tree cannot share one")
    kinds = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - {*_KINDS})
    if kinds:
        raise _refusal(name, f"has layers of kinds that pipedec does not have ({', '.join(kinds)})")
    if getattr(text, "hidden_size_per_layer_input", None):
        raise _refusal(name, "feeds token ids to every layer (per-layer inputs)")
    if getattr(text, "num_kv_shared_layers", None):
        raise _refusal(name, "has layers that share keys and values")
    if _pipeline_plan(text) is None:
        raise _refusal(name, "has no pipeline plan in transformers (base_model_pp_plan)")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise _refusal(name, "lets tokens of a prompt see later ones (use_bidirectional_attention)")
    if getattr(stated, "is_encoder_decoder", False):
        raise _refusal(name, "has an encoder")


def _pipeline_plan(text: Any) -> Any:
    from transformers import CONFIG_MAPPING

    known = _PLANNED_AS.get(text.model_type)
    return text.base_model_pp_plan if known is None else CONFIG_MAPPING[known].base_model_pp_plan


def _check_modules(name: str, model: Any, names: ModuleNames) -> None:
    """Raises UserError for modules that layers may not have."""
    layers = model.get_submodule(names.layers)
    recurrent = tuple(path for path, module in layers.named_modules() if is_recurrent(module))  # with weights of any shape
    for path, module in layers.named_modules():
        kind = type(module).__name__
        if kind.endswith("LightningAttention"):
            raise _refusal(name, f"has recurrent layers without a replaceable function ({kind})")
        if re.search(r"(Experts?|Router|MoE|Moe|MoELayer|MoeBlock)$", kind):
            raise _refusal(name, f"is a mixture of experts ({kind})")
        if kind.endswith("Indexer"):
            raise _refusal(name, f"has layers that choose the tokens that they attend to ({kind})")
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 2 and not path.startswith(recurrent):
                raise _refusal(name, f"has weights that are neither vectors nor matrices ({path}.{own})")


def _names(name: str, model: Any) -> ModuleNames:
    """The parts that the pipeline plan names: what takes token ids, the list of layers, and what follows it."""
    from torch import nn

    base, text = model.base_model_prefix, text_config(model.config)
    decoder = getattr(model, base, None) if text is model.config else model.get_decoder()
    path = next((path for path, module in model.named_modules() if module is decoder), "")
    if not f"{path}.".startswith(f"{base}."):
        raise _refusal(name, "has its text model beside its base model")
    found: dict[str, str] = {}
    for part, (inputs, _) in _pipeline_plan(text).items():
        module = getattr(decoder, part, None)
        if isinstance(module, nn.Dropout):
            continue
        kind = "layers" if isinstance(module, nn.ModuleList) else "embedding" if "input_ids" in inputs else "norm"
        if module is None or kind in found:
            raise _refusal(name, f"has a pipeline plan with other parts than an embedding, layers and a final norm ({part})")
        found[kind] = f"{path}.{part}"
    head = model.get_output_embeddings()
    heads = [path for path, module in model.named_modules() if module is head]
    if len(found) < 3 or not heads:
        raise _refusal(name, "lacks an embedding, layers, a final norm or a head in its pipeline plan")
    return ModuleNames(base, path, found["embedding"], found["layers"], found["norm"], heads[0])


def _shape(whole: Shape, place: Place) -> Shape:
    return tuple(whole) if place.rows is None else (place.rows[1] - place.rows[0], *whole[1:])


def _places(name: str, model: Any, parts: ModuleNames) -> dict[str, Place]:
    """Where every tensor of a checkpoint is in the model, by its name; in a multimodal one those of the text model. Raises
    UserError if they are not the same tensors, or rows of them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own = model.state_dict(keep_vars=True)
    if parts.decoder != parts.base:
        own = {key: tensor for key, tensor in own.items() if key.startswith((f"{parts.decoder}.", f"{parts.head}."))}
    stored = revert_weight_conversion(model, dict(own))
    names = {id(tensor): key for key, tensor in own.items()}
    tied = {key: key for key in own if key in stored}  # tensors of two names are kept under both
    places = {}
    for key, tensor in stored.items():
        whole = tensor if id(tensor) in names else tensor._base
        if id(whole) not in names or (
            whole is not tensor and not (tensor.is_contiguous() and tensor.shape[1:] == whole.shape[1:])
        ):
            raise _refusal(name, "has checkpoints whose tensors are not those of its modules")
        module, _, parameter = tied.get(key, names[id(whole)]).rpartition(".")
        first = tensor.storage_offset() // max(whole.stride(0), 1) if whole is not tensor else 0
        places[key] = Place(module, parameter, None if whole is tensor else (first, first + len(tensor)))
    if sum(tensor.numel() for tensor in stored.values()) != sum(tensor.numel() for tensor in own.values()):
        raise _refusal(name, "has checkpoints whose tensors are not those of its modules")
    return places


def _as_stored(model: Any, places: Mapping[str, Place], known: Iterable[str]) -> tuple[dict[str, Place], tuple[str, ...]]:
    """The places of a text model's tensors, by their names in a checkpoint of a multimodal model, and its ``towers``."""
    loaded = loaded_names(model, known)
    names = {in_model: stored for stored, in_model in loaded.items()}
    found = {name if place.rows else names.get(str(place), name): place for name, place in places.items()}
    return found, towers(model, {str(place): name for name, place in found.items()}, loaded)


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {shortened(' '.join(str(error).split()))}"


def _refusal(name: str, reason: str) -> UserError:
    return UserError(f"model_type {name!r} {reason}{UNSUPPORTED}")


# Observation


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
        self.rows: dict[tuple[str, str], Any] = {}  # what linear maps were called with, by parent and name


_seen: ContextVar[_Seen] = ContextVar("seen")  # what the observed run has shown so far


def _observe(name: str, model: Any, names: ModuleNames) -> tuple[tuple[Layer, ...], bool, tuple[tuple[str, ...], ...]]:
    """Run the model once without memory. Returns the attention or recurrence of each layer, whether layers return tuples, and
    which linear maps take the same rows.
    """
    import torch
    from torch import nn

    layers, seen, returned = model.get_submodule(names.layers), _Seen(), list[bool]()
    hooks = [layers[0].register_forward_hook(lambda module, inputs, output: returned.append(isinstance(output, tuple)))]
    for path, module in layers.named_modules():
        if type(module) is nn.Linear:
            parent, _, own = path.rpartition(".")
            hooks.append(module.register_forward_pre_hook(partial(_note_rows, seen, (parent, own))))
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
    except UserError:
        raise
    except Exception as error:  # of any type: it is the architecture's own code
        raise _refusal(name, f"computes in a way that cannot be observed ({_shown(error)})") from None
    finally:
        _seen.reset(before)
        for hook in hooks:
            hook.remove()
    return (
        tuple(_layer(name, seen, number) for number in range(len(layers))),
        returned[0],
        tuple(group for group in _GROUPS if _take_the_same_rows(seen, group)),
    )


def is_recurrent(module: Any) -> bool:
    """Whether a module computes with a recurrent state, by one of ``RULES``."""
    return not _forward_names(module).isdisjoint(RULES)


def _forward_names(module: Any) -> set[str]:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return set() if code is None else set(code.co_names)


def replace_functions(module: Any, rule: Callable[..., Any], convolution: Callable[..., Any]) -> None:
    """Let a module with a recurrent state compute by these functions instead of those that its file has for all models."""
    forward = inspect.unwrap(type(module).forward)
    replaced = dict.fromkeys(RULES, rule) | {CONVOLUTION: convolution}
    own = FunctionType(
        forward.__code__, {**forward.__globals__, **replaced}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = MethodType(own, module)


def _layer(name: str, seen: _Seen, number: int) -> Layer:
    """A layer of the model. Raises UserError for one without attention or recurrence, or with both."""
    has_attention = number in seen.cached and number in seen.attention
    if has_attention == (number in seen.recurrent):
        kinds = "both attention and a recurrent state" if has_attention else "neither attention nor a recurrent state"
        raise _refusal(name, f"has layers with {kinds} of their own (layer {number})")
    return _with_latents(name, seen.attention[number], *seen.cached[number]) if has_attention else seen.recurrent[number]


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


def _with_latents(name: str, layer: LayerShape, keys: Shape, values: Shape) -> LayerShape:
    """The attention of a layer that caches keys and values of these shapes, [1, K, R, D] each, or latents, [1, 1, R, X] each."""
    (_, heads, _, key_dim), (_, value_heads, _, value_dim) = keys, values
    if (heads, value_heads, key_dim, value_dim) == (layer.num_kv_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim):
        return layer
    if heads != 1 or value_heads != 1:
        raise _refusal(name, f"caches keys of shape {keys}, but attends to {layer.num_kv_heads} heads of {layer.key_dim}")
    return LayerShape(
        layer.num_heads, layer.num_kv_heads, layer.key_dim, layer.value_dim, layer.reach, layer.scale, layer.softcap,
        (key_dim, value_dim),
    )  # fmt: skip


def _note_cached(seen: _Seen, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    if layer in seen.cached:
        raise UserError(f"layer {layer} caches twice")
    seen.cached[layer] = tuple(keys.shape), tuple(values.shape)
    return keys, values


def module_cache(update: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]) -> Any:
    """A cache of transformers for one forward: layers write keys and values by ``update`` and attend to what it returns. Layers
    with a recurrent state find none.
    """
    found = _cache_class()(layers=[])
    found.update_keys_values = update
    return found


@lru_cache(maxsize=1)
def _cache_class() -> type:
    from transformers import Cache

    class ModuleCache(Cache):
        update_keys_values: Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]

        def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            return self.update_keys_values(key_states, value_states, layer_idx)

        def get_conv_state(self, *_: Any, **__: Any) -> None:
            return None

        def get_recurrent_state(self, *_: Any, **__: Any) -> None:
            return None

        def update_conv_state(self, conv_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return conv_states

        def update_recurrent_state(self, recurrent_states: Tensor, *_: Any, **__: Any) -> Tensor:
            return recurrent_states

    return ModuleCache


def _observed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, scaling: float | None = None,
    softcap: float | None = None, **_: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    reach = attention_mask.reach if isinstance(attention_mask, _SeenMask) else None
    _seen.get().attention[int(module.layer_idx)] = LayerShape(
        query.shape[1], key.shape[1], key.shape[3], value.shape[3], reach, scaling, softcap
    )
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


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

    AttentionInterface.register(_OBSERVED, _observed_attention)
    AttentionMaskInterface.register(_OBSERVED, _observed_mask)
