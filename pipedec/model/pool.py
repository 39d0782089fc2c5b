"""The KV pool of one stage: the keys and values of all requests in one tensor, which is allocated once.

Knows neither the levels of a cache nor tokens nor requests, nor which slots are whose: rank 0 decides that for all stages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pipedec.device import to_device
from pipedec.model.cache import KVCache


@dataclass(frozen=True)
class KVShape:
    """What a slot of a pool holds: a key and a value for each of K key-value heads of L layers.

    Attributes:
        num_layers: L.
        num_kv_heads: K.
        head_dim: D.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class KVPool:
    """Keys and values of every layer of a stage for many requests, in one tensor.

    Args:
        slots: rounded down to whole blocks.
        block: slots that are handed out together.
        prompt: [L, 2, K, Q, D], keys and values of a learned prompt, for caches that are opened with it; or None.

    Attributes:
        slots: for rows of requests.
        tensor: [L, 2, K, slots and further ones for the learned prompt and for what nobody reads, D]. It never moves in memory.
        prompt_slots: where the learned prompt lies, Q slots behind those of requests.
        spare_slot: a slot that no request has, behind all others: for rows that only fill up a forward.

    Raises:
        ValueError: there is not one block.
    """

    def __init__(
        self, shape: KVShape, slots: int, block: int = 16, prompt: Tensor | None = None, device: torch.device | str = "cpu"
    ) -> None:
        if not 1 <= block <= slots:
            raise ValueError(f"a pool needs at least one block of at least one slot, not {slots} slots in blocks of {block}")
        self.block = block
        self.slots = slots // block * block
        num_prompt_tokens = 0 if prompt is None else prompt.shape[3]
        self.prompt_slots = range(self.slots, self.slots + num_prompt_tokens)
        self.spare_slot = self.slots + num_prompt_tokens
        self.tensor = _allocated(shape, self.slots + -(-(num_prompt_tokens + 1) // block) * block, device)
        if prompt is not None:
            self.tensor[:, :, :, self.slots : self.slots + num_prompt_tokens] = prompt

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.tensor.nbytes

    def cache(self, with_prompt: bool = False) -> KVCache:
        """A cache without slots (see ``KVCache.extend``).

        Args:
            with_prompt: the learned prompt lies in front of its slots.
        """
        return KVCache(self, self.prompt_slots if with_prompt else range(0))

    def write(self, layer: int, slots: slice | Tensor, keys_RKD: Tensor, values_RKD: Tensor) -> None:
        """Write rows of any caches to one layer.

        Args:
            slots: where; a slice, or int64 [R].
        """
        for part, rows_RKD in enumerate((keys_RKD, values_RKD)):
            if isinstance(slots, slice):
                self.tensor[layer, part, :, slots] = rows_RKD.transpose(0, 1)
            else:
                self.tensor[layer, part].index_copy_(1, slots, rows_RKD.transpose(0, 1))

    def copy(self, sources: Sequence[int], targets: Iterable[range]) -> None:
        """Copy the contents of some slots to others, in all layers. All are read before any is written."""
        rows = self.tensor.index_select(3, to_device(torch.tensor(sources, dtype=torch.int64), self.tensor.device))
        first = 0
        for target in targets:
            self.tensor.narrow(3, target.start, len(target)).copy_(rows.narrow(3, first, len(target)))
            first += len(target)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer block by block, each [blocks, block, K, D], without copying."""
        _, _, heads, slots, head_dim = self.tensor.shape
        of_blocks = self.tensor[layer].view(2, heads, slots // self.block, self.block, head_dim)
        keys, values = of_blocks.permute(0, 2, 3, 1, 4).unbind(0)
        return keys, values


@torch.inference_mode(False)  # a tensor made in inference mode could only be written there
def _allocated(shape: KVShape, slots: int, device: torch.device | str) -> Tensor:
    size = (shape.num_layers, 2, shape.num_kv_heads, slots, shape.head_dim)
    return torch.empty(size, dtype=shape.dtype, device=device)
