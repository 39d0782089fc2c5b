"""A captured layer takes few kernels, and attention reads a past about once.

With torch's operations around the same attention a layer took 25 kernels, and one with norms of each head's queries and keys 35.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import save_tiny
from support.kv_caches import tree
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

kernels = pytest.importorskip("support.kernels")

from triton.runtime import interpreter  # noqa: E402

from pipedec.families import LayerShape, model_config  # noqa: E402
from pipedec.model import KVCache, KVPool, StageModel  # noqa: E402
from pipedec.model.captured_graphs import Run  # noqa: E402
from pipedec.model.kernels.tree_attention import paged_attention, tile_tokens  # noqa: E402
from pipedec.model.row_tables import RowTables  # noqa: E402

MOST_KERNELS = 11
FUSED = ["_norm", "_rope_write", "_attend", "_merge", "_norm", "_gate"]


class Operations(TorchDispatchMode):
    """Counts what torch computes: no views, and no memory that is only taken."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, found = function.overloadpacket.__name__, function(*args, **kwargs or {})
        memory = {part.untyped_storage().data_ptr() for part in args if isinstance(part, Tensor)}
        results = [part for part in pytree.tree_leaves(found) if isinstance(part, Tensor)]
        is_view = not name.endswith("_") and all(part.untyped_storage().data_ptr() in memory for part in results)
        if not is_view and name not in ("empty", "new_empty", "empty_like"):
            self.names.append(name)
        return found


def captured(directory: Path, layers: range) -> tuple[list[str], list[str]]:
    """The kernels of our own, and torch's operations, in the graph of a forward through these layers."""
    with kernels.recorded():  # layers choose kernels when they are made
        stage = StageModel.load(directory, layers, torch.bfloat16, "cpu", model_config(directory))
    stage.uses_tables = False
    found: list[tuple[list[str], list[str]]] = []

    def capture(run: Run) -> Run:
        with Operations() as operations, kernels.recorded() as launches:
            run()
        found.append(([kernel.__name__ for kernel, *_ in launches], operations.names))
        return lambda: None

    stage.capture = capture
    cache = KVCache(stage.make_pool(64), ((0, 64),))
    stage.forward(torch.zeros(8, stage.config.hidden_size, dtype=torch.bfloat16), [tree(cache, 8)])
    return found[0]


@pytest.mark.parametrize(("family", "changes"), [("llama", {}), ("llama", {"attention_bias": True}), ("qwen3", {"head_dim": 16})])
def test_a_dense_layer_takes_ten_kernels(tmp_path, family, changes):
    """The other four are products. What is counted once for a stage is left out."""
    save_tiny(family, tmp_path, **changes)
    (one, of_one), (three, of_three) = captured(tmp_path, range(1, 2)), captured(tmp_path, range(1, 4))
    assert one == FUSED and three == 3 * FUSED
    num_operations = len(of_three) - len(of_one)
    assert num_operations == of_three.count("linear") - of_one.count("linear") == 2 * 4
    assert len(FUSED) + num_operations // 2 <= MOST_KERNELS


def test_a_layer_with_norms_after_its_parts_takes_twelve(tmp_path):
    """OLMo 2, whose queries and keys are normed whole."""
    save_tiny("olmo2", tmp_path, kv_heads=4)
    (one, of_one), (three, of_three) = captured(tmp_path, range(1, 2)), captured(tmp_path, range(1, 4))
    assert (len(three) - len(one), len(of_three) - len(of_one)) == (2 * 8, 2 * 4)


def loaded_bytes(monkeypatch, memory: list[Tensor], compute: Run) -> int:
    """Bytes that kernels load from these tensors, each time that they load them."""
    spans = [(part.data_ptr(), part.data_ptr() + part.untyped_storage().nbytes(), part.itemsize) for part in memory]
    load, total = interpreter.InterpreterBuilder.create_masked_load, 0

    def counted(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        nonlocal total
        for first, end, size in spans:
            total += size * int(((pointers.data >= first) & (pointers.data < end) & mask.data).sum())
        return load(self, pointers, mask, *others)

    with monkeypatch.context() as patches, kernels.interpreted():
        patches.setattr(interpreter.InterpreterBuilder, "create_masked_load", counted)
        compute()
    return total


@pytest.mark.parametrize("is_tree", [False, True])
def test_attention_reads_a_past_of_any_length_once(monkeypatch, is_tree):
    """4,097 slots, one more than a power of two: in plain decoding, and for a whole tile of a tree's rows."""
    shape, dtype, length = LayerShape(8, 2, 16, 16), torch.float16, 4097
    rows = tile_tokens(shape, dtype) if is_tree else 1
    pool = KVPool([shape.cached], dtype, 8192, 16)
    for plane in pool.planes:
        plane.fill_(torch.nan)  # slots of others would show
    cache = KVCache(pool, ((4096, 64), (16, 4080)))  # blocks that are not in order
    cache.append(length - rows, to_past=True)
    lane, past = tree(cache, rows), cache.ranges(0, length)
    for plane in pool.planes:
        for run in past:
            plane[:, :, :, run.start : run.stop].normal_()
    tables, queries = RowTables.of([lane], [tile_tokens(shape, dtype)], False), torch.ones(rows, 8, 16, dtype=dtype)
    keys, values = pool.keys_values(0)
    results: list[Tensor] = []

    def attend() -> None:
        results.append(paged_attention(queries, keys, values, tables, lane.positions, shape, pool.block))

    moved = loaded_bytes(monkeypatch, pool.planes, attend)
    cached = 2 * length * shape.num_kv_heads * shape.key_dim * dtype.itemsize
    assert results[0].isfinite().all()
    assert cached <= moved <= 1.1 * cached
