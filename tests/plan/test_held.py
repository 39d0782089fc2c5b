"""The memory traffic that a plan counts for quantized matrices is that of torch's operations, on a device without memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pipedec.formats import ROUNDED, WIDENED_VALUES, Format, Ggml, WeightFormat, stated_formats
from pipedec.formats.typical import DESCRIPTIONS
from pipedec.gguf import BLOCKS
from pipedec.model.formats import base, empty_matrix
from pipedec.plan.held import held

SHAPE = 28672, 8192
GPTQ = DESCRIPTIONS["gptq"]
FORMATS: dict[str, Format] = {
    **{name: stated_formats(stated).stated("model.layers.0.mlp.up_proj.weight") for name, stated in DESCRIPTIONS.items()},
    "gptq-8bit": stated_formats({**GPTQ, "bits": 8}).stated("model.layers.0.mlp.up_proj.weight"),
    **{type: Ggml(type) for type in BLOCKS},
    **ROUNDED,
}


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write, and the most that new tensors take at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = self.most = 0
        self._present: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        given, made = list(tensors_in(args)), list(tensors_in(result))
        read = given[1:] if func.__name__.startswith("copy_") else given
        if not func.__name__.startswith("empty"):
            self.num_bytes += sum(min(one.nbytes, one.untyped_storage().nbytes()) for one in [*read, *made])
        self._present = {key: found for key, found in self._present.items() if not found[0].expired()}
        for one in made:
            if all(one is not other for other in given):
                storage = StorageWeakRef(one.untyped_storage())
                self._present[storage.cdata] = storage, one.untyped_storage().nbytes()
        self.most = max(self.most, sum(size for _, size in self._present.values()))
        return result


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", FORMATS)
def test_widening_moves_and_takes_the_bytes_that_a_plan_counts(name: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = held(FORMATS[name], SHAPE, WeightFormat(dtype))
    planned = held(FORMATS[name], SHAPE, WeightFormat(dtype, kernels=False))
    assert kept.read_bytes(on_gpu=True) == kept.num_bytes == kept.kernel_bytes == planned.num_bytes
    monkeypatch.setitem(base.SLICE_VALUES, "meta", base.SLICE_VALUES["cuda"])
    numbers, traffic = getattr(torch, dtype), Traffic()
    matrix = empty_matrix(FORMATS[name], *SHAPE, numbers, torch.device("meta"))
    rows = torch.empty(1, SHAPE[1], dtype=numbers, device="meta")
    with traffic:
        matrix.linear(rows)
    assert planned.read_bytes(on_gpu=True) == pytest.approx(traffic.num_bytes, rel=0.05)
    assert traffic.most <= planned.widened_bytes * WIDENED_VALUES * 1.001 < 2.1 * traffic.most
