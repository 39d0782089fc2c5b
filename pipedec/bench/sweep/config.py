"""The grid of a sweep: pipelines, methods and repeats, and how answers are decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import structs

from pipedec.bench.options import Drawing, Positive, Priors
from pipedec.bench.policy import Policy, parse_policies
from pipedec.bench.sweep.pipelines import Measurable, ModelPair, RunningShape, Shape, as_it_is, check_is_real, emulated
from pipedec.client.run_handle import RunHandle
from pipedec.config import NONE, ClusterConfig
from pipedec.config.settings import Dispatch
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.flags import Help
from pipedec.methods import find_method, possible_methods

USUAL_METHODS = ("pp", "stpp", "pipedec", DEFAULT_METHOD)


@dataclass(frozen=True)
class SweepConfig(Drawing):
    """The grid of a sweep.

    Attributes:
        sampling: how to decode; with a temperature, repeat N samples tokens with ``seed`` + N.
        running: a cluster that is running, to be measured instead of pipelines that are started here.
        launched: likewise, partitions of ``cluster`` that are launched on their hosts one after another.

    Raises UserError for an unknown method or clock, a number below 1, or a combination that cannot work.
    """

    cluster: ClusterConfig
    presets: Annotated[
        tuple[str, ...], Help("Emulated clusters, like paper-7,paper-14 (default: this machine itself).", flag="--preset")
    ] = ()
    stages: Annotated[
        tuple[Positive, ...],
        Help("Numbers of stages, like 1,2,4; with --preset, of devices like its first (default: its own number)."),
    ] = ()
    methods: Annotated[
        tuple[str, ...],
        Help(
            f"Methods, or one with options, like pipedec:width=16,children=8; may be repeated (default: those of "
            f"{','.join(USUAL_METHODS)} that the pipeline can decode with).",
            "NAME,…|NAME:KEY=VALUE,…", repeated=True,
        ),
    ] = ()  # fmt: skip
    repeats: Annotated[Positive, Help("Answers per prompt, each with its own seed.")] = 1
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    clock: Annotated[
        Literal["measured", "computed"], Help("measured: real processes; computed: one process, times by arithmetic.")
    ] = "measured"
    dispatch: Dispatch = "windows"
    slow_motion: Annotated[float, Help("Factor on all emulated times; results are divided by it.")] = 4.0
    priors: Priors = True
    pair: ModelPair = ModelPair()
    running: RunHandle | None = None
    launched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        parse_policies(self.methods, "--methods")
        check_fields(self)
        if self.running is not None:
            check_is_real(self.running)
        for name in self.launched:
            self.cluster.find_partition(name)
        if self.running is None and not self.launched:
            for preset in self.presets:
                self.cluster.find_partition(preset)
            if not self.presets and (not self.stages or self.clock == "computed"):
                raise UserError("without --preset nothing is emulated: give --stages, and --clock measured")

    def places(self) -> list[Measurable | str]:
        """The pipelines in the order in which they are measured, those to launch by their partition's name."""
        if self.running is not None:
            return [RunningShape(self.running)]
        if self.launched:
            return list(self.launched)
        return [self._shape(preset, stages) for preset in self.presets or (None,) for stages in self.stages or (None,)]

    def _shape(self, preset: str | None, stages: int | None) -> Shape:
        if preset is not None:
            shape = emulated(self.cluster, preset, stages, self.pair, self.slow_motion, self.own_work, self.priors)
        else:
            assert stages is not None
            shape = as_it_is(self.pair.settings(stages=stages, priors=self.priors))
        return shape.dispatched(self.dispatch)

    def policies(self, place: Measurable | str) -> tuple[Policy, ...]:
        """The methods to measure on a pipeline. Raises UserError if it lacks what a given one needs."""
        if isinstance(place, str):
            own = self.cluster.for_partition(place)
            has_draft, has_bita = own.draft != NONE, own.bita != NONE
        else:
            has_draft, has_bita = place.has_draft, place.has_bita
        if not self.methods:
            possible = possible_methods(has_draft, has_bita)
            return tuple(Policy.parse(name) for name in USUAL_METHODS if name in possible)
        policies = parse_policies(self.methods, "--methods")
        for policy in policies:
            find_method(policy.method).check_needs(has_draft, has_bita)
        return policies

    def sampling_of(self, repeat: int) -> SamplingParams:
        """The sampling of a repeat: with a seed of its own unless decoding is greedy."""
        return structs.replace(self.sampling, seed=self.seed + repeat) if self.sampling.is_stochastic else self.sampling
