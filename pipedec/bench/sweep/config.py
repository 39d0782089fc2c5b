"""What a sweep measures: the grid of pipelines, methods, trees and repeats, and how answers are decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import structs

from pipedec.bench.checks import check_known
from pipedec.bench.options import Drawing, Positive
from pipedec.bench.sweep.pipelines import (
    SLM,
    LaunchedShape,
    Measurable,
    ModelPair,
    RunningShape,
    Shape,
    SmallModel,
    as_it_is,
    emulated,
    small_model_alone,
    small_model_as_it_is,
)
from pipedec.bench.sweep.trees import BITA, TreeGrid
from pipedec.bench.sweep.tuning import TuningGrid
from pipedec.client.running import Running
from pipedec.config import ClusterConfig
from pipedec.config.settings import Dispatch
from pipedec.core import DEFAULT_METHOD, MethodOptions, SamplingParams, UserError
from pipedec.flags import Help, check_fields
from pipedec.methods import METHOD_NAMES, find_method

TUNED = "stpp-tuned"
SWEEP_METHODS = (*METHOD_NAMES, TUNED, SLM)
_WITHOUT_TREE = ("pp", SLM)
_NEED_EMULATION = (TUNED, SLM)  # or a pipeline of their own, which a cluster that runs is not


@dataclass(frozen=True)
class SweepConfig(Drawing):
    """The grid of a sweep.

    Attributes:
        presets: partitions of ``cluster``; empty to measure this machine without emulation.
        stages: stage counts; empty for those of the presets.
        methods: of SWEEP_METHODS. ``stpp`` uses its best depth, ``stpp-tuned`` the best tree of a grid.
        trees: limits of the trees.
        bita: directories of trained BiTA, each decoding on a pipeline of its own; empty for the target's own.
        sampling: how to decode; with a temperature, repeat N samples tokens with ``seed`` + N.
        running: a cluster that is running, to be measured instead of pipelines that are started here.
        launched: likewise, partitions of ``cluster`` that are launched on their hosts one after another.

    Raises:
        UserError: an unknown method or clock, a number below 1, or a combination that cannot work.
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
            f"Methods, like pp,bita; also {SLM}: a small model alone. By default a real cluster is measured with those of the "
            "default methods that it can decode with."
        ),
    ] = ("pp", "stpp", TUNED, "pipedec", DEFAULT_METHOD)
    trees: TreeGrid = TreeGrid()
    bita: Annotated[
        tuple[Path, ...], Help("bita: a trained BiTA (default: the shipped one); may be repeated.", "DIR", repeated=True)
    ] = ()
    repeats: Annotated[Positive, Help("Answers per prompt, each with its own seed.")] = 1
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    clock: Annotated[
        Literal["measured", "computed"], Help("measured: real processes; computed: one process, times by arithmetic.")
    ] = "measured"
    dispatch: Dispatch = "windows"
    slow_motion: Annotated[float, Help("Factor on all emulated times; results are divided by it.")] = 4.0
    pair: ModelPair = ModelPair()
    small: SmallModel = SmallModel()
    grid: TuningGrid = TuningGrid()
    running: Running | None = None
    launched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for method in self.methods:
            check_known("method", method, SWEEP_METHODS)
        check_fields(self)
        if self.running is not None or self.launched:
            self._check_real()
        else:
            self._check_started_here()

    def _check_real(self) -> None:
        for method in self.methods:
            if method in _NEED_EMULATION:
                raise UserError(f"method {method} needs a pipeline that the sweep starts here: leave it out of --methods")
            if self.running is not None:
                self.running.check_method(method)
            for name in self.launched:
                own = self.cluster.for_partition(name)
                find_method(method).check_needs(own.draft != "none", own.bita != "none")
        if self.running is not None and (preset := self.running.description.emulation) is not None:
            raise UserError(f"run {self.running.run_id} emulates {preset}: measure a cluster that does not, or use --preset")

    def _check_started_here(self) -> None:
        for preset in self.presets:
            self.cluster.find_partition(preset)
        if not self.presets and (not self.stages or self.clock == "computed" or TUNED in self.methods):
            raise UserError("without --preset nothing is emulated: give --stages, --clock measured and no stpp-tuned")
        if self.bita and BITA not in self.methods:
            raise UserError(f"--bita needs the method {BITA}: add it to --methods")

    def shapes(self) -> Iterator[Measurable]:
        """The pipelines, in the order in which they are measured."""
        if self.running is not None:
            yield RunningShape(self.running, self.methods)
        elif self.launched:
            yield from (LaunchedShape(self.cluster, name, self.methods) for name in self.launched)
        else:
            yield from self._started_here()

    def _started_here(self) -> Iterator[Shape]:
        """The first of each length runs all methods, others ``bita`` with another BiTA; ``slm`` is last."""
        methods = tuple(method for method in self.methods if method != SLM)
        for preset in self.presets or (None,) if methods else ():
            for stages in self.stages or (None,):
                for number, bita in enumerate(self.bita or (None,)):
                    shape = self._shape(preset, stages, replace(self.pair, bita=bita))
                    yield replace(shape, methods=methods if number == 0 else (BITA,)).dispatched(self.dispatch)
        if SLM in self.methods and self.presets:
            alone = small_model_alone(self.cluster, self.small, self.pair, self.slow_motion, self.own_work)
            yield alone.dispatched(self.dispatch)
        elif SLM in self.methods:
            yield small_model_as_it_is(self.pair).dispatched(self.dispatch)

    def _shape(self, preset: str | None, stages: int | None, pair: ModelPair) -> Shape:
        if preset is not None:
            return emulated(self.cluster, preset, stages, pair, self.slow_motion, self.own_work)
        assert stages is not None
        return as_it_is(stages, pair)

    def sampling_of(self, repeat: int) -> SamplingParams:
        """The sampling of a repeat: with a seed of its own unless decoding is greedy."""
        return structs.replace(self.sampling, seed=self.seed + repeat) if self.sampling.is_stochastic else self.sampling

    def limits(self, method: str, shape: Measurable) -> Sequence[MethodOptions | None]:
        """The limits of trees to try with a method on a pipeline; None if the method has no tree.

        Raises:
            UserError: ``bita`` cannot have such a tree on this pipeline.
        """
        if method in _WITHOUT_TREE:
            return (None,)
        if method == BITA:
            return self.trees.of_bita(shape.trained_masks)
        return self.trees.drafted("stpp" if method == TUNED else method)
