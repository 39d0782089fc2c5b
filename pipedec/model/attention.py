"""Attention of a forward's rows over the accepted past and the prediction tree (paper Algorithm 1).

Each row attends to its own request's cache only. The scores over past and tree share one softmax; the past needs no mask. A call
attends for one request, or by tables for several. Knows caches and masks, but neither weights nor tokens.

Shape legend: R rows in this step, P past tokens, N tree slots including this step's rows, S = P + N, H query heads,
K key-value heads, G = H / K, D head size, E hidden size, V vocabulary, L layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from pipedec.device import HOST
from pipedec.families import LayerShape, Reach
from pipedec.model.cache import KVPool, Reader
from pipedec.model.kernels.language import has_kernels
from pipedec.model.kernels.tree_attention import paged_attention, reference, tile_tokens, visible_slots
from pipedec.model.recurrent import Recurrence
from pipedec.model.row_tables import RowTables
from pipedec.model.rows import LaneRows
from pipedec.tree import Visibility

Mask = tuple[Reach | None, int]  # on which the mask of a tree's folded queries depends: reach, query heads per key-value head


@dataclass(frozen=True)
class LayersShape:
    """Shape and type of a stage's layers, as far as attention depends on them."""

    layers: Mapping[int, LayerShape]  # those with attention, by their number in the stage
    hidden_size: int  # E
    dtype: torch.dtype  # that of activations, keys and values

    @property
    def masks(self) -> list[Mask]:
        """All that differ."""
        return list(dict.fromkeys(mask_of(layer) for layer in self.layers.values()))

    @property
    def tile_tokens(self) -> list[int]:
        """The sizes of tiles that kernels use."""
        return list(dict.fromkeys(tile_tokens(layer, self.dtype) for layer in self.layers.values()))

    @property
    def has_reach(self) -> bool:
        """Whether a row of some layer does not see all earlier positions."""
        return any(layer.reach is not None for layer in self.layers.values())


def mask_of(layer: LayerShape) -> Mask:
    return layer.reach, layer.group


@dataclass(frozen=True)
class AttentionPlan:
    """The masks of one step, prepared once and used by every layer.

    ``biases`` has for each mask the tensor that is added to the scores, 0 or −inf: [R, S] in prefill (None = plain causal
    attention from slot 0), else [R·G, S] for the folded queries (None = all slots are seen).
    """

    is_prefill: bool  # the rows directly follow the past and attend to each other causally
    biases: dict[Mask, Tensor | None]

    @classmethod
    def for_prefill(
        cls, past_length: int, rows: int, masks: Iterable[Mask], dtype: torch.dtype, device: torch.device
    ) -> AttentionPlan:
        """For a chunk of the prompt, directly after the past."""
        biases: dict[Mask, Tensor | None] = {}
        for reach, group in masks:
            if reach is None and past_length == 0:
                biases[reach, group] = None
                continue
            slots_S = torch.arange(past_length + rows, device=device)  # their numbers are positions
            positions_R1 = slots_S[past_length:, None]
            seen_RS = slots_S <= positions_R1
            if reach is not None:
                seen_RS &= reach.includes(positions_R1, slots_S)
            biases[reach, group] = torch.zeros(seen_RS.shape, dtype=dtype, device=device).masked_fill_(~seen_RS, -torch.inf)
        return cls(True, biases)

    @classmethod
    def for_tree(
        cls, visibility: Visibility, positions_R: Tensor, masks: Iterable[Mask], dtype: torch.dtype, num_prompt_slots: int = 0
    ) -> AttentionPlan:
        """For rows of prediction trees.

        Args:
            positions_R: int64 position ids of the rows.
            num_prompt_slots: for mask rows (BiTA): length Q of the learned prompt in front of the keys, which has no positions
                and is in every reach.
        """
        seen, shared, device = visibility.seen, visibility.shared, positions_R.device
        # A single row that sees all needs no bias, as in plain decoding. A GPU is not asked: it would have to be waited for.
        sees_all = seen.shape[0] == 1 and seen.device == HOST and bool(seen.all())
        visibility = visibility.to(device)
        biases: dict[Mask, Tensor | None] = {}
        for reach, group in masks:
            if reach is None and sees_all:
                biases[reach, group] = None
                continue
            seen = visibility.seen
            bias = torch.zeros(seen.shape[0], group, num_prompt_slots + shared + seen.shape[1], dtype=dtype, device=device)
            if reach is not None:
                near_RS = in_reach(visibility, positions_R, reach)
                seen = seen & near_RS[:, shared:]
                bias[:, :, num_prompt_slots : num_prompt_slots + shared].masked_fill_(~near_RS[:, None, :shared], -torch.inf)
            bias[:, :, num_prompt_slots + shared :].masked_fill_(~seen[:, None], -torch.inf)
            biases[reach, group] = bias.flatten(0, 1)
        return cls(False, biases)


class RowAttention(Protocol):
    """Attention of the rows of a forward, layer by layer."""

    def attend(self, q_RHD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        """out_RHD in one layer of the stage, in whose cache the rows' keys and values have been written.

        Args:
            q_RHD: rotated queries.
            sinks_H: a score of each head for attending to nothing (gpt-oss); None without.
        """


class LatentAttention(RowAttention, Protocol):
    """Attention that also serves layers that cache latents."""

    def latents(self, layer: int) -> tuple[Tensor, Tensor]:
        """The cached latents of all slots that any of the rows attends to, [1, S, X] each."""

    def attend_expanded(self, q_RHD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, layer: int) -> Tensor:
        """As ``attend``, over the keys and values that were computed from ``latents``."""


@dataclass(frozen=True)
class Rows:
    """The rows of a forward, as layers see them."""

    positions: Tensor  # int64 [R]
    lengths: Tensor  # int64 [R], the sequence length that each row's rotary frequencies depend on, for rope types that have one
    slots: slice | Tensor  # where their keys and values go in the pool: int64 [R], or a slice if they are consecutive
    pool: KVPool
    attention: RowAttention
    recurrence: Recurrence | None = None
    num_rows: Tensor | None = None  # int32 [1], of a captured forward: how many rows, the first ones, are not padding


@dataclass(frozen=True)
class AttentionPart:
    """The ordinary rows or the mask rows of one request, which share a plan, and the keys and values that they attend to."""

    rows: slice
    plan: AttentionPlan
    slots: list[range]
    reader: Reader

    @classmethod
    def of_tokens(cls, lane: LaneRows, first: int, shape: LayersShape) -> AttentionPart:
        """The ordinary rows of a lane whose rows begin at ``first``."""
        tokens, positions_R, cache = lane.num_tokens, lane.positions, lane.cache
        if lane.visibility is None:
            plan = AttentionPlan.for_prefill(cache.past_length, tokens, shape.masks, shape.dtype, positions_R.device)
        else:
            plan = AttentionPlan.for_tree(lane.visibility_of_tokens(), positions_R[:tokens], shape.masks, shape.dtype)
        slots = cache.ranges(0, cache.length + tokens)
        return cls(slice(first, first + tokens), plan, slots, cache.pool.reader(slots))

    @classmethod
    def of_masks(cls, lane: LaneRows, first: int, shape: LayersShape) -> AttentionPart:
        """The mask rows of a lane whose rows begin at ``first``."""
        positions_R, prompt = lane.positions[lane.num_tokens :], len(lane.cache.prompt)
        plan = AttentionPlan.for_tree(lane.visibility_of_masks(), positions_R, shape.masks, shape.dtype, prompt)
        rows, slots = slice(first + lane.num_tokens, first + lane.num_rows), lane.slots()
        return cls(rows, plan, slots, lane.cache.pool.reader(slots))

    @property
    def num_slots(self) -> int:
        return sum(map(len, self.slots))


class TableAttention:
    """Attention of a forward's rows in one launch for all requests. No layer caches latents."""

    def __init__(self, tables: RowTables, positions_R: Tensor, pool: KVPool, shape: LayersShape) -> None:
        self._tables, self._positions_R, self._pool, self._layers = tables, positions_R, pool, shape.layers
        self._visible: dict[Reach | None, Tensor] = {}

    def attend(self, q_RHD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        """See ``RowAttention``."""
        shape, pool, (keys_KSD, values_KSD) = self._layers[layer], self._pool, self._pool.keys_values(layer)
        places = self._tables, self._positions_R
        if has_kernels(q_RHD.device, q_RHD.dtype):
            return paged_attention(q_RHD, keys_KSD, values_KSD, *places, shape, pool.block, pool.prompt_slots, sinks_H)
        if shape.reach not in self._visible:
            num_slots = keys_KSD.shape[1]
            self._visible[shape.reach] = visible_slots(*places, shape.reach, pool.block, num_slots, pool.prompt_slots)
        return reference(q_RHD, keys_KSD, values_KSD, self._visible[shape.reach], shape, sinks_H)


class LaneAttention:
    """Attention of a forward's rows, request by request. The caches have room for them."""

    def __init__(self, lanes: Sequence[LaneRows], shape: LayersShape) -> None:
        self._layers = shape.layers
        self._parts = list[AttentionPart]()
        first = 0
        for lane in lanes:
            if lane.num_tokens:
                self._parts.append(AttentionPart.of_tokens(lane, first, shape))
            if lane.num_masks:
                self._parts.append(AttentionPart.of_masks(lane, first, shape))
            first += lane.num_rows

    def attend(self, q_RHD: Tensor, layer: int, sinks_H: Tensor | None = None) -> Tensor:
        cached = [part.reader(layer) for part in self._parts]
        return self._attend(q_RHD, cached, layer, sinks_H)

    def latents(self, layer: int) -> tuple[Tensor, Tensor]:
        first, second = zip(*(part.reader(layer) for part in self._parts), strict=True)
        return torch.cat(first, 1), torch.cat(second, 1)

    def attend_expanded(self, q_RHD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, layer: int) -> Tensor:
        sizes = [part.num_slots for part in self._parts]
        cached = list(zip(keys_KSD.split(sizes, 1), values_KSD.split(sizes, 1), strict=True))
        return self._attend(q_RHD, cached, layer, None)

    def _attend(self, q_RHD: Tensor, cached: list[tuple[Tensor, Tensor]], layer: int, sinks_H: Tensor | None) -> Tensor:
        parts, shape = self._parts, self._layers[layer]
        if len(parts) == 1:
            return tree_attention(q_RHD, *cached[0], parts[0].plan, shape, sinks_H)
        return torch.cat(
            [tree_attention(q_RHD[part.rows], *own, part.plan, shape, sinks_H) for part, own in zip(parts, cached, strict=True)]
        )


def tree_attention(
    q_RHD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, plan: AttentionPlan, shape: LayerShape, sinks_H: Tensor | None = None
) -> Tensor:
    """Attention of a step's rows over past and tree (paper Algorithm 1): out_RHD.

    Args:
        q_RHD: rotated queries.
        keys_KSD, values_KSD: rotated keys, and values, of past, tree and this step's rows.
        plan: the plan of this step; its masks include that of the layer, ``shape``.
        sinks_H: see ``RowAttention.attend``.
    """
    rows, heads, head_dim = q_RHD.shape
    kv_heads = keys_KSD.shape[0]
    group, bias = heads // kv_heads, plan.biases[mask_of(shape)]
    if plan.is_prefill:  # key-value heads are the batch: all share one [R, S] bias, and keys are expanded without a copy
        queries = q_RHD.view(rows, kv_heads, group, head_dim).permute(1, 2, 0, 3)
        keys, values = (part[:, None].expand(-1, group, -1, -1) for part in (keys_KSD, values_KSD))
        sinks = None if sinks_H is None else sinks_H.view(kv_heads, group, 1)
        out = attend(queries, keys, values, bias, shape, sinks, is_causal=bias is None)
        return out.permute(2, 0, 1, 3).reshape(rows, heads, -1)
    # The queries are folded to [1, K, R·G, D]: heads that share a key-value head become rows, so that keys need not be repeated.
    folded = q_RHD.view(rows, kv_heads, group, head_dim).transpose(0, 1).reshape(1, kv_heads, rows * group, head_dim)
    sinks = None if sinks_H is None else sinks_H.view(kv_heads, 1, -1).expand(-1, rows, -1).flatten(1)
    out = attend(folded, keys_KSD[None], values_KSD[None], bias, shape, sinks)
    return out.view(kv_heads, rows, group, -1).transpose(0, 1).reshape(rows, heads, -1)


def attend(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, shape: LayerShape, sinks: Tensor | None,
    is_causal: bool = False,
) -> Tensor:  # fmt: skip
    """Attention of a layer in one call.

    Args:
        queries: [..., T, D].
        keys, values: [..., S, D].
        bias: added to the scores [..., T, S]; or None.
        shape: of the layer.
        sinks: [..., T], a further score of each query, which attends to nothing; or None.
        is_causal: T = S, and each query attends to the slots up to its own.

    Returns:
        out [..., T, D].
    """
    if shape.softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=bias, is_causal=is_causal, scale=shape.scale
        )
    if is_causal:
        size = queries.shape[-2]
        bias = torch.full((size, size), -torch.inf, dtype=queries.dtype, device=queries.device).triu_(1)
    out, lse = attention_with_lse(queries, keys, values, bias, shape)
    return out if sinks is None else beside_sinks(out, lse, sinks)


def attention_with_lse(
    queries: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None, shape: LayerShape
) -> tuple[Tensor, Tensor]:
    """``attend`` in plain tensor operations, without sinks: out [..., T, D], and the log-sum-exp of its scores [..., T], in
    float32 or wider.
    """
    scale = queries.shape[-1] ** -0.5 if shape.scale is None else shape.scale
    scores = queries @ keys.transpose(-1, -2) * scale
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
    if shape.softcap is not None:
        scores = (scores / shape.softcap).tanh() * shape.softcap
    if bias is not None:
        scores = scores + bias
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp().to(values.dtype) @ values, lse


def beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Attention that shares its softmax with one more score per query, which has no value."""
    return (out * (lse - sinks).sigmoid()[..., None]).to(out.dtype)


def in_reach(visibility: Visibility, positions_R: Tensor, reach: Reach) -> Tensor:
    """bool [R, S]: the slots that a row sees in such a layer, by their positions."""
    shared_positions = torch.arange(visibility.shared, device=positions_R.device)
    positions_S = torch.cat((shared_positions, visibility.slot_positions()[: visibility.seen.shape[1]]))
    seen: Tensor = reach.includes(positions_R[:, None], positions_S)
    return seen
