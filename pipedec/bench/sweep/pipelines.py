"""The pipelines of a sweep: emulated presets, also with other numbers of stages; a small model alone; or this machine itself.

Owns a row's fields about the cluster. Knows nothing of methods, prompts and results.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from pipedec.bench.record import Row
from pipedec.bench.sweep.trees import BITA
from pipedec.config import ClusterConfig, DeviceConfig, PartitionConfig, ServerConfig
from pipedec.engine.spec import Cut, Models, PipelineSpec
from pipedec.model import BitaConfig
from pipedec.plan.emulation import Emulation, with_stages
from pipedec.plan.partition import Plan
from pipedec.plan.partition import plan as make_plan

SLM = "slm"


@dataclass(frozen=True)
class Pair:
    """The real models that run: target, draft, the small model of ``slm``, and the target's BiTA."""

    target: Path | None = None
    draft: str | None = None
    small: Path | None = None
    bita: Path | None = None

    @property
    def models(self) -> Models:
        """What a pipeline of the pair is made of."""
        return Models(self.target, self.draft, self.bita)


@dataclass(frozen=True)
class SmallModel:
    """The model and device that ``slm`` emulates: the paper runs Llama 3.1 8B on one L40 (paper §4.2)."""

    model: str = "llama-3.1-8b"
    device: str = "l40"


@dataclass(frozen=True)
class Shape:
    """One pipeline: what runs (``spec``), a row's fields about it (``cluster``), and the ``methods`` that a sweep runs on it."""

    preset: str | None
    spec: PipelineSpec
    cluster: Row
    methods: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For progress bars and titles."""
        stages = f"{self.spec.num_stages} stages" if self.spec.num_stages > 1 else "1 stage"
        name = f"{self.preset} ({stages})" if self.preset else stages
        return f"{name}, {self.spec.bita.name}" if self.spec.bita and BITA in self.methods else name


def emulated(config: ClusterConfig, preset: str, stages: int | None, pair: Pair, slow_motion: float) -> Shape:
    """The partition ``preset`` of ``config``, or ``stages`` devices of the kind of its first.

    Raises:
        UserError: no such partition, or the models have too few layers.
    """
    cut = config if stages is None else with_stages(config, preset, stages)
    plan = make_plan(cut, preset)
    spec = PipelineSpec.create(pair.models, Cut(len(plan.stages), plan.num_groups))
    return Shape(preset, replace(spec, emulation=Emulation.of_plan(plan, slow_motion)), _cluster(plan, config.draft))


def small_model_alone(config: ClusterConfig, small: SmallModel, pair: Pair, slow_motion: float) -> Shape:
    """``slm``: the pair's small model runs and emulates ``small`` on one device."""
    partition = PartitionConfig(1, devices=(DeviceConfig("server", small.device),))
    alone = ClusterConfig(
        small.model, (ServerConfig("server", {small.device: 1}),), {SLM: partition}, dtype=config.dtype, network=config.network
    )
    plan = make_plan(alone, SLM)
    spec = replace(_small_spec(pair), emulation=Emulation.of_plan(plan, slow_motion))
    return Shape(SLM, spec, _cluster(plan, None), (SLM,))


def as_it_is(stages: int, pair: Pair) -> Shape:
    """Real stages on this machine, nothing emulated."""
    return _real(PipelineSpec.create(pair.models, Cut(stages)))


def small_model_as_it_is(pair: Pair) -> Shape:
    """``slm`` on this machine, nothing emulated."""
    return replace(_real(_small_spec(pair)), methods=(SLM,))


@cache
def digest(path: Path) -> str:
    """Identifies a checkpoint's weights: the first digits of their SHA-256."""
    total = hashlib.sha256()
    for part in sorted(path.glob("*.safetensors")):
        total.update(part.read_bytes())
    return total.hexdigest()[:12]


def pair_digest(spec: PipelineSpec) -> str:
    """Identifies the weights of target and draft."""
    return digest(spec.target) + (digest(spec.draft) if spec.draft else "")


def bita_row(spec: PipelineSpec) -> Row:
    """The field ``bita`` of a row: the BiTA that decoded it."""
    assert spec.bita is not None
    config = BitaConfig.from_directory(spec.bita)
    return {
        "name": spec.bita.resolve().name,
        "digest": digest(spec.bita),
        "prompting": config.prompting,
        "masks": config.num_masks,
        "prompt_tokens": config.num_prompt_tokens,
    }


def _small_spec(pair: Pair) -> PipelineSpec:
    small = pair.small or PipelineSpec.create(Models(pair.target, pair.draft), Cut(1)).draft
    return PipelineSpec.create(Models(small, "none"), Cut(1))


def _real(spec: PipelineSpec) -> Shape:
    cluster = {"stages": spec.num_stages, "groups": spec.topology.num_groups, "dtype": spec.dtype}
    return Shape(None, spec, {**cluster, "model": None, "draft": None, "devices": [], "draft_device": None, "fits": True})


def _cluster(plan: Plan, draft: str | None) -> Row:
    return {
        "stages": len(plan.stages),
        "groups": plan.num_groups,
        "model": plan.target,
        "draft": draft,
        "dtype": plan.dtype,
        "devices": [stage.placement.device for stage in plan.stages],
        "draft_device": plan.draft.placement.device if plan.draft else None,
        "fits": not plan.problems,
    }
