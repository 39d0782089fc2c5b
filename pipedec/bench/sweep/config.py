"""The grid of a sweep: pipelines, methods, trees and repeats, and how answers are decoded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import structs

from pipedec.bench.options import Drawing, Positive, Priors, check_known
from pipedec.bench.sweep import pipelines
from pipedec.bench.sweep.rows import BITA, SMALL_MODEL
from pipedec.client.running import Running
from pipedec.config import ClusterConfig
from pipedec.config.settings import Dispatch
from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.decoding import Experience, Resources
from pipedec.decoding.method import new_method
from pipedec.flags import Help
from pipedec.methods import (
    METHOD_NAMES,
    PROPOSERS,
    SHAPES,
    BestFirstOptions,
    BitaOptions,
    Proposer,
    Shape,
    StaticTreeOptions,
    applicable_options,
    find_method,
)
from pipedec.threads import Sequence as ThreadSequence

TUNED = "stpp-tuned"
SWEEP_METHODS = (*METHOD_NAMES, TUNED, SMALL_MODEL)
_WITHOUT_TREE = ("pp", SMALL_MODEL)
_NEED_EMULATION = (TUNED, SMALL_MODEL)  # or a pipeline of their own, which a cluster that runs is not


@dataclass(frozen=True)
class TreeGrid:
    """Limits of trees, in all combinations; the method chooses those left empty. Raises UserError for a wrong number or name."""

    widths: Annotated[
        tuple[Positive, ...], Help("Rows per timestep, like 16,32 (default: adapted by pipedec-bestfirst, 32 for others).")
    ] = ()
    children: Annotated[
        tuple[Positive, ...], Help("Children per row (default: adapted by pipedec-bestfirst, 1–16 for bita, else 16).")
    ] = ()
    forwards: Annotated[int | None, Help("pipedec-bestfirst: draft forwards per timestep (default: what fits).")] = None
    proposers: Annotated[tuple[Proposer, ...], Help("pipedec-bestfirst: draft sources.")] = PROPOSERS
    shapes: Annotated[tuple[Shape, ...], Help(f"bita: shapes of the tree: {','.join(SHAPES)}.")] = (BitaOptions().shape,)
    depths: Annotated[tuple[Positive, ...], Help("bita: numbers of masks used, like 1,2,3 (default: all trained masks).")] = ()
    rows: Annotated[tuple[Positive, ...], Help("bita: rows of the likeliest tree, like 32,64 (default: 64).")] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        BestFirstOptions(forwards=self.forwards, proposers=self.proposers)

    def drafted(self, method: str) -> list[MethodOptions]:
        """The limits to try with a method that drafts: those of the grid that it has."""
        shared = {"forwards": self.forwards, "proposers": self.proposers}
        return [
            applicable_options(method, {"width": width, "children": children, **shared})
            for width in self.widths or (None,)
            for children in self.children or (None,)
        ]

    def of_bita(self, trained_masks: int) -> list[BitaOptions]:
        """The trees to try with a BiTA that has ``trained_masks`` masks: all limits set that the shape uses, equal trees once.

        Raises UserError if there is no BiTA, a depth exceeds its masks, or a tree is too large.
        """
        requested = [
            BitaOptions(shape, depth, children, rows)
            for shape in self.shapes
            for depth in self.depths or (None,)
            for children in self.children or (None,)
            for rows in (self.rows if shape == "likeliest" and self.rows else (BitaOptions().rows,))
        ]
        found: dict[BitaOptions, None] = {}
        for tree in requested:  # with the numbers of masks and candidates that ``bita`` would use
            request, resources = (
                TokenizedRequest(0, (0,), method=BITA, options=tree),
                Resources(Experience(1), trained_masks=trained_masks),
            )
            masks = new_method(request, ThreadSequence(1, (), 1), resources).masks
            found[structs.replace(tree, depth=masks.count, children=masks.named)] = None
        return list(found)


@dataclass(frozen=True)
class TuningGrid:
    """Depths of the layer-wise tree, the paper's cut at a depth; depths and sizes of the best-first tree."""

    layer_depths: tuple[int, ...] = (1, 2, 3, 4)
    depths: tuple[int, ...] = (4, 6, 8, 10)
    rows: tuple[int, ...] = (24, 48, 72)

    def trees(self, method: str, limits: StaticTreeOptions) -> list[StaticTreeOptions]:
        """The trees among which ``method`` gets the best: of the most probable rows if it is ``TUNED``, else of whole layers."""
        if method == TUNED:
            sizes = [(depth, rows) for depth in self.depths for rows in self.rows if rows > depth]
            return [structs.replace(limits, depth=depth, rows=rows) for depth, rows in sizes]
        return [structs.replace(limits, depth=depth, rows=None) for depth in self.layer_depths]


@dataclass(frozen=True)
class SweepConfig(Drawing):
    """The grid of a sweep.

    Attributes:
        methods: of SWEEP_METHODS. ``stpp`` uses its best depth, ``stpp-tuned`` the best tree of a grid.
        bita: directories of trained BiTA, each decoding on a pipeline of its own; empty for the target's own.
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
            f"Methods, like pp,bita; also {SMALL_MODEL}: a small model alone. By default a real cluster is measured with those "
            "of the default methods that it can decode with."
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
    priors: Priors = True
    pair: pipelines.ModelPair = pipelines.ModelPair()
    grid: TuningGrid = TuningGrid()
    running: Running | None = None
    launched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for method in self.methods:
            check_known("method", method, SWEEP_METHODS)
        check_fields(self)
        if self.running is None and not self.launched:
            for preset in self.presets:
                self.cluster.find_partition(preset)
            if not self.presets and (not self.stages or self.clock == "computed" or TUNED in self.methods):
                raise UserError("without --preset nothing is emulated: give --stages, --clock measured and no stpp-tuned")
            if self.bita and BITA not in self.methods:
                raise UserError(f"--bita needs the method {BITA}: add it to --methods")
            return
        for method in self.methods:
            if method in _NEED_EMULATION:
                raise UserError(f"method {method} needs a pipeline that the sweep starts here: leave it out of --methods")
            if self.running is not None:
                self.running.check_method(method)
            for name in self.launched:
                own = self.cluster.for_partition(name)
                find_method(method).check_needs(own.draft != "none", own.bita != "none")
        if self.running is not None and (emulated := self.running.description.emulation) is not None:
            raise UserError(f"run {self.running.run_id} emulates {emulated}: measure a cluster that does not, or use --preset")

    def shapes(self) -> Iterator[pipelines.Measurable]:
        """The pipelines, in the order in which they are measured.

        Of those started here, the first of each length runs all methods, others ``bita`` with another BiTA; ``slm`` is last.
        """
        if self.running is not None:
            yield pipelines.running_shape(self.running, self.methods)
            return
        if self.launched:
            yield from (pipelines.launched_shape(self.cluster, name, self.methods) for name in self.launched)
            return
        methods = tuple(method for method in self.methods if method != SMALL_MODEL)
        for preset in self.presets or (None,) if methods else ():
            for stages in self.stages or (None,):
                for number, bita in enumerate(self.bita or (None,)):
                    pair = replace(self.pair, bita=bita)
                    if preset is not None:
                        shape = pipelines.emulated(
                            self.cluster, preset, stages, pair, self.slow_motion, self.own_work, self.priors
                        )
                    else:
                        assert stages is not None
                        shape = pipelines.as_it_is(pair.settings(stages=stages, priors=self.priors))
                    yield replace(shape, methods=methods if number == 0 else (BITA,)).dispatched(self.dispatch)
        if SMALL_MODEL in self.methods and self.presets:
            alone = pipelines.small_model_alone(self.cluster, self.pair, self.slow_motion, self.own_work)
            yield alone.dispatched(self.dispatch)
        elif SMALL_MODEL in self.methods:
            yield pipelines.as_it_is(self.pair.small_settings(), (SMALL_MODEL,)).dispatched(self.dispatch)

    def sampling_of(self, repeat: int) -> SamplingParams:
        """The sampling of a repeat: with a seed of its own unless decoding is greedy."""
        return structs.replace(self.sampling, seed=self.seed + repeat) if self.sampling.is_stochastic else self.sampling

    def limits(self, method: str, shape: pipelines.Measurable) -> Sequence[MethodOptions | None]:
        """The limits of trees to try with a method on a pipeline; None if the method has no tree.

        Raises UserError if ``bita`` cannot have such a tree on this pipeline.
        """
        if method in _WITHOUT_TREE:
            return (None,)
        if method == BITA:
            return self.trees.of_bita(shape.trained_masks)
        return self.trees.drafted("stpp" if method == TUNED else method)
