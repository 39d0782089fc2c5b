"""The pipelines of a sweep.

Emulated presets, also with other numbers of stages; a small model alone; this machine itself; a cluster that is running; and
partitions of a ``cluster.yaml``, launched one after another. Owns a row's fields about them. Knows nothing of methods, prompts
and results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipedec.bench.record import Row, key_of
from pipedec.bench.sweep.trees import BITA
from pipedec.checkpoints import weights_digest
from pipedec.client.running import Running
from pipedec.config import NONE, ClusterConfig, PartitionConfig, ServerConfig, Settings
from pipedec.directories import cache_directory
from pipedec.engine.build import resolve
from pipedec.messages import RunDescription
from pipedec.model import BitaConfig
from pipedec.plan.emulation import Emulation, with_stages
from pipedec.plan.partition import Plan
from pipedec.plan.partition import plan as make_plan
from pipedec.plan.spec import PipelineSpec

SLM = "slm"
_DIGITS = 12  # of a digest in a row


@dataclass(frozen=True)
class ModelPair:
    """The real models that run: target, draft, the small model of ``slm``, and the target's BiTA."""

    target: Path | None = None
    draft: str | None = None
    small: Path | None = None
    bita: Path | None = None

    def settings(self, **others: Any) -> Settings:
        """The settings of a pipeline of this pair, in float32."""
        return Settings.of(target=self.target, draft=self.draft, bita=self.bita, dtype="float32", **others)


@dataclass(frozen=True)
class SmallModel:
    """The model and device that ``slm`` emulates: the paper runs Llama 3.1 8B on one L40 (paper §4.2)."""

    model: str = "llama-3.1-8b"
    device: str = "l40"


@dataclass(frozen=True)
class Shape:
    """A pipeline that the sweep starts here. All shapes have these attributes, before any of them runs:

    Attributes:
        preset: the partition, emulated or launched; None if there is none.
        cluster, pair: a row's fields about the pipeline and about its models.
        methods: those that the sweep measures.
        bita: a row's field about its BiTA. Raises UserError if there is none.
        trained_masks: of its BiTA; 0 if it has none.
        dtype: in which it computes (that of ``cluster`` may be emulated).
        scope: answers of pipelines of one scope must be equal.
        label: for progress bars and titles.
    """

    preset: str | None
    spec: PipelineSpec
    cluster: Row
    methods: tuple[str, ...] = ()

    def dispatched(self, dispatch: str) -> Shape:
        """The same pipeline with another dispatch, which its rows name if it is not the usual one."""
        if dispatch == self.spec.settings.cluster.dispatch:
            return self
        return replace(self, spec=self.spec.replaced(dispatch=dispatch), cluster={**self.cluster, "dispatch": dispatch})

    @cached_property
    def pair(self) -> Row:
        draft = str(self.spec.draft) if self.spec.draft else None
        return {"target": str(self.spec.target), "draft": draft, "digest": pair_digest(self.spec)}

    @property
    def bita(self) -> Row:
        assert self.spec.bita is not None
        return bita_row(self.spec.bita)

    @property
    def trained_masks(self) -> int:
        return self.spec.trained_masks

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def is_emulated(self) -> bool:
        return self.spec.emulation is not None

    @property
    def scope(self) -> str:
        """All pipelines of one pair."""
        return key_of(self.pair)

    @property
    def label(self) -> str:
        name = _label(self.preset, self.spec.settings.cut.stages)
        return f"{name}, {self.spec.bita.name}" if self.spec.bita and BITA in self.methods else name


@dataclass(frozen=True)
class RunningShape:
    """A cluster that is running. What is known of it is its description."""

    running: Running
    methods: tuple[str, ...] = ()

    preset = None
    is_emulated = False

    @property
    def cluster(self) -> Row:
        described = self.running.description
        topology = self.running.topology
        return {
            "stages": topology.num_stages, "groups": topology.num_groups, "model": None, "draft": None,
            "dtype": described.settings.numbers.dtype,
            "devices": [rank.device for rank in described.ranks if rank.rank > 0],
            "draft_device": next((rank.device for rank in described.ranks if rank.rank == 0), None), "fits": True,
            "hosts": [rank.host for rank in described.ranks], "layers": [list(span) for span in described.layers],
            "dispatch": described.settings.cluster.dispatch,
        }  # fmt: skip

    @property
    def pair(self) -> Row:
        return described_pair(self.running.description, self.running.run_id)

    @property
    def bita(self) -> Row:
        described = self.running.description
        trained = described.trained_bita
        assert described.bita is not None and trained is not None
        return {
            "name": Path(described.bita).name,
            "digest": described.digests.get("bita", "")[:_DIGITS] or key_of([described.bita, self.running.run_id]),
            "prompting": trained.prompting,
            "masks": trained.num_masks,
            "prompt_tokens": trained.num_prompt_tokens,
        }

    @property
    def trained_masks(self) -> int:
        trained = self.running.description.trained_bita
        return trained.num_masks if trained else 0

    @property
    def dtype(self) -> str:
        return self.running.description.settings.numbers.dtype

    @property
    def scope(self) -> str:
        """This cluster alone."""
        return key_of([self.pair, self.cluster])

    @property
    def label(self) -> str:
        return f"run {self.running.run_id} ({self.running.topology.num_stages} stages)"


def described_pair(description: RunDescription, run_id: str) -> Row:
    """The field ``pair`` of a row: by the digests of the weights where ranks have compared them, else by directories and run."""
    models: Row = {"target": description.target, "draft": description.draft}
    digests = [description.digests.get(name, "")[:_DIGITS] for name in ("target", "draft")]
    return {**models, "digest": "".join(digests)} if digests[0] else {**models, "digest": None, "run": run_id}


@dataclass(frozen=True)
class LaunchedShape:
    """A partition of a ``cluster.yaml`` that the sweep launches when its first answer is needed."""

    config: ClusterConfig
    partition: str
    methods: tuple[str, ...] = ()

    is_emulated = False

    @property
    def preset(self) -> str:
        return self.partition

    @cached_property
    def cluster(self) -> Row:
        plan = make_plan(self._own, self.partition)
        layers = [[stage.layers.start, stage.layers.stop] for stage in plan.stages]
        return {**_cluster(plan, self._own.draft), "layers": layers}

    @property
    def pair(self) -> Row:
        return {"target": self._own.target, "draft": None if self._own.draft == "none" else self._own.draft, "digest": None}

    @property
    def bita(self) -> Row:
        return bita_row(Path(self._own.bita))

    @property
    def trained_masks(self) -> int:
        return 0 if self._own.bita == "none" else BitaConfig.from_directory(Path(self._own.bita)).num_masks

    @property
    def dtype(self) -> str:
        return self._own.settings.numbers.dtype

    @property
    def scope(self) -> str:
        """This partition alone."""
        return key_of([self.preset, self.pair, self.cluster])

    @property
    def label(self) -> str:
        return _label(self.partition, self.cluster["stages"])

    @property
    def _own(self) -> ClusterConfig:
        return self.config.for_partition(self.partition)


Measurable = Shape | RunningShape | LaunchedShape


def _label(preset: str | None, num_stages: int) -> str:
    stages = f"{num_stages} stages" if num_stages > 1 else "1 stage"
    return f"{preset} ({stages})" if preset else stages


def emulated(
    config: ClusterConfig, preset: str, stages: int | None, pair: ModelPair, slow_motion: float = 1.0, own_work: bool = True
) -> Shape:
    """The partition ``preset`` of ``config``, or ``stages`` devices of the kind of its first.

    The draft computes in the target's precision: its chances are then the same however many rows a forward has, and an answer
    that is replayed takes the same course.

    Args:
        own_work: whether computed times count rank 0's own work (see ``Emulation``).

    Raises:
        UserError: no such partition, or the models have too few layers.
    """
    config = config.for_partition(preset)
    cut = config if stages is None else with_stages(config, preset, stages)
    plan = make_plan(cut, preset)
    spec = resolve(pair.settings(stages=len(plan.stages), groups=plan.num_groups))
    emulation = replace(Emulation.of_plan(plan, slow_motion), counts_own_work=own_work)
    return Shape(
        preset, replace(spec.replaced(draft_dtype=spec.dtype), emulation=emulation), _cluster(plan, config.settings.models.draft)
    )


def small_model_alone(
    config: ClusterConfig, small: SmallModel, pair: ModelPair, slow_motion: float = 1.0, own_work: bool = True
) -> Shape:
    """``slm``: the pair's small model runs and emulates ``small`` on one device."""
    dtype = config.settings.numbers.dtype
    partition = PartitionConfig(Settings.of(target=small.model, draft=NONE, stages=1, dtype=dtype))
    server = ServerConfig("server", {small.device: 1})
    alone = ClusterConfig((server,), {SLM: partition}, partition.settings, config.network)
    plan = make_plan(alone, SLM)
    emulation = replace(Emulation.of_plan(plan, slow_motion), counts_own_work=own_work)
    spec = replace(_small_spec(pair), emulation=emulation)
    return Shape(SLM, spec, _cluster(plan, None), (SLM,))


def as_it_is(stages: int, pair: ModelPair) -> Shape:
    """Real stages on this machine, nothing emulated."""
    return _real(resolve(pair.settings(stages=stages)))


def small_model_as_it_is(pair: ModelPair) -> Shape:
    """``slm`` on this machine, nothing emulated."""
    return replace(_real(_small_spec(pair)), methods=(SLM,))


def digest(path: Path) -> str:
    """Identifies a checkpoint's weights: the first digits of their SHA-256."""
    return weights_digest(path, cache_directory())[:_DIGITS]


def pair_digest(spec: PipelineSpec) -> str:
    """Identifies the weights of target and draft."""
    return digest(spec.target) + (digest(spec.draft) if spec.draft else "")


def bita_row(directory: Path) -> Row:
    """The field ``bita`` of a row: the BiTA that decoded it. Raises UserError if it is not here."""
    config = BitaConfig.from_directory(directory)
    return {
        "name": directory.resolve().name,
        "digest": digest(directory),
        "prompting": config.prompting,
        "masks": config.num_masks,
        "prompt_tokens": config.num_prompt_tokens,
    }


def _small_spec(pair: ModelPair) -> PipelineSpec:
    small = pair.small or resolve(Settings.of(target=pair.target, draft=pair.draft, stages=1)).draft
    return resolve(Settings.of(target=small, draft="none", stages=1, dtype="float32"))


def _real(spec: PipelineSpec) -> Shape:
    cluster = {"stages": spec.settings.cut.stages, "groups": spec.topology.num_groups, "dtype": spec.dtype}
    return Shape(None, spec, {**cluster, "model": None, "draft": None, "devices": [], "draft_device": None, "fits": True})


def _cluster(plan: Plan, draft: str | None) -> Row:
    return {
        "stages": len(plan.stages),
        "groups": plan.num_groups,
        "model": plan.target,
        "draft": draft,
        "dtype": str(plan.weights),
        "devices": [stage.placement.device for stage in plan.stages],
        "draft_device": plan.draft.placement.device if plan.draft else None,
        "fits": not plan.problems,
    }
