"""The rows of ``pipedec bench sweep`` as their readers see them: one checked record per answer.

Owns the schema. It does not measure, and knows no statistics and no figures.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AliasPath, BaseModel, Field, StrictBool, StrictInt, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from pipedec.bench.record import ROWS_FILE, read_records
from pipedec.core import UserError
from pipedec.methods import SHAPES

SCHEMA = "pipedec.sweep/1"
SMALL_MODEL = "slm"  # its answers are those of another, smaller model
BITA = "bita"
PROMPTINGS = ("none", "shallow", "deep")  # in the order of BiTA Table 3

Count = Annotated[int, Field(strict=True, ge=0)]
Number = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]


@dataclass(frozen=True)
class Pipeline:
    """What decoded an answer: a cluster, emulated or not. ``groups`` is what the paper calls the number of stages.

    Attributes:
        stages: devices that hold layers.
        model, dtype: the emulated ones, or those of a launched partition.
        devices: their names, in order, if they are known.
        fits: whether the model fits into their memory.
        preset: the partition, emulated or launched; None if there is none.
    """

    stages: Count
    groups: Count
    model: str | None = None
    dtype: str | None = None
    devices: tuple[str, ...] = ()
    fits: StrictBool = True
    preset: str | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.groups <= self.stages:
            raise ValueError(f"groups must lie between 1 and stages, not {self.groups} for {self.stages} stages")

    @property
    def recut(self) -> bool:
        """Whether the preset is partitioned into another number of stages than its name has."""
        number = re.search(r"-(\d+)$", self.preset or "")
        return number is not None and int(number[1]) != self.groups

    @property
    def name(self) -> str:
        """For people: the preset, and the number of stages unless it is in the preset's name."""
        stages = f"{self.groups} stages" if self.groups > 1 else "1 stage"
        return self.preset if self.preset and not self.recut else f"{self.preset}, {stages}" if self.preset else stages


@dataclass(frozen=True)
class Tree:
    """Limits of the prediction tree. ``depth`` and ``rows`` only if the method has them, ``shape`` of ``bita`` alone."""

    width: Count | None = None
    children: Count | None = None
    depth: Count | None = None
    rows: Count | None = None
    shape: str | None = None


@dataclass(frozen=True)
class TrainedBita:
    """The BiTA that decoded an answer; two with equal weights are equal, whatever their names.

    Attributes:
        digest: of its weights.
        masks: the number that was trained; a tree may use fewer.
        name: of its directory.
    """

    digest: str
    prompting: Literal["none", "shallow", "deep"]
    masks: Annotated[int, Field(strict=True, ge=1)]
    prompt_tokens: Count
    name: str = field(compare=False)

    @property
    def prompt(self) -> str:
        """For people."""
        return "no prompt" if self.prompting == "none" else f"{self.prompting} prompt of {self.prompt_tokens} tokens"


def _at(*path: str) -> Any:
    """A field that is nested in the row; None if it is missing there."""
    return Field(None, validation_alias=AliasPath(*path))


def _needed(*path: str) -> Any:
    return Field(validation_alias=AliasPath(*path))


class SweepRow(BaseModel):
    """One answer, without nesting. Times are those of the emulated devices, in ms, already divided by ``slow_motion``.

    At temperature 0 (greedy decoding) ``top_k``, ``top_p`` and ``seed`` mean nothing: they are 0, 1 and None.
    """

    clock: Literal["measured", "computed"]
    emulated: StrictBool
    slow_motion: Number | None
    preset: str | None
    pipeline: Pipeline = Field(validation_alias="cluster")
    target: str = _needed("pair", "target")
    digest: str | None = _at("pair", "digest")
    gpu: str | None = _at("machine", "gpu")
    method: str
    tree: Tree | None
    bita: TrainedBita | None = None
    prompt_set: str
    prompt_index: Count
    repeat: Count
    temperature: Number = _needed("sampling", "temperature")
    max_tokens: Count = _needed("sampling", "max_tokens")
    ignore_eos: StrictBool = _needed("sampling", "ignore_eos")
    top_k: StrictInt | None = _at("sampling", "top_k")
    top_p: Number | None = _at("sampling", "top_p")
    seed: StrictInt | None = _at("sampling", "seed")
    output_tokens: Count
    timesteps: Count
    hits: Count
    misses: Count
    decode_ms: Number
    computed_ms_per_token: Number | None
    overran: Number | None
    breakdown: dict[str, Number] | None

    @model_validator(mode="after")
    def _check(self) -> SweepRow:
        if self.tokens and not self.timesteps:
            raise ValueError("timesteps must be at least 1, as tokens were decoded")
        if self.tokens and not self.decode_ms:
            raise ValueError("decode_ms must be above 0, as tokens were decoded")
        if self.method == BITA and self.bita is None:
            raise ValueError("bita is missing, which the method bita needs")
        if self.method == BITA and self.tree is not None and self.tree.shape not in SHAPES:
            raise ValueError(f"tree.shape must be one of {', '.join(SHAPES)}, not {self.tree.shape}")
        for name in ("top_k", "top_p", "seed") if self.temperature else ():
            if getattr(self, name) is None:
                raise ValueError(f"sampling.{name} is missing, which a temperature above 0 needs")
        return self

    @model_validator(mode="after")
    def _normalize(self) -> SweepRow:
        if self.temperature == 0:
            self.top_k, self.top_p, self.seed = 0, 1.0, None
        if self.method != BITA:
            self.bita, self.tree = None, self.tree and replace(self.tree, shape=None)
        self.top_k, self.slow_motion = max(0, self.top_k or 0), self.slow_motion or 1.0
        self.pipeline = replace(self.pipeline, preset=self.preset)
        return self

    @property
    def timing(self) -> str:
        """``measured`` and ``computed`` are emulated times: waited for, or by arithmetic. ``machine``: nothing is emulated."""
        return "computed" if self.clock == "computed" else "measured" if self.emulated else "machine"

    @property
    def machine(self) -> str:
        """What was measured, or what the emulation ran on."""
        if not self.emulated and self.pipeline.devices:
            return "a cluster of " + " and ".join(f"{count} {name}" for name, count in Counter(self.pipeline.devices).items())
        return f"1 {self.gpu or 'CPU'} machine"

    @property
    def tokens(self) -> int:
        """Decoded tokens: all but the first, which is the prefill's."""
        return max(0, self.output_tokens - 1)


def read_rows(sources: Iterable[Path]) -> list[SweepRow]:
    """The rows of several sweeps (directories, or JSONL files), in the order of the files.

    Raises:
        UserError: a file is missing or empty, or holds a line that is no row of a sweep. An unfinished last line is ignored: its
            writer was interrupted.
    """
    rows: list[SweepRow] = []
    for source in sources:
        path = source / ROWS_FILE if source.is_dir() else source
        found = [_checked(record, path, number) for number, record in read_records(path, SCHEMA)]
        if not found:
            raise UserError(f"{path} holds no rows: write some with pipedec bench sweep")
        rows += found
    return rows


def _checked(record: dict[str, object], path: Path, number: int) -> SweepRow:
    try:
        return SweepRow.model_validate(record)
    except ValidationError as error:
        raise UserError(f"{path}, line {number}: {_first_problem(error)}; sweep again or remove the line") from None


def _first_problem(error: ValidationError) -> str:
    """The key and what is wrong with it, in one line."""
    problem = error.errors(include_url=False)[0]
    key = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"{key} is missing"
    if problem["type"] == "value_error":
        text = str(problem["ctx"]["error"])
        return f"{key}: {text}" if key else text
    return f"{problem['msg'].replace('Input', key, 1)}, not {str(problem['input'])[:60]!r}"
