"""How many bytes of a device tensors take, now and at most: as torch counts them on a GPU, and counted here on a CPU."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(Protocol):
    """Of tensors that were made since the counting began.

    Attributes:
        present, most: bytes that they take, and the most that they took at a time.
        reserved: the most that the allocator held; on a CPU there is none that would hold more.
    """

    @property
    def present(self) -> int: ...

    @property
    def most(self) -> int: ...

    @property
    def reserved(self) -> int: ...


@contextmanager
def allocations(device: str) -> Iterator[Allocations]:
    """Counts in the context."""
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        yield _OnGpu()
    else:
        with _OnCpu() as counted:
            yield counted


class _OnGpu:
    def __init__(self) -> None:
        self._before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    @property
    def present(self) -> int:
        return torch.cuda.memory_allocated() - self._before[0]

    @property
    def most(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before[0]

    @property
    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved() - self._before[1]


class _OnCpu(TorchDispatchMode):
    """Sees the results of all operations. Memory that is free again is noticed with the next one that takes some."""

    def __init__(self) -> None:
        super().__init__()
        self._alive: dict[int, tuple[Callable[[], bool], int]] = {}  # whether it is gone, and its bytes
        self.most = 0

    @property
    def present(self) -> int:
        self._alive = {key: entry for key, entry in self._alive.items() if not entry[0]()}
        return sum(num_bytes for _, num_bytes in self._alive.values())

    @property
    def reserved(self) -> int:
        return self.most

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        known = len(self._alive)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                key, is_gone, num_bytes = _memory_of(tensor)
                self._alive.setdefault(key, (is_gone, num_bytes))
        if len(self._alive) > known:
            self.most = max(self.most, self.present)
        return result


def _memory_of(tensor: torch.Tensor) -> tuple[int, Callable[[], bool], int]:
    """What tells its memory from any other, whether it is gone, and its bytes. Weights packed for oneDNN have no storage."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        reference = weakref.ref(tensor)
        return id(tensor), lambda: reference() is None, tensor.numel() * tensor.element_size()
    held = StorageWeakRef(storage)
    return held.cdata, held.expired, storage.nbytes()
