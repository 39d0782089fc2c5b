"""The rows of ``pipedec bench sweep`` as their readers see them: one checked struct per answer.

Owns the schema: other fields of a line are ignored. It does not measure, and knows no statistics and no figures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from pipedec.bench.record import ROWS_FILE, read_records
from pipedec.core.errors import BadValue, UserError
from pipedec.core.records import LARGEST
from pipedec.methods import SHAPES
from pipedec.validation import validated

SCHEMA = "pipedec.sweep/1"
BITA = "bita"

Count = Annotated[int, Meta(ge=0)]
Number = Annotated[float, Meta(ge=0, le=LARGEST, description="finite and at least 0")]


class PipelineColumns(Struct, frozen=True):
    """The cluster that decoded an answer, emulated or not.

    Attributes:
        stages: devices that hold layers; ``groups`` is the paper's number of stages.
        model, dtype: the emulated ones, or those of a launched partition.
        devices: their names, in order, if they are known; ``fits``: whether the model fits into their memory.
        preset: the partition, emulated or launched; None if there is none.
        dispatch: what Redis granted, ``windows`` or single ``tasks``; with computed times, whose order of pruning was followed.
        priors: what the default method began with: ``shipped`` beside the draft, ``kept`` by earlier runs, or ``none``.
    """

    stages: Count
    groups: Count
    model: str | None = None
    dtype: str | None = None
    devices: tuple[str, ...] = ()
    fits: bool = True
    preset: str | None = None
    dispatch: str = "windows"
    priors: str = "none"

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= self.stages:
            raise BadValue(f"groups must lie between 1 and stages, not {self.groups} for {self.stages} stages")

    @property
    def recut(self) -> bool:
        """Whether the preset is partitioned into another number of stages than its name has."""
        number = re.search(r"-(\d+)$", self.preset or "")
        return number is not None and int(number[1]) != self.groups

    @property
    def name(self) -> str:
        """For people: the preset, and the number of stages unless it is in the preset's name."""
        stages = f"{self.groups} stages" if self.groups > 1 else "1 stage"
        name = self.preset if self.preset and not self.recut else f"{self.preset}, {stages}" if self.preset else stages
        return name if self.dispatch == "windows" else f"{name}, single tasks"


class Tree(Struct, frozen=True):
    """Limits of the prediction tree. ``depth`` and ``rows`` only if the method has them, ``shape`` of ``bita`` alone."""

    width: Count | None = None
    children: Count | None = None
    depth: Count | None = None
    rows: Count | None = None
    shape: str | None = None


class TrainedBita(Struct, frozen=True, eq=False):
    """The BiTA that decoded an answer; two with equal weights are equal, even if their names differ.

    A tree may use fewer than its ``masks``. ``digest`` is of its weights, ``name`` of its directory.
    """

    digest: str
    prompting: Literal["none", "shallow", "deep"]
    masks: Annotated[int, Meta(ge=1)]
    prompt_tokens: Count
    name: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TrainedBita) and self._weights == other._weights

    def __hash__(self) -> int:
        return hash(self._weights)

    @property
    def _weights(self) -> tuple[str, str, int, int]:
        return self.digest, self.prompting, self.masks, self.prompt_tokens


class ModelColumns(Struct, frozen=True):
    """The target that answered; ``digest`` of its weights and the draft's, if they were compared."""

    target: str
    digest: str | None = None


class Machine(Struct, frozen=True):
    """The machine that measured."""

    gpu: str | None = None


class Sampling(Struct, frozen=True):
    """At temperature 0 (greedy decoding) ``top_k``, ``top_p`` and ``seed`` mean nothing: they are 0, 1 and None."""

    temperature: Number
    max_tokens: Count
    ignore_eos: bool
    top_k: int | None = None
    top_p: Number | None = None
    seed: int | None = None


class SweepRow(Struct, kw_only=True):
    """One answer. Times are those of the emulated devices, in ms, already divided by ``slow_motion``."""

    clock: Literal["measured", "computed"]
    emulated: bool
    slow_motion: Number | None
    preset: str | None
    pipeline: PipelineColumns = field(name="cluster")
    pair: ModelColumns
    measured_on: Machine = field(default=Machine(), name="machine")
    method: str
    tree: Tree | None
    bita: TrainedBita | None = None
    prompt_set: str
    prompt_index: Count
    repeat: Count
    sampling: Sampling
    output_tokens: Count
    timesteps: Count
    hits: Count
    misses: Count
    decode_ms: Number
    computed_ms_per_token: Number | None
    overran: Number | None
    breakdown: dict[str, Number] | None

    def __post_init__(self) -> None:
        if self.tokens and not self.timesteps:
            raise BadValue("timesteps must be at least 1, as tokens were decoded")
        if self.tokens and not self.decode_ms:
            raise BadValue("decode_ms must be above 0, as tokens were decoded")
        if self.method == BITA and self.bita is None:
            raise BadValue("bita: missing, which the method bita needs")
        if self.method == BITA and self.tree is not None and self.tree.shape not in SHAPES:
            raise BadValue(f"tree.shape must be one of {', '.join(SHAPES)}, not {self.tree.shape}")
        for name in ("top_k", "top_p", "seed") if self.sampling.temperature else ():
            if getattr(self.sampling, name) is None:
                raise BadValue(f"sampling.{name}: missing, which a temperature above 0 needs")
        if self.sampling.temperature == 0:
            self.sampling = replace(self.sampling, top_k=0, top_p=1.0, seed=None)
        self.sampling = replace(self.sampling, top_k=max(0, self.sampling.top_k or 0))
        if self.method != BITA:
            self.bita, self.tree = None, self.tree and replace(self.tree, shape=None)
        self.slow_motion = self.slow_motion or 1.0
        self.pipeline = replace(self.pipeline, preset=self.preset)

    @property
    def timing(self) -> str:
        """``measured`` and ``computed`` are emulated times: waited for, or by arithmetic. ``machine``: nothing is emulated."""
        return "computed" if self.clock == "computed" else "measured" if self.emulated else "machine"

    @property
    def machine(self) -> str:
        """The machine that was measured, or on which the emulation ran."""
        if not self.emulated and self.pipeline.devices:
            return "a cluster of " + " and ".join(f"{count} {name}" for name, count in Counter(self.pipeline.devices).items())
        return f"1 {self.measured_on.gpu or 'CPU'} machine"

    @property
    def tokens(self) -> int:
        """Decoded tokens: all but the first, which is the prefill's."""
        return max(0, self.output_tokens - 1)


def read_rows(sources: Iterable[Path]) -> list[SweepRow]:
    """The rows of several sweeps (directories, or JSONL files), in the order of the files.

    Raises UserError if a file is missing or empty, or holds a line that is no row of a sweep. An unfinished last line is ignored:
    its writer was interrupted.
    """
    rows: list[SweepRow] = []
    for source in sources:
        path = source / ROWS_FILE if source.is_dir() else source
        num_before = len(rows)
        for number, record in read_records(path, SCHEMA):
            try:
                rows.append(validated(SweepRow, record, f"{path}, line {number}"))
            except UserError as error:
                raise UserError(f"{error}; sweep again or remove the line") from None
        if len(rows) == num_before:
            raise UserError(f"{path} holds no rows: write some with pipedec bench sweep")
    return rows
