"""The pipelines of a sweep, and a row's fields about them.

Emulated presets, also with other numbers of stages; a small model alone; this machine itself; a cluster that is running; and
partitions of a ``cluster.yaml``, launched one after another. Knows nothing of methods, prompts and results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipedec.bench.record import Row, key_of
from pipedec.bench.sweep.rows import BITA, SMALL_MODEL
from pipedec.checkpoints import weights_digest
from pipedec.client.running import Running
from pipedec.config import AUTO, NONE, ClusterConfig, ServerConfig, Settings
from pipedec.config.cluster import PartitionConfig
from pipedec.decoding.learned import NOTHING_LEARNED
from pipedec.engine.build import resolve
from pipedec.engine.experience_files import shipped_acceptance
from pipedec.messages.run import BitaDescription, RunDescription
from pipedec.model import BitaConfig
from pipedec.plan.emulation import Emulation, with_stages
from pipedec.plan.partition import Plan
from pipedec.plan.partition import plan as make_plan
from pipedec.plan.spec import PipelineSpec

_SMALL_MODEL, _ITS_DEVICE = "llama-3.1-8b", "l40"  # emulated by ``slm``: the paper's choice (§4.2)
_DIGITS = 12  # digits of a digest in a row


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

    def small_settings(self) -> Settings:
        """The settings of the small model by itself, in float32."""
        small = self.small or resolve(Settings.of(target=self.target, draft=self.draft, stages=1)).draft
        return Settings.of(target=small, draft=NONE, stages=1, dtype="float32")


@dataclass(frozen=True)
class Shape:
    """A pipeline that the sweep starts here. All shapes have these attributes before any of them runs.

    Attributes:
        preset: the partition, emulated or launched; None if there is none.
        cluster, pair: a row's fields about the pipeline and about its models.
        methods: those that the sweep measures.
        bita: a row's field about its BiTA, if it has one.
        trained_masks: of its BiTA; 0 if it has none.
        dtype: in which it computes (that of ``cluster`` may be emulated).
        scope: pipelines of one scope must give equal answers: all that are started here with one pair, one running cluster, or
            one partition.
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
        passage = AUTO if dispatch == "tasks" else self.spec.settings.cluster.passage
        spec = self.spec.replaced(dispatch=dispatch, passage=passage)
        return replace(self, spec=spec, cluster={**self.cluster, "dispatch": dispatch})

    @cached_property
    def pair(self) -> Row:
        draft = str(self.spec.draft) if self.spec.draft else None
        return {"target": str(self.spec.target), "draft": draft, "digest": pair_digest(self.spec)}

    @property
    def bita(self) -> Row:
        assert self.spec.bita is not None
        return _bita_of(self.spec.bita)

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
        return key_of(self.pair)

    @property
    def label(self) -> str:
        name = _label(self.preset, self.spec.settings.cut.stages)
        return f"{name}, {self.spec.bita.name}" if self.spec.bita and BITA in self.methods else name


@dataclass(frozen=True)
class ClusterShape:
    """A cluster that is running, or a partition of a ``cluster.yaml`` that is launched when its first answer is needed."""

    source: Running | ClusterConfig
    preset: str | None
    cluster: Row
    pair: Row
    methods: tuple[str, ...]
    bita: Row | None
    trained_masks: int
    dtype: str
    scope: str
    label: str

    is_emulated = False


Measurable = Shape | ClusterShape


def running_shape(running: Running, methods: tuple[str, ...] = ()) -> ClusterShape:
    """A cluster that is running, known by its description."""
    described, topology = running.description, running.topology
    cluster: Row = {
        "stages": topology.num_stages, "groups": topology.num_groups, "model": None, "draft": None,
        "dtype": described.settings.numbers.dtype, "devices": [rank.device for rank in described.ranks if rank.rank > 0],
        "draft_device": next((rank.device for rank in described.ranks if rank.rank == 0), None), "fits": True,
        "hosts": [rank.host for rank in described.ranks], "layers": [list(span) for span in described.layers],
        "dispatch": described.settings.cluster.dispatch, **_priors(described.settings, "kept"),
    }  # fmt: skip
    pair, trained = described_pair(described, running.run_id), described.trained_bita
    bita: Row | None = None
    if described.bita is not None and trained is not None:
        digest = described.digests.get("bita", "")[:_DIGITS] or key_of([described.bita, running.run_id])
        bita = _bita_row(Path(described.bita).name, digest, trained)
    return ClusterShape(
        running, None, cluster, pair, methods, bita, trained.num_masks if trained else 0, cluster["dtype"],
        scope=key_of([pair, cluster]), label=f"run {running.run_id} ({topology.num_stages} stages)",
    )  # fmt: skip


def described_pair(description: RunDescription, run_id: str) -> Row:
    """The field ``pair`` of a row: by the digests of the weights where ranks have compared them, else by directories and run."""
    models: Row = {"target": description.target, "draft": description.draft}
    digests = [description.digests.get(name, "")[:_DIGITS] for name in ("target", "draft")]
    return {**models, "digest": "".join(digests)} if digests[0] else {**models, "digest": None, "run": run_id}


def launched_shape(config: ClusterConfig, partition: str, methods: tuple[str, ...]) -> ClusterShape:
    """A partition of ``config``. Raises UserError if its BiTA is needed and not here."""
    own = config.for_partition(partition)
    plan = make_plan(own, partition)
    layers = [[stage.layers.start, stage.layers.stop] for stage in plan.stages]
    cluster = {**_cluster(plan, own.draft), "layers": layers, **_priors(own.settings, "kept")}
    pair = {"target": own.target, "draft": None if own.draft == NONE else own.draft, "digest": None}
    bita = _bita_of(Path(own.bita)) if BITA in methods else None
    return ClusterShape(
        config, partition, cluster, pair, methods, bita, bita["masks"] if bita else 0, own.settings.numbers.dtype,
        scope=key_of([partition, pair, cluster]), label=_label(partition, len(plan.stages)),
    )  # fmt: skip


def _label(preset: str | None, num_stages: int) -> str:
    stages = f"{num_stages} stages" if num_stages > 1 else "1 stage"
    return f"{preset} ({stages})" if preset else stages


def emulated(
    config: ClusterConfig, preset: str, stages: int | None, pair: ModelPair, slow_motion: float = 1.0, own_work: bool = True,
    priors: bool = False,
) -> Shape:  # fmt: skip
    """The partition ``preset`` of ``config``, or ``stages`` devices of the kind of its first.

    The draft computes in the target's precision: its chances are then the same however many rows a forward has, and an answer
    that is replayed takes the same course. On slow links the passage is the plan's. With ``own_work`` computed times count rank
    0's own work (see ``Emulation``); with ``priors`` the default method begins with what ships beside the draft.

    Raises UserError if there is no such partition, or the models have too few layers.
    """
    config = config.for_partition(preset)
    cut = config if stages is None else with_stages(config, preset, stages)
    plan = make_plan(cut, preset)
    in_flight = {"passage": plan.passage} if plan.passage > plan.num_groups else {}
    spec = resolve(pair.settings(stages=len(plan.stages), groups=plan.num_groups, priors=priors, **in_flight))
    emulation = replace(Emulation.of_plan(plan, slow_motion), counts_own_work=own_work)
    shipped = {} if shipped_acceptance(spec.draft) == NOTHING_LEARNED else _priors(spec.settings, "shipped")
    return Shape(
        preset, replace(spec.replaced(draft_dtype=spec.dtype), emulation=emulation),
        _cluster(plan, config.settings.models.draft) | shipped,
    )  # fmt: skip


def small_model_alone(config: ClusterConfig, pair: ModelPair, slow_motion: float, own_work: bool) -> Shape:
    """``slm``: the pair's small model runs and emulates the paper's on one device."""
    dtype = config.settings.numbers.dtype
    partition = PartitionConfig(Settings.of(target=_SMALL_MODEL, draft=NONE, stages=1, dtype=dtype))
    server = ServerConfig("server", {_ITS_DEVICE: 1})
    alone = ClusterConfig((server,), {SMALL_MODEL: partition}, partition.settings, replace(config.network, links=()))
    plan = make_plan(alone, SMALL_MODEL)
    emulation = replace(Emulation.of_plan(plan, slow_motion), counts_own_work=own_work)
    spec = replace(resolve(pair.small_settings()), emulation=emulation)
    return Shape(SMALL_MODEL, spec, _cluster(plan, None), (SMALL_MODEL,))


def as_it_is(settings: Settings, methods: tuple[str, ...] = ()) -> Shape:
    """Real stages on this machine, nothing emulated."""
    spec = resolve(settings)
    cluster = {"stages": spec.settings.cut.stages, "groups": spec.topology.num_groups, "dtype": spec.dtype}
    nothing: Row = {"model": None, "draft": None, "devices": [], "draft_device": None, "fits": True}
    return Shape(None, spec, cluster | nothing | _priors(settings, "kept"), methods)


def _priors(settings: Settings, source: str) -> Row:
    """A row's field about the source of priors, if the default method begins with any."""
    return {"priors": source} if settings.speculation.priors else {}


def pair_digest(spec: PipelineSpec) -> str:
    """Identifies the weights of target and draft."""
    return _digest(spec.target) + (_digest(spec.draft) if spec.draft else "")


def _digest(path: Path) -> str:
    """Identifies a checkpoint's weights: the first digits of their SHA-256."""
    return weights_digest(path)[:_DIGITS]


def _bita_of(directory: Path) -> Row:
    """The field ``bita`` for a BiTA of this machine. Raises UserError if it is not here."""
    return _bita_row(directory.resolve().name, _digest(directory), BitaConfig.from_directory(directory))


def _bita_row(name: str, digest: str, trained: BitaConfig | BitaDescription) -> Row:
    """The field ``bita`` of a row: the BiTA that decoded it."""
    return {
        "name": name, "digest": digest, "prompting": trained.prompting, "masks": trained.num_masks,
        "prompt_tokens": trained.num_prompt_tokens,
    }  # fmt: skip


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
