"""Models whose layers are transformers' own modules: any architecture with a pipeline plan and replaceable attention.

What cannot work is refused by name, with the reason. torch and transformers are loaded when the first such model is read.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from pipedec.core.errors import UserError
from pipedec.families.base import ModelConfig, rope_sets
from pipedec.families.multimodal import loaded_names, text_config
from pipedec.families.observation import Unsupported, observable, observe
from pipedec.families.places import Place, as_stored, saved_places, stored_shape, with_stacks
from pipedec.families.shapes import ExpertsShape, Layer, Shape
from pipedec.families.skeleton import ModuleNames, has_experts, is_recurrent, stated_config
from pipedec.formats import TensorFiles, known_files

UNSUPPORTED = ", which is not supported: choose another target"
_PLANNED_AS = {"qwen3_vl_text": "qwen3"}  # architectures with the parts of another one, which has a pipeline plan
_KINDS = ("full_attention", "sliding_attention", "chunked_attention", "linear_attention")


@dataclass(frozen=True, kw_only=True)
class TransformersConfig(ModelConfig):
    """A model of transformers' modules.

    Attributes:
        names: of its parts.
        shapes: of all tensors, by their names in a checkpoint.
        places: of each of them, where it is in the model.
        observed: the attention, or the recurrence, of each layer.
        routed: by the path of a module with the matrices of experts, their number.
        not_linear: see ``routers``.
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
    routed: dict[str, ExpertsShape] = field(repr=False, hash=False)
    not_linear: frozenset[str] = field(repr=False)
    returns_tuple: bool
    stated_ropes: tuple[Mapping[str, Any], ...] = field(repr=False, hash=False)
    towers: tuple[str, ...] = field(repr=False)
    unused: tuple[str, ...] = field(repr=False)
    fused: tuple[tuple[str, ...], ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        return self.observed

    @property
    def experts(self) -> tuple[ExpertsShape | None, ...]:
        return tuple(self._experts_of(layer) for layer in range(self.num_hidden_layers))

    def _experts_of(self, layer: int) -> ExpertsShape | None:
        within = f"{self.names.layer(layer)}."
        return next((shape for path, shape in self.routed.items() if path.startswith(within)), None)

    @property
    def routers(self) -> Collection[str]:
        return self.not_linear

    def expert_tensors(self, layer: int) -> dict[str, Shape]:
        return {name: shape for name, shape in self.layer_tensors(layer).items() if self.places[name].module in self.routed}

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

    def _within(self, part: str) -> dict[str, Shape]:
        return dict(self._by_part[part])

    @cached_property
    def _by_part(self) -> dict[str, dict[str, Shape]]:
        """The tensors of the embedding, of each layer, of the final norm and of the head, by the path of its module."""
        names, layers = self.names, range(self.num_hidden_layers)
        found: dict[str, dict[str, Shape]]
        found = {part: {} for part in (names.embedding, *map(names.layer, layers), names.norm, names.head)}
        for name, shape in self.shapes.items():
            part = next(part for part in accumulate(self.places[name].module.split("."), "{}.{}".format) if part in found)
            found[part][name] = shape
        return found


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
    try:
        return _supported(directory, stated, end_tokens, files)
    except Unsupported as reason:
        raise UserError(f"model_type {stated.model_type!r} {reason}{UNSUPPORTED}") from None


def _supported(directory: Path, stated: Any, end_tokens: tuple[int, ...], files: TensorFiles | None) -> TransformersConfig:
    from torch import nn

    text = text_config(stated)
    _check_kind(stated)
    model = observable(stated)
    names = _names(model)
    _check_modules(model, names)
    known, beside_text = () if files is None else files.file_of, tuple[str, ...]()
    loaded = {name: name for name in known} if text is stated else loaded_names(model, known)
    places = with_stacks(saved_places(model, names), loaded)
    if text is not stated:
        places, beside_text = as_stored(model, places, loaded)
    parts = tuple(f"{path}." for path in (names.embedding, names.layers, names.norm, names.head))
    beside = [key for key in map(str, places.values()) if not key.startswith(parts)]
    if beside:
        raise Unsupported(f"has tensors beside its embedding, layers, final norm and head ({beside[0]})")
    tensors = {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()}
    linear = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    in_layers = {name: place for name, place in places.items() if str(place).startswith(f"{names.layers}.")}
    transposed = {path for path, module in model.named_modules() if getattr(module, "is_transposed", False)}
    observed = observe(model, names)
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
        shapes={stored: stored_shape(tensors[str(place)], place, place.module in transposed) for stored, place in places.items()},
        places=places,
        observed=observed.layers,
        routed=observed.routed,
        not_linear=frozenset(
            name
            for name, place in in_layers.items()
            if len(tensors[str(place)]) == 2 and name.endswith(".weight") and place.module not in linear
        ),
        returns_tuple=observed.returns_tuple,
        stated_ropes=rope_sets(getattr(text, "rope_parameters", None) or {}),
        towers=beside_text,
        unused=tuple(sorted(model._keys_to_ignore_on_load_unexpected)),
        fused=observed.fused,
    )


def _check_kind(stated: Any) -> None:
    """Raises Unsupported for what the config alone shows."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING

    text = text_config(stated)
    classes = MODEL_FOR_CAUSAL_LM_MAPPING if text is stated else MODEL_FOR_MULTIMODAL_LM_MAPPING
    if type(stated) not in classes:
        raise Unsupported("is not a causal language model of transformers")
    if any(own.endswith("MambaMixer") for own in vars(sys.modules[classes[type(stated)].__module__])):
        raise Unsupported("has decays by channel and number of a state (Mamba-1), so rows of a tree cannot share one")
    kinds = sorted({str(kind) for kind in getattr(text, "layer_types", None) or ()} - {*_KINDS})
    if kinds:
        raise Unsupported(f"has layers of kinds that pipedec does not have ({', '.join(kinds)})")
    if getattr(text, "hidden_size_per_layer_input", None):
        raise Unsupported("feeds token ids to every layer (per-layer inputs)")
    if getattr(text, "num_kv_shared_layers", None):
        raise Unsupported("has layers that share keys and values")
    if _pipeline_plan(text) is None:
        raise Unsupported("has no pipeline plan in transformers (base_model_pp_plan)")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        raise Unsupported("lets tokens of a prompt see later ones (use_bidirectional_attention)")
    if getattr(stated, "is_encoder_decoder", False):
        raise Unsupported("has an encoder")


def _pipeline_plan(text: Any) -> Any:
    from transformers import CONFIG_MAPPING

    known = _PLANNED_AS.get(text.model_type)
    return text.base_model_pp_plan if known is None else CONFIG_MAPPING[known].base_model_pp_plan


def _check_modules(model: Any, names: ModuleNames) -> None:
    """Raises Unsupported for modules that layers may not have."""
    layers = model.get_submodule(names.layers)
    any_shape = tuple(path for path, module in layers.named_modules() if is_recurrent(module) or has_experts(module))
    for path, module in layers.named_modules():
        kind = type(module).__name__
        if kind.endswith("LightningAttention"):
            raise Unsupported(f"has recurrent layers without a replaceable function ({kind})")
        if kind.endswith("Experts") and not has_experts(module):
            raise Unsupported(f"has experts without a replaceable function ({kind})")
        if kind.endswith("Indexer"):
            raise Unsupported(f"has layers that choose the tokens that they attend to ({kind})")
        for own, parameter in module.named_parameters(recurse=False):
            if parameter.dim() > 2 and not path.startswith(any_shape):
                raise Unsupported(f"has weights that are neither vectors nor matrices ({path}.{own})")


def _names(model: Any) -> ModuleNames:
    """The parts that the pipeline plan names: what takes token ids, the list of layers, and what follows it."""
    from torch import nn

    base, text = model.base_model_prefix, text_config(model.config)
    decoder = getattr(model, base, None) if text is model.config else model.get_decoder()
    path = next((path for path, module in model.named_modules() if module is decoder), "")
    if not f"{path}.".startswith(f"{base}."):
        raise Unsupported("has its text model beside its base model")
    found: dict[str, str] = {}
    for part, (inputs, _) in _pipeline_plan(text).items():
        module = getattr(decoder, part, None)
        if isinstance(module, nn.Dropout):
            continue
        kind = "layers" if isinstance(module, nn.ModuleList) else "embedding" if "input_ids" in inputs else "norm"
        if module is None or kind in found:
            raise Unsupported(f"has a pipeline plan with other parts than an embedding, layers and a final norm ({part})")
        found[kind] = f"{path}.{part}"
    head = model.get_output_embeddings()
    heads = [path for path, module in model.named_modules() if module is head]
    if len(found) < 3 or not heads:
        raise Unsupported("lacks an embedding, layers, a final norm or a head in its pipeline plan")
    return ModuleNames(base, path, found["embedding"], found["layers"], found["norm"], heads[0])
