"""The pipelines of a sweep, and a row's fields about them: emulated presets, this machine itself, clusters that run.

Knows nothing of methods, prompts and results.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from pipedec.bench.record import Row, key_of
from pipedec.checkpoints import weights_digest
from pipedec.client.run_handle import RunHandle
from pipedec.config import AUTO, ClusterConfig, Settings
from pipedec.core.errors import UserError
from pipedec.decoding.learned import NOTHING_LEARNED
from pipedec.engine.build import resolve
from pipedec.engine.experience_files import shipped_acceptance
from pipedec.messages.run import BitaDescription, RunDescription
from pipedec.plan.emulation import Emulation, with_stages
from pipedec.plan.partition import Measured, Plan
from pipedec.plan.partition import plan as make_plan
from pipedec.plan.roofline import ROW_OVERLAP
from pipedec.plan.spec import PipelineSpec

_DIGITS = 12  # of a digest in a row


@dataclass(frozen=True)
class ModelPair:
    """The real models that run: target, draft, and the target's BiTA."""

    target: Path | None = None
    draft: str | None = None
    bita: Path | None = None

    def settings(self, **others: Any) -> Settings:
        """The settings of a pipeline of this pair, in float32."""
        return Settings.of(target=self.target, draft=self.draft, bita=self.bita, dtype="float32", **others)


@dataclass(frozen=True)
class Shape:
    """A pipeline that the sweep starts here. All shapes have these attributes.

    Attributes:
        preset: the partition, emulated or launched; None if there is none.
        cluster, pair, bita: a row's fields about the pipeline, about its models, and about its BiTA, if it has one.
        has_draft, has_bita: whether methods that need them can decode.
        dtype: in which it computes (that of ``cluster`` may be emulated).
        scope: pipelines of one scope must give equal answers: all that are started here with one pair, or one running cluster.
        label: for progress bars and titles.
    """

    preset: str | None
    spec: PipelineSpec
    cluster: Row

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
    def bita(self) -> Row | None:
        directory, trained = self.spec.bita, self.spec.trained_bita
        return None if directory is None or trained is None else _bita_row(directory.resolve().name, _digest(directory), trained)

    @property
    def has_draft(self) -> bool:
        return self.spec.draft is not None

    @property
    def has_bita(self) -> bool:
        return self.spec.bita is not None

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
        stages = self.spec.settings.cut.stages
        name = f"{stages} stages" if stages > 1 else "1 stage"
        return f"{self.preset} ({name})" if self.preset else name


@dataclass(frozen=True)
class RunningShape:
    """A cluster that is running, known by its description; ``preset`` is the partition from which it was launched, if any."""

    running: RunHandle
    preset: str | None = None

    is_emulated = False

    @property
    def cluster(self) -> Row:
        described, topology = self.running.description, self.running.topology
        return {
            "stages": topology.num_stages, "groups": topology.num_groups, "model": None, "draft": None, "dtype": self.dtype,
            "devices": [rank.device for rank in described.ranks if rank.rank > 0],
            "draft_device": next((rank.device for rank in described.ranks if rank.rank == 0), None), "fits": True,
            "hosts": [rank.host for rank in described.ranks], "layers": [list(span) for span in described.layers],
            "dispatch": described.settings.cluster.dispatch, **_priors(described.settings, "kept"),
        }  # fmt: skip

    @property
    def pair(self) -> Row:
        return described_pair(self.running.description, self.preset or self.running.run_id)

    @property
    def bita(self) -> Row | None:
        described = self.running.description
        if described.bita is None or described.trained_bita is None:
            return None
        digest = described.digests.get("bita", "")[:_DIGITS] or key_of([described.bita, self.running.run_id])
        return _bita_row(Path(described.bita).name, digest, described.trained_bita)

    @property
    def has_draft(self) -> bool:
        return self.running.description.draft is not None

    @property
    def has_bita(self) -> bool:
        return self.running.description.bita is not None

    @property
    def dtype(self) -> str:
        return self.running.description.settings.numbers.dtype

    @property
    def scope(self) -> str:
        return key_of([self.preset, self.pair, self.cluster])

    @property
    def label(self) -> str:
        return f"run {self.running.run_id} ({self.running.topology.num_stages} stages)"


Measurable = Shape | RunningShape


def check_is_real(running: RunHandle) -> None:
    """Raises UserError if the cluster emulates another."""
    if (name := running.description.emulation) is not None:
        raise UserError(f"run {running.run_id} emulates {name}: measure a cluster that does not, or use --preset")


def described_pair(description: RunDescription, run_id: str) -> Row:
    """The field ``pair`` of a row: by the digests of the weights where ranks have compared them, else by directories and run."""
    models: Row = {"target": description.target, "draft": description.draft}
    digests = [description.digests.get(name, "")[:_DIGITS] for name in ("target", "draft")]
    return {**models, "digest": "".join(digests)} if digests[0] else {**models, "digest": None, "run": run_id}


def emulated(
    config: ClusterConfig, preset: str, stages: int | None, pair: ModelPair, slow_motion: float = 1.0, own_work: bool = True,
    priors: bool = False, row_overlap: float = ROW_OVERLAP,
) -> Shape:  # fmt: skip
    """The partition ``preset`` of ``config``, or ``stages`` devices of the kind of its first.

    The draft computes in the target's precision: its chances are then the same however many rows a forward has, and an answer
    that is replayed takes the same course. On slow links the passage is the plan's. With ``own_work`` computed times count rank
    0's own work (see ``Emulation``); with ``priors`` the default method begins with what ships beside the draft. ``row_overlap``
    is that of a mixture's rows (see ``Measured``).

    Raises UserError if there is no such partition, or the models have too few layers.
    """
    config = config.for_partition(preset)
    cut = config if stages is None else with_stages(config, preset, stages)
    plan = make_plan(cut, preset, Measured(row_overlap=row_overlap))
    in_flight = {"passage": plan.passage} if plan.passage > plan.num_groups else {}
    spec = resolve(pair.settings(stages=len(plan.stages), groups=plan.num_groups, priors=priors, **in_flight))
    emulation = replace(Emulation.of_plan(plan, slow_motion), counts_own_work=own_work)
    shipped = {} if shipped_acceptance(spec.draft) == NOTHING_LEARNED else _priors(spec.settings, "shipped")
    return Shape(
        preset, replace(spec.replaced(draft_dtype=spec.dtype), emulation=emulation),
        _cluster(plan, config.settings.models.draft) | shipped,
    )  # fmt: skip


def as_it_is(settings: Settings) -> Shape:
    """Real stages on this machine, nothing emulated."""
    spec = resolve(settings)
    cluster = {"stages": spec.settings.cut.stages, "groups": spec.topology.num_groups, "dtype": spec.dtype}
    nothing: Row = {"model": None, "draft": None, "devices": [], "draft_device": None, "fits": True}
    return Shape(None, spec, cluster | nothing | _priors(settings, "kept"))


def _priors(settings: Settings, source: str) -> Row:
    """A row's field about the source of priors, if the default method begins with any."""
    return {"priors": source} if settings.speculation.priors else {}


def pair_digest(spec: PipelineSpec) -> str:
    """Identifies the weights of target and draft."""
    return _digest(spec.target) + (_digest(spec.draft) if spec.draft else "")


def _digest(path: Path) -> str:
    """Identifies a checkpoint's weights: the first digits of their SHA-256."""
    return weights_digest(path)[:_DIGITS]


def _bita_row(name: str, digest: str, trained: BitaDescription) -> Row:
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
        "dtype": plan.numbers,
        "devices": [stage.placement.device for stage in plan.stages],
        "draft_device": plan.draft.placement.device if plan.draft else None,
        "fits": not plan.problems,
    }
