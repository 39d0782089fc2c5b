"""Where the tensors of a checkpoint are in a model of transformers: each is a parameter, rows of one, or a matrix of a stack.

By transformers' own rules for saving and loading, which are followed without memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pipedec.families.multimodal import towers
from pipedec.families.observation import Unsupported
from pipedec.families.shapes import Shape
from pipedec.families.skeleton import ModuleNames

_OTHER_TENSORS = "has checkpoints whose tensors are not those of its modules"


@dataclass(frozen=True)
class Place:
    """Where a tensor of a checkpoint is in the model.

    Attributes:
        module, parameter: path and attribute.
        rows: which of the parameter's rows it is, where the checkpoint has several tensors for one parameter; None for all.
        expert: which of the experts it belongs to, where the parameter is a stack of their matrices; None for all.
    """

    module: str
    parameter: str
    rows: tuple[int, int] | None = None
    expert: int | None = None

    def __str__(self) -> str:
        return f"{self.module}.{self.parameter}"

    @property
    def is_part(self) -> bool:
        """Whether the checkpoint has several tensors for the parameter."""
        return self.rows is not None or self.expert is not None


def stored_shape(whole: Shape, place: Place, is_transposed: bool) -> Shape:
    """The shape of a tensor. Matrices of experts have outputs before inputs, also where the model has them transposed."""
    if is_transposed and len(whole) == 3:
        whole = (whole[0], whole[2], whole[1])
    if place.expert is not None:
        whole = whole[1:]
    return whole if place.rows is None else (place.rows[1] - place.rows[0], *whole[1:])


def saved_places(model: Any, parts: ModuleNames) -> dict[str, Place]:
    """Where every tensor of a checkpoint is in the model, by its name; in a multimodal one those of the text model. Raises
    Unsupported if they are not the same tensors, or rows of them, or of the matrices in them.
    """
    from transformers.core_model_loading import revert_weight_conversion

    own = model.state_dict(keep_vars=True)
    if parts.decoder != parts.base:
        own = {key: tensor for key, tensor in own.items() if key.startswith((f"{parts.decoder}.", f"{parts.head}."))}
    with _views():
        stored = revert_weight_conversion(model, dict(own))
    names = {id(tensor): key for key, tensor in own.items()}
    tied = {key: key for key in own if key in stored}  # tensors of two names are kept under both
    places = {}
    for key, tensor in stored.items():
        whole = tensor if id(tensor) in names else tensor._base
        if id(whole) not in names:
            raise Unsupported(_OTHER_TENSORS)
        module, _, parameter = tied.get(key, names[id(whole)]).rpartition(".")
        places[key] = Place(module, parameter) if tensor is whole else _part(module, parameter, tensor, whole)
    if sum(tensor.numel() for tensor in stored.values()) != sum(tensor.numel() for tensor in own.values()):
        raise Unsupported(_OTHER_TENSORS)
    return places


def _part(module: str, parameter: str, tensor: Any, whole: Any) -> Place:
    """The place of a view that is some rows of a parameter, or of one matrix in it."""
    expert, first = None, tensor.storage_offset()
    of_matrix = tensor.dim() < whole.dim()
    if of_matrix:
        expert, first = divmod(first, whole.stride(0))
    sizes, strides = (whole.shape[1:], whole.stride()[1:]) if of_matrix else (whole.shape, whole.stride())
    if tensor.shape[1:] != sizes[1:] or tensor.stride() != strides:
        raise Unsupported(_OTHER_TENSORS)
    row = first // max(strides[0], 1)
    return Place(module, parameter, None if len(tensor) == sizes[0] else (row, row + len(tensor)), expert)


@contextmanager
def _views() -> Iterator[None]:
    """Within it, parts of tensors remain views, also where a contiguous copy is asked for."""
    from torch import Tensor
    from torch.overrides import TorchFunctionMode

    class Views(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return args[0] if function in (Tensor.contiguous, Tensor.clone) else function(*args, **(kwargs or {}))

    with Views():
        yield


def with_stacks(places: Mapping[str, Place], loaded: Mapping[str, str]) -> dict[str, Place]:
    """With those stacks of experts' matrices that the checkpoint has as such, in place of the matrices. ``loaded``: see
    ``loaded_names``.
    """
    parameters = {str(place): Place(place.module, place.parameter) for place in places.values() if place.expert is not None}
    stacks = {
        name: parameters[in_model]
        for name, in_model in loaded.items()
        if in_model in parameters and name.endswith(f".{parameters[in_model].parameter}")
    }
    stacked = set(map(str, stacks.values()))
    return {name: place for name, place in places.items() if str(place) not in stacked} | stacks


def as_stored(model: Any, places: Mapping[str, Place], loaded: Mapping[str, str]) -> tuple[dict[str, Place], tuple[str, ...]]:
    """The places of a text model's tensors, by their names in a checkpoint of a multimodal model, and its ``towers``."""
    names = {in_model: stored for stored, in_model in loaded.items()}
    found = {name if place.is_part else names.get(str(place), name): place for name, place in places.items()}
    return found, towers(model, {str(place): name for name, place in found.items()}, loaded)
