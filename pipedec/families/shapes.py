"""A layer as caches, masks and plans know it: what it keeps of a token and which tokens a row sees, or its recurrent state.

Knows no torch: the functions of positions take numbers, arrays or tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]  # the sizes of a tensor


@dataclass(frozen=True)
class Reach:
    """Which earlier positions a row sees in a layer: the last ``size`` with its own, or, if ``is_chunk``, those of its chunk.

    Chunks are ``size`` consecutive positions from a multiple of ``size`` on (Llama 4).
    """

    size: int
    is_chunk: bool = False

    def includes(self, position: Any, other: Any) -> Any:
        """Whether a row at ``position`` sees ``other``, which is not after it."""
        if self.is_chunk:
            return other // self.size == position // self.size
        return other > position - self.size


@dataclass(frozen=True)
class KVShape:
    """A token in the cache of a layer: for each key-value head a key and a value, of these widths."""

    num_heads: int
    key_dim: int
    value_dim: int

    @property
    def num_values(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class LayerShape:
    """The attention of a layer.

    Attributes:
        num_heads, num_kv_heads: of queries; of keys and values.
        key_dim, value_dim: the widths of a query or key, and of a value.
        reach: which earlier positions a row sees; None for all.
        scale: factor of the scores; None for 1 / √key_dim.
        softcap: scores are bounded smoothly by ± this; None for unbounded.
        latents: the widths of two vectors that are cached instead of keys and values, which the layer computes from them each
            time (MLA of DeepSeek V2); None if keys and values are cached.
    """

    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    reach: Reach | None = None
    scale: float | None = None
    softcap: float | None = None
    latents: tuple[int, int] | None = None

    @property
    def group(self) -> int:
        """Query heads per key-value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def num_splits(self) -> int:
        """Parts in which kernels read the past of a row: enough for a single one to keep a GPU's memory busy."""
        return max(4, min(32, 1 << (64 // self.num_kv_heads).bit_length() - 1))

    @property
    def cached(self) -> KVShape:
        if self.latents is not None:
            return KVShape(1, *self.latents)
        return KVShape(self.num_kv_heads, self.key_dim, self.value_dim)


@dataclass(frozen=True)
class RecurrentShape:
    """A layer that keeps a *state* of the past, for each head a matrix, and of each row in flight a *stash*: what the row will
    add to the state when it is committed.

    Attributes:
        num_heads, num_key_heads: of states and values; of queries and keys. Each of these serves consecutive heads.
        key_dim, value_dim: the widths of a query or key, and of a value.
        num_decays: logarithms of decays for each head and token: 1, or one for each of ``key_dim`` (Kimi Delta Attention).
        channels: of the short convolution before queries, keys and values.
        kernel: tokens that the convolution sees, with its own.
    """

    num_heads: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    num_decays: int
    channels: int
    kernel: int

    @property
    def cached(self) -> KVShape:
        """No token takes memory."""
        return KVShape(0, 0, 0)

    def state_bytes(self, element_bytes: int) -> int:
        """Memory of the past of a request: states in float32, and the last inputs of the convolution as activations are kept."""
        return 4 * self.num_heads * self.key_dim * self.value_dim + self.channels * (self.kernel - 1) * element_bytes

    def stash_bytes(self, element_bytes: int) -> int:
        """Memory of a row in flight: key, update and decays in float32, and the input of the convolution."""
        numbers = self.num_key_heads * self.key_dim + self.num_heads * (self.value_dim + self.num_decays)
        return 4 * numbers + self.channels * element_bytes


Layer = LayerShape | RecurrentShape


@dataclass(frozen=True)
class ExpertsShape:
    """The routed experts of a layer, of which each row computes with a few.

    Attributes:
        num_experts: that a row may be routed to.
        top_k: experts of a row.
    """

    num_experts: int
    top_k: int


@dataclass(frozen=True)
class StateCounts:
    """The size of the pools of recurrent layers, on every stage the same.

    Attributes:
        states: requests with a lane, and further decode threads of their answers.
        rows: rows of trees in flight, of all requests.
        snapshots: states after prefixes of prompts, which other requests may adopt.
    """

    states: int
    rows: int
    snapshots: int = 0

    @property
    def allocated(self) -> tuple[int, int]:
        """States and stashes in the pools, of which a state and two stashes belong to no request."""
        return self.states + self.snapshots + 1, self.rows + 2
