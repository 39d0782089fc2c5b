"""The shipped models in one process, target and draft in float32, on the computed clock of the paper's clusters.

That clock leaves out rank 0's own work, so that methods which tune themselves by times do the same every time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, cached_property

import torch

from pipedec.bench.sweep.pipelines import ModelPair, emulated
from pipedec.config import paper_cluster
from pipedec.decoding import Experience, LaneSizes, Resources, Scheduler
from pipedec.directories import reference_pair, reference_threads
from pipedec.engine.build import load_drafter, load_stage
from pipedec.engine.local import LocalPipeline
from pipedec.kv import KVManager

PLAIN = ModelPair()
THREADS = ModelPair(reference_threads() / "target", str(reference_threads() / "draft"))
TARGETS = {PLAIN: reference_pair() / "target", THREADS: reference_threads() / "target"}
PRESETS = {"1": ("paper-14", 1), "4": ("paper-14", 4), "14": ("paper-14", None), "14 in 7": ("paper-7", None)}
SLOTS = 2048
CPU = torch.device("cpu")


class Models:
    """The weights of a pair in one shape, which is a key of PRESETS. Pipelines share them, so only one of these may run."""

    def __init__(self, pair: ModelPair, shape: str) -> None:
        spec = emulated(paper_cluster(), *PRESETS[shape], pair, own_work=False).spec
        assert spec.emulation is not None and (spec.dtype, spec.settings.numbers.draft_dtype) == ("float32", "float32")
        self.spec = replace(spec.replaced(device="cpu"), emulation=replace(spec.emulation, kv_tokens=SLOTS))
        self.stages = [load_stage(self.spec, rank, CPU) for rank in range(1, self.spec.settings.cut.stages + 1)]
        self._drafter = load_drafter(self.spec, CPU)

    def new_kv(self, slots: int = SLOTS) -> KVManager:
        """The books of so many slots of KV memory."""
        return KVManager(slots, self.spec.kv_block, self.spec.shares_prefixes)

    def pipeline(self, kv: KVManager, lane_sizes: LaneSizes = LaneSizes()) -> LocalPipeline:
        """A pipeline that has learned nothing yet."""
        spec, groups = self.spec, self.spec.topology.num_groups
        resources = Resources(Experience(groups), self._drafter, CPU, spec.trained_masks)
        return LocalPipeline(spec, self.stages, Scheduler(resources, kv, spec.knee, lane_sizes))

    @cached_property
    def roomy(self) -> LocalPipeline:
        """The pipeline of all requests that need no other."""
        return self.pipeline(self.new_kv())


@cache
def models(pair: ModelPair, shape: str) -> Models:
    return Models(pair, shape)
