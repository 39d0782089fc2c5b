"""Memory that a stage takes beside what the plan of its partition counts with."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.checkpoints import save_tiny_llama
from support.clusters import clustered
from support.tiny_pair import tiny_tokenizer
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipedec.config import ClusterConfig, ServerConfig
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.build import resolve_partition
from pipedec.engine.local import LocalPipeline
from pipedec.plan.budgets import kv_slots
from pipedec.plan.partition import plan

# One stage on a card whose kind is of no matter here; 512 rows of a prompt, and then trees.
CARDS = {"cpu": "cpu", "cuda": "rtx3090"}
SIZES = {
    "cpu": {"layers": 2, "hidden": 256, "heads": 8, "vocab": 4096},
    "cuda": {"layers": 4, "hidden": 4096, "heads": 32, "vocab": 32000, "dtype": torch.bfloat16},
}
KV_BYTES = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
CONTEXT, PROMPT_TOKENS, TOKENS = 1024, 512, 32
MB = 1e6
LOADED_BYTES = {"cpu": 1 * MB, "cuda": 100 * MB}  # beside weights and cache: tables, and buffers that captures read


class OnGpu:
    """Bytes that tensors take which were made since the counting began; ``reserved`` is the most that the allocator held."""

    def __enter__(self) -> OnGpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        return self

    def __exit__(self, *error: object) -> None:
        pass

    @property
    def present(self) -> int:
        return torch.cuda.memory_allocated() - self._before[0]

    @property
    def most(self) -> int:
        return torch.cuda.max_memory_allocated() - self._before[0]

    @property
    def reserved(self) -> int:
        return torch.cuda.max_memory_reserved() - self._before[1]


class OnCpu(TorchDispatchMode):
    """The same by the results of all operations. Memory that is free again is noticed with the next one that takes some."""

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
        """There is no allocator that would hold more."""
        return self.most

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, known = function(*args, **(kwargs or {})), len(self._alive)
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                key, is_gone, num_bytes = memory_of(tensor)
                self._alive.setdefault(key, (is_gone, num_bytes))
        if len(self._alive) > known:
            self.most = max(self.most, self.present)
        return result


def memory_of(tensor: torch.Tensor) -> tuple[int, Callable[[], bool], int]:
    """What tells its memory from any other, whether it is gone, and its bytes. Weights packed for oneDNN have no storage."""
    try:
        storage = tensor.untyped_storage()
    except NotImplementedError:
        reference = weakref.ref(tensor)
        return id(tensor), lambda: reference() is None, tensor.numel() * tensor.element_size()
    held = StorageWeakRef(storage)
    return held.cdata, held.expired, storage.nbytes()


def partition(target: Path, device: str) -> ClusterConfig:
    dtype = {"cpu": "float32", "cuda": "bfloat16"}[device]
    one = {"one": {"stages": 1}}
    server = ServerConfig("localhost", {CARDS[device]: 1})
    return clustered(
        [server], one, target=str(target), draft="none", dtype=dtype, kv_cache_memory=KV_BYTES[device], max_model_len=CONTEXT
    )


def saved(path: Path, **sizes: object) -> Path:
    save_tiny_llama(path, max_position_embeddings=CONTEXT, **sizes)
    tiny_tokenizer().save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_stage_takes_the_memory_that_its_plan_counts(
    tmp_path: Path, device: str, record_property: Callable[[str, object], None]
) -> None:
    config = partition(saved(tmp_path / "target", **SIZES[device]), device)
    (stage,) = plan(config).stages
    spec = resolve_partition(config).replaced(device=device)
    kv_bytes = kv_slots(spec) * stage.kv_token_bytes
    held = stage.weight_bytes + kv_bytes
    with OnGpu() if device == "cuda" else OnCpu() as counted:
        pipeline = LocalPipeline.load(replace(spec, places=None))
        loaded = counted.present
        prompt = tuple(number % 290 + 5 for number in range(PROMPT_TOKENS))
        for method in ("pp", "pipedec-bestfirst"):
            request = TokenizedRequest(1, prompt, SamplingParams(max_tokens=TOKENS, ignore_eos=True), method=method)
            assert sum(len(verdict.tokens) for verdict in pipeline.run(request)) == TOKENS
        most, reserved = counted.most, counted.reserved
    total = held + stage.workspace_bytes
    figures = {
        f"weights ({stage.weight_bytes / MB:.0f} MB) and cache": (held, loaded),
        "beside them, at most": (stage.workspace_bytes, most - loaded),
        "reserved in all": (total, reserved),
    }
    if device == "cuda":
        free, memory = torch.cuda.mem_get_info()
        figures["in use on the card, with all that others have there"] = (total, memory - free)
    for name, (planned, measured) in figures.items():
        record_property(name, f"planned {planned / MB:.1f} MB, measured {measured / MB:.1f} MB")
    assert held <= loaded <= 1.02 * held + LOADED_BYTES[device], figures
    assert reserved <= total, figures
    # What the plan counts beside weights and cache has a fixed part, which hides errors of the part that grows with the model.
    smallest = partition(saved(tmp_path / "smallest", layers=1, hidden=32, vocab=300), device)
    if device == "cpu":
        assert most - loaded <= stage.workspace_bytes - plan(smallest).stages[0].workspace_bytes + MB, figures
