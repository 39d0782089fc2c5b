"""A device that is this machine's CPU under another name, and on which every read by the host is counted.

Tensors that are made on ``DEVICE``, and all that is computed from them, are marked. An operation that hands a value of a marked
tensor to the host, or whose result's shape depends on values, would wait for a GPU: it is a *read*. An operation on marked and
unmarked tensors together would fail on a GPU: it is *mixed*. Operations inside of torch's own code are not seen.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, get_default_nowrap_functions

import pipedec

DEVICE = torch.device("cpu", 0)  # equal to no other device; torch keeps its tensors where those of "cpu" are
_HOST = torch.device("cpu")
_PACKAGE = Path(pipedec.__file__).parent

# Each hands values to the host, or makes a tensor whose shape depends on values.
_READS = frozenset({
    "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__",
    "allclose", "argwhere", "bincount", "equal", "is_nonzero", "item", "masked_scatter", "masked_scatter_", "masked_select",
    "nonzero", "numpy", "tolist", "unique", "unique_consecutive",
})  # fmt: skip
_INDEXING = frozenset({"__getitem__", "__setitem__", "index_put", "index_put_", "index"})
_COPIES = frozenset({"copy_", "cpu", "to"})

Place = tuple[str, str]  # who works, and the line of pipedec that is at work


class Marked(Tensor):
    """A tensor of the counted device."""


class CountedDevice(TorchFunctionMode):
    """While it is entered, tensors that are made on ``DEVICE`` are marked, and ``reads`` and ``mixed`` operations are counted."""

    def __init__(self) -> None:
        super().__init__()
        self.reads: Counter[Place] = Counter()
        self.mixed: Counter[Place] = Counter()
        self._who = ""

    @contextmanager
    def working(self, who: str) -> Iterator[None]:
        """Count reads inside the context as those of ``who``."""
        before, self._who = self._who, who
        try:
            yield
        finally:
            self._who = before

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name == "device" and isinstance(args[0], Marked):
            return DEVICE
        if func in get_default_nowrap_functions():
            return func(*args, **kwargs)
        tensors = list(_tensors((args, kwargs)))
        is_marked = any(isinstance(tensor, Marked) for tensor in tensors)
        target = _target(name, args, kwargs)
        if is_marked and (name in _READS or target == _HOST or _has_dynamic_shape(name, args, kwargs)):
            self.reads[self._who, _line()] += 1
        elif is_marked and name not in _COPIES and _is_mixed(name, args, tensors):
            self.mixed[self._who, _line()] += 1
        result = func(*args, **kwargs)
        if target == _HOST or name in ("numpy", "tolist"):
            return _marked(result, torch.Tensor)
        return _marked(result, Marked) if target == DEVICE else result


def _name(func: Callable[..., Any]) -> str:
    """The name of an operation; of a property's getter that of the property."""
    name = getattr(func, "__name__", "")
    return getattr(getattr(func, "__self__", None), "__name__", name) if name == "__get__" else name


def _target(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.device | None:
    """The device on which an operation is asked to put its result; None if it is not asked."""
    if name == "cpu":
        return _HOST
    named = kwargs.get("device")
    if named is None and name == "to":
        named = next((value for value in args[1:2] if isinstance(value, str | torch.device)), None)
        if named is None and len(args) > 1 and isinstance(args[1], Tensor):
            named = DEVICE if isinstance(args[1], Marked) else _HOST
    return None if named is None else torch.device(named)


def _has_dynamic_shape(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if an operation needs values to know the shape of its result or what it writes."""
    if name in _INDEXING:
        indices = args[1] if isinstance(args[1], tuple | list) else (args[1],)
        return any(isinstance(index, Marked) and index.dtype in (torch.bool, torch.uint8) for index in indices)
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "repeat_interleave":
        return any(isinstance(value, Marked) for value in args[1:2]) and "output_size" not in kwargs
    return False


def _is_mixed(name: str, args: tuple[Any, ...], tensors: list[Tensor]) -> bool:
    """Return True if a device refuses these tensors together. It takes numbers, indices and values for slices from the host."""
    if name in _INDEXING:
        has_indices = bool(list(_tensors(args[1])))
        return not isinstance(tensors[0], Marked) or (has_indices and any(map(_is_of_host, args[2:3])))
    return any(map(_is_of_host, tensors))


def _is_of_host(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, Marked) and value.dim() > 0


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))
    elif isinstance(value, tuple | list):
        for one in value:
            yield from _tensors(one)


def _marked(value: Any, kind: type[Tensor]) -> Any:
    """``value`` with its tensors as those of a kind."""
    if isinstance(value, Tensor):
        return value.as_subclass(kind)
    return type(value)(_marked(one, kind) for one in value) if type(value) in (tuple, list) else value


def _line() -> str:
    """The innermost line of pipedec that is at work."""
    frame = inspect.currentframe()
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(_PACKAGE):
            return f"{path.relative_to(_PACKAGE)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
