"""A model as its ``config.json`` describes it: sizes, layers, names and shapes of tensors.

A family that computes with pipedec's own parts is a file beside this one: its keys of ``config.json``, and a ``Decoder``. Knows
no torch. Shapes as in ``model.stage_model``.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from pipedec.families.parts import Decoder, RMSNorm
from pipedec.families.shapes import ExpertsShape, Layer, LayerShape, RecurrentShape, Shape
from pipedec.formats import ALL_PLAIN, Formats

Size = Annotated[int, Meta(ge=1, le=10_000_000)]


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The configuration that all families have, under the names of ``config.json``.

    Attributes:
        max_position_embeddings: length of the sequences that the model was trained with; see ``context_length``.
        eos_token_id: tokens that end an answer; ``generation_config.json`` takes precedence.
        formats: how its weights are stored.
        location: the directory of ``config.json``; empty for a model without files.
    """

    model_type: str
    hidden_size: Size
    vocab_size: Size
    num_hidden_layers: Size
    tie_word_embeddings: bool = False
    max_position_embeddings: Size = 2048
    eos_token_id: int | list[int] | None = None
    formats: Formats = field(default=ALL_PLAIN, compare=False, repr=False)
    location: str = field(default="", compare=False, repr=False)

    @property
    def directory(self) -> Path:
        return Path(self.location)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        ends = self.eos_token_id
        return () if ends is None else tuple(ends) if isinstance(ends, list) else (ends,)

    @property
    @abstractmethod
    def layers(self) -> tuple[Layer, ...]:
        """The attention, or the recurrence, of each layer."""

    @property
    def attention_layers(self) -> tuple[LayerShape, ...]:
        return tuple(layer for layer in self.layers if isinstance(layer, LayerShape))

    @property
    def is_recurrent(self) -> bool:
        """Whether any layer keeps a state of the past."""
        return any(isinstance(layer, RecurrentShape) for layer in self.layers)

    @property
    def experts(self) -> tuple[ExpertsShape | None, ...]:
        """The routed experts of each layer; None for a layer whose rows all compute with the same weights."""
        return (None,) * self.num_hidden_layers

    @property
    def routers(self) -> Collection[str]:
        """The names of matrices in layers that are those of no linear map, as of most routers: they are never rounded."""
        return ()

    def expert_tensors(self, layer: int) -> dict[str, Shape]:
        """Those of a layer's tensors that belong to its routed experts, of which a row reads ``top_k`` of ``num_experts``."""
        del layer
        return {}

    @property
    @abstractmethod
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        """Parameters of the rotary embeddings in transformers' form: one set for all layers, or one for each type of layer."""

    @property
    def depends_on_length(self) -> bool:
        """Whether keys depend on the length of their prompt, not on their position alone."""
        return any(rope_type(rope) in LENGTH_DEPENDENT for rope in self.ropes)

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its answer."""
        return stretched_length(self.model_type, self.max_position_embeddings, self.ropes)

    @property
    def unused_tensors(self) -> tuple[str, ...]:
        """Regular expressions for names of tensors that checkpoints may have although the model computes without them."""
        return (_FREQUENCIES,)

    def ignores(self, name: str) -> bool:
        """Whether a tensor of a checkpoint is one of ``unused_tensors``."""
        return any(re.search(pattern, name) for pattern in self.unused_tensors)

    def left_out(self, known: Collection[str]) -> dict[str, int]:
        """Parts of a checkpoint's model that are not served, such as towers for images, each with the number of its tensors.

        ``known`` are the checkpoint's tensors.
        """
        return {}

    @abstractmethod
    def layer_tensors(self, layer: int) -> dict[str, Shape]:
        """Names and shapes of a layer's tensors in a checkpoint."""

    def embedding_tensors(self) -> dict[str, Shape]:
        """Names and shapes of the embedding's tensors."""
        return {"model.embed_tokens.weight": (self.vocab_size, self.hidden_size)}

    @abstractmethod
    def norm_tensors(self) -> dict[str, Shape]:
        """Names and shapes of the final norm's tensors."""

    def head_tensors(self, known: Iterable[str] = ()) -> dict[str, Shape]:
        """Names and shapes of the head's tensors: the embedding's if they are tied and the checkpoint has no separate head.

        ``known`` are the checkpoint's tensors.
        """
        if self.tie_word_embeddings and "lm_head.weight" not in known:
            return self.embedding_tensors()
        return {"lm_head.weight": (self.vocab_size, self.hidden_size)}

    @cached_property
    def largest_layer(self) -> dict[str, Shape]:
        """The tensors of the layer with the most parameters."""
        return max((self.layer_tensors(layer) for layer in range(self.num_hidden_layers)), key=_count)

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer."""
        return _count(self.largest_layer)

    @property
    def inner_size(self) -> int:
        """The most numbers of a row in a layer: the inner size of the MLP."""
        return max(size for shape in self.largest_layer.values() if len(shape) > 1 for size in shape)

    @property
    def cache_values_per_token(self) -> int:
        """The most elements of one token in the KV cache of one layer."""
        return max(layer.cached.num_values for layer in self.layers)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the whole model; a tied head counts once."""
        tensors = self.embedding_tensors() | self.norm_tensors() | self.head_tensors()
        return _count(tensors) + sum(_count(self.layer_tensors(layer)) for layer in range(self.num_hidden_layers))


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(ModelConfig):
    """A model whose layers are made of pipedec's own parts."""

    @abstractmethod
    def decoder(self, layer: int) -> Decoder:
        """A layer, without weights."""

    @property
    @abstractmethod
    def final_norm(self) -> RMSNorm:
        """The norm before the head, without weights."""

    @property
    @abstractmethod
    def rope(self) -> dict[str, Any]:
        """Parameters of the rotary embedding in transformers' form: ``rope_type``, ``rope_theta`` and the type's own."""

    @property
    def ropes(self) -> tuple[Mapping[str, Any], ...]:
        return (self.rope,)

    def norm_tensors(self) -> dict[str, Shape]:
        return self.final_norm.tensors()

    def layer_tensors(self, layer: int) -> dict[str, Shape]:
        return {f"model.layers.{layer}.{name}": shape for name, shape in self.decoder(layer).tensors().items()}


LENGTH_DEPENDENT = ("dynamic", "longrope")  # rope types whose frequencies depend on the length of the prompt
_STRETCHING = ("linear", "dynamic", "yarn")  # rope types whose ``factor`` lengthens ``max_position_embeddings``
_FREQUENCIES = r"rotary_emb\.inv_freq$"  # in every layer of old checkpoints


def rope_sets(parameters: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """The sets in ``rope_parameters`` of a ``config.json``: one for all layers, or one for each type of layer."""
    sets = tuple(one for one in parameters.values() if isinstance(one, dict))
    return sets or ((parameters,) if parameters else ())


def rope_type(rope: Mapping[str, Any]) -> str:
    """The type of a rotary embedding, which older files call ``type``."""
    return str(rope.get("rope_type", rope.get("type", "default")))


def stretched_length(model_type: str, trained: int, ropes: Iterable[Mapping[str, Any]]) -> int:
    """Most tokens of a prompt and its answer: ``trained``, times the factor by which a rotary embedding stretches it.

    ``max_position_embeddings`` of Gemma 3, and of files with other rope types, is the stretched length already.
    """
    lengths = [trained]
    for rope in ropes if not model_type.startswith("gemma3") else ():
        kind, factor = rope_type(rope), rope.get("factor")
        original = rope.get("original_max_position_embeddings") if kind == "yarn" else None
        if kind in _STRETCHING and isinstance(factor, int | float) and 1 < factor < math.inf:
            lengths.append(int((original or trained) * factor))
    return max(lengths)


def _count(tensors: dict[str, Shape]) -> int:
    return sum(math.prod(shape) for shape in tensors.values())
