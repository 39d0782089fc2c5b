"""The time of single operations on the prediction tree, the KV cache and tree attention, by tree size.

Owns trees grown to a size, caches filled to a length, and attention as the paper writes it (Algorithm 1), with which the fast one
is compared. Knows neither weights nor pipelines.

Shape legend: R rows of the last layer, P past tokens, N rows in the tree, S = P + N, H query heads, K key-value heads, D head
size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from operator import methodcaller
from typing import Annotated, Literal

import torch
from torch import Tensor

from benchmarks.kernels.stopwatch import Stopwatch, check_memory, device_named
from benchmarks.output import Device
from pipedec.bench.options import Counts, Positive
from pipedec.bench.record import Row, header
from pipedec.core.errors import UserError
from pipedec.core.values import check_fields
from pipedec.engine.build import DTYPES
from pipedec.families import KVShape, LayerShape
from pipedec.flags import Help
from pipedec.model import KVCache, KVPool
from pipedec.model.attention import AttentionPlan, mask_of, tree_attention
from pipedec.tree import Advance, Candidates, PredictionTree, Visibility, visible_slots

_BLOCK = 256  # of a KV pool, as flash-attention needs it


@dataclass(frozen=True)
class OperationsConfig:
    """The shape and the sizes to measure; the default shape is six layers of the shipped target.

    Raises UserError for a number below 1, heads that are no multiple of kv_heads, or an unknown dtype or device.
    """

    sizes: Annotated[Counts, Help("Tree sizes in rows.")] = (32, 128, 512, 1024)
    past: Annotated[Positive, Help("Accepted tokens before the tree.")] = 512
    layers: Annotated[Positive, Help("Number of layers of the stage whose KV cache is pruned.")] = 6
    heads: Annotated[Positive, Help("Query heads (a 70B LLaMA: 64).")] = 6
    kv_heads: Annotated[Positive, Help("Key-value heads (a 70B LLaMA: 8).")] = 2
    head_dim: Annotated[Positive, Help("Head dimension (a 70B LLaMA: 128).")] = 32
    dtype: Annotated[Literal["float32", "float64", "bfloat16", "float16"], Help("Data type.")] = "float32"
    device: Device = "auto"
    repeats: Annotated[Positive, Help("Number of timed runs per operation.")] = 100
    width: int = 32
    children: int = 16
    runs: int = 1  # of slots in which each KV cache lies

    def __post_init__(self) -> None:
        check_fields(self)
        if self.heads % self.kv_heads:
            raise UserError(f"--heads {self.heads} must be a multiple of --kv-heads {self.kv_heads}")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def cache_bytes(self, size: int) -> int:
        """The KV cache with a tree of ``size`` rows, and the same again as scratch space for pruning."""
        return 2 * 2 * self.layers * self.kv_heads * self.head_dim * (self.past + size) * self.torch_dtype.itemsize

    def num_bytes(self, size: int) -> int:
        """Memory for all operations at ``size`` rows."""
        trees = 8 * (size + self.width) ** 2  # masks of two trees, and one in float32 for path probabilities
        repeated = 4 * self.heads * (self.head_dim + self.width) * (self.past + size) * self.torch_dtype.itemsize  # Algorithm 1
        return trees + self.cache_bytes(size) + repeated


def measure_operations(config: OperationsConfig, on_row: Callable[[Row], None] = lambda row: None) -> list[Row]:
    """One JSONL row for every operation at every size; ``on_row`` gets each as soon as it is known.

    Raises UserError if there is no such device, or its memory is too small.
    """
    device, largest = device_named(config.device), max(config.sizes)
    what = f"a tree of {largest} rows after {config.past} tokens"
    check_memory(what, config.num_bytes(largest), device, "lower --sizes, --past or --layers")
    first = header("operations", asdict(config) | {"device": device.type, "threads": torch.get_num_threads()})
    rows = []
    for size in config.sizes:
        for figures in (*measure_bookkeeping(config, size, device), *_measure_attention(config, size, device)):
            rows.append({**first, **figures})
            on_row(rows[-1])
    return rows


def measure_bookkeeping(config: OperationsConfig, size: int, device: torch.device) -> Iterator[Row]:
    """Time the work of a timestep besides forwards: grow the tree by a layer; commit and prune tree and cache, on hit and miss.

    A miss keeps nothing. A hit keeps the largest subtree below the root, so that pruning moves as many rows as possible.
    """
    stopwatch = Stopwatch(device, config.repeats)
    tree, candidates = grown_tree(config, size, device)
    yield _figures("grow", size, stopwatch.time_us(lambda: deepcopy(tree), lambda one: one.grow(candidates, config.width)))
    cache = filled_cache(config, size, device)
    verdicts = {"miss": config.children}  # every candidate token is below ``children``
    if size > 1:
        verdicts = {"hit": _largest_subtree_token(tree), **verdicts}
    for verdict, token in verdicts.items():
        advance = deepcopy(tree).advance_to([token])
        kept = {"verdict": verdict, "kept_rows": len(advance.kept)}
        tree_us = stopwatch.time_us(lambda: deepcopy(tree), methodcaller("advance_to", [token]))
        yield _figures("prune tree", size, tree_us) | kept
        yield _figures("prune cache", size, _time_cache(stopwatch, cache, advance)) | kept


def grown_tree(config: OperationsConfig, size: int, device: torch.device) -> tuple[PredictionTree, Candidates]:
    """A tree of ``size`` rows, grown layer by layer with a full last layer if possible, and candidates for the next layer.

    Like a running pipeline's, its storage has room for one more layer.
    """
    generator = torch.Generator().manual_seed(0)
    tree = PredictionTree(device, block=size + config.width)
    layer = tree.append(torch.zeros(1, dtype=torch.int64, device=device), torch.full((1,), -1, device=device))
    while (missing := size - tree.num_rows) > 0:
        layer = tree.grow(_drafted(layer, config.children, generator, device), missing % config.width or config.width)
    return tree, _drafted(layer, config.children, generator, device)


def filled_cache(config: OperationsConfig, size: int, device: torch.device) -> KVCache:
    """A cache of random keys and values: ``past`` accepted rows, then ``size`` rows of the tree."""
    [cache] = filled_caches(config, size, device, 1)
    cache.append(size)
    return cache


def filled_caches(config: OperationsConfig, size: int, device: torch.device, lanes: int) -> list[KVCache]:
    """Caches of one pool, each with ``past`` accepted rows of random keys and values and room for ``size`` more.

    The runs of the caches take turns, so that no two of a cache follow each other.
    """
    shapes, runs = [KVShape(config.kv_heads, config.head_dim, config.head_dim)] * config.layers, config.runs
    rows, spacing = -(-(config.past + size) // (runs * _BLOCK)) * _BLOCK, lanes + (runs > 1)
    pool = KVPool(shapes, config.torch_dtype, spacing * runs * rows, _BLOCK, device=device)
    for plane in pool.planes:
        plane.normal_()
    lane_runs = [tuple(((run * spacing + lane) * rows, rows) for run in range(runs)) for lane in range(lanes)]
    return [KVCache(pool, slots, cached=config.past) for slots in lane_runs]


@torch.inference_mode()
def _measure_attention(config: OperationsConfig, size: int, device: torch.device) -> list[Row]:
    """One layer's attention of the last rows over past and tree. A pipeline makes one plan per step, for all layers."""
    stopwatch, dtype = Stopwatch(device, config.repeats), config.torch_dtype
    tree, _ = grown_tree(config, size, device)
    mask_RN, positions_N = tree.tree_mask[-config.width :], tree.positions + config.past
    q_RHD = torch.randn(len(mask_RN), config.heads, config.head_dim, dtype=dtype, device=device)
    keys_KSD, values_KSD = torch.randn(2, config.kv_heads, config.past + size, config.head_dim, dtype=dtype, device=device)

    shape = LayerShape(config.heads, config.kv_heads, config.head_dim, config.head_dim)

    def make_plan() -> AttentionPlan:
        visibility = Visibility(mask_RN, config.past, lambda: positions_N)
        return AttentionPlan.for_tree(visibility, positions_N[-config.width :], [mask_of(shape)], dtype)

    def as_written() -> Tensor:
        seen_RS = visible_slots(mask_RN, mask_RN.new_zeros(len(mask_RN)), 0, config.past)
        return reference_attention(q_RHD, keys_KSD, values_KSD, config.past, seen_RS)

    plan = make_plan()
    attention = stopwatch.time_us(lambda: None, lambda _: tree_attention(q_RHD, keys_KSD, values_KSD, plan, shape))
    return [
        _figures("attention plan", size, stopwatch.time_us(lambda: None, lambda _: make_plan())),
        _figures("tree attention", size, attention),
        _figures("reference attention", size, stopwatch.time_us(lambda: None, lambda _: as_written())),
    ]


def _time_cache(stopwatch: Stopwatch, cache: KVCache, advance: Advance) -> dict[str, float]:
    past, size = cache.past_length, cache.tree_length

    def refill() -> None:
        cache.reset()
        cache.append(past, to_past=True)
        cache.append(size)

    times = stopwatch.time_us(refill, lambda _: cache.commit(advance.committed, advance.kept))
    refill()
    return times


def _drafted(layer: slice, children: int, generator: torch.Generator, device: torch.device) -> Candidates:
    """Random candidates below every row of ``layer``, with the tokens 0, 1, … in order of probability."""
    rows = torch.arange(layer.start, layer.stop)
    log_probs = torch.randn(len(rows), 2 * children, generator=generator).mul(2).log_softmax(-1).topk(children).values
    return Candidates(rows, torch.arange(children, device=device).expand(len(rows), -1), log_probs.to(device))


def _largest_subtree_token(tree: PredictionTree) -> int:
    """The token of the root's child with the largest subtree."""
    children = torch.nonzero(tree.parents == 0)[:, 0]
    largest = children[tree.tree_mask.sum(0)[children].argmax()]
    return int(tree.token_ids[largest])


def _figures(operation: str, size: int, time_us: dict[str, float]) -> Row:
    return {"operation": operation, "tree_rows": size, "time_us": time_us, "verdict": None, "kept_rows": None}


def reference_attention(q_RHD: Tensor, keys_KSD: Tensor, values_KSD: Tensor, past_length: int, seen_RS: Tensor) -> Tensor:
    """Paper Algorithm 1 as written: two score blocks, one softmax, two weighted sums. Slow."""
    group = q_RHD.shape[1] // keys_KSD.shape[0]
    keys_HSD, values_HSD = keys_KSD.repeat_interleave(group, 0), values_KSD.repeat_interleave(group, 0)
    scores_HRS = torch.einsum("rhd,hsd->hrs", q_RHD, keys_HSD) / q_RHD.shape[2] ** 0.5
    past_HRP = scores_HRS[:, :, :past_length].masked_fill(~seen_RS[:, :past_length], -torch.inf)
    tree_HRN = scores_HRS[:, :, past_length:].masked_fill(~seen_RS[:, past_length:], -torch.inf)
    probs_HRS = torch.cat((past_HRP, tree_HRN), dim=-1).softmax(-1)
    out_past = torch.einsum("hrp,hpd->rhd", probs_HRS[:, :, :past_length], values_HSD[:, :past_length])
    out_tree = torch.einsum("hrn,hnd->rhd", probs_HRS[:, :, past_length:], values_HSD[:, past_length:])
    return out_past + out_tree
