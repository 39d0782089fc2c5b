"""The rows of ``pipedec bench sweep``: read from files, checked, made into one record per answer.

Owns the schema as its readers see it, and which rows may stand in one picture. It does not measure, and knows no statistics and
no pictures.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

from pipedec.core import UserError
from pipedec.methods import SHAPES

SCHEMA = "pipedec.sweep/1"
ROWS_FILE = "rows.jsonl"
PROMPT_SETS = {
    "humaneval": "HumanEval",
    "translation": "translation",
    "qa": "QA",
    "math_reasoning": "math",
    "rag": "RAG",
    "summarization": "summarization",
    "mt_bench": "MT-bench",
}
TIMINGS = ("measured", "computed", "machine")
# The text of this method is another, smaller model's: its rows say nothing about the target.
SMALL_MODEL = "slm"
BITA = "bita"
PROMPTINGS = ("none", "shallow", "deep")  # in the order of BiTA Table 3


@dataclass(frozen=True)
class Pipeline:
    """What an answer came from: a cluster, emulated or not. ``groups`` is what the paper calls the number of stages.

    Attributes:
        preset: the emulated partition; None when nothing is emulated.
        model, dtype: what is emulated; None when nothing is.
        stages: devices that hold layers.
        devices: their names, in order.
        fits: whether the model fits into their memory.
    """

    preset: str | None
    model: str | None
    dtype: str | None
    stages: int
    groups: int
    devices: tuple[str, ...] = ()
    fits: bool = True

    @property
    def recut(self) -> bool:
        """Whether the preset was cut into another number of stages than its name says."""
        number = re.search(r"-(\d+)$", self.preset or "")
        return number is not None and int(number[1]) != self.groups

    @property
    def name(self) -> str:
        """For people: the preset, and its stages where they do not follow from it."""
        stages = f"{self.groups} stages" if self.groups > 1 else "1 stage"
        return self.preset if self.preset and not self.recut else f"{self.preset}, {stages}" if self.preset else stages


@dataclass(frozen=True)
class Tree:
    """Limits of the prediction tree; ``depth``, ``rows`` and ``shape`` only where the method has them."""

    width: int | None
    children: int | None
    depth: int | None = None
    rows: int | None = None
    shape: str | None = None


@dataclass(frozen=True)
class TrainedBita:
    """The BiTA that gave an answer of ``bita``; two with equal weights are one, whatever their names.

    Attributes:
        digest: of its weights.
        prompting: ``deep``, ``shallow`` or ``none``.
        masks: how many were trained; a tree may use fewer.
        name: of its directory.
    """

    digest: str
    prompting: str
    masks: int
    prompt_tokens: int
    name: str = field(compare=False)

    @property
    def prompt(self) -> str:
        """For people."""
        return "no prompt" if self.prompting == "none" else f"{self.prompting} prompt of {self.prompt_tokens} tokens"


@dataclass(frozen=True)
class SweepRow:
    """One answer. Times are those of the emulated devices, in ms, already divided by ``slow_motion``.

    Attributes:
        timing: ``measured`` (real processes that last as long as the emulated devices), ``computed`` (emulated, by arithmetic)
            or ``machine`` (nothing is emulated).
        tokens: decoded tokens, all but the first.
        models: which real models did the work: the digest of their weights, else the target's directory.
        machine: its accelerator, else ``CPU``.
        bita: None for other methods than ``bita``.
        top_k, top_p, seed: 0, 1 and None for greedy answers, to which they mean nothing.
        case: what was asked; two methods are compared over answers with equal cases.
    """

    timing: str
    pipeline: Pipeline
    method: str
    tree: Tree | None
    bita: TrainedBita | None
    prompt_set: str
    prompt_index: int
    repeat: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    max_tokens: int
    ignore_eos: bool
    models: str
    machine: str
    slow_motion: float
    tokens: int
    timesteps: int
    hits: int
    misses: int
    decode_ms: float
    computed_ms_per_token: float | None
    overran: float | None
    breakdown: dict[str, float] | None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0

    @property
    def question(self) -> tuple[object, ...]:
        """What was asked, however the tokens were chosen."""
        return self.prompt_set, self.prompt_index, self.max_tokens, self.ignore_eos

    @property
    def sampling(self) -> tuple[float, int, float]:
        return self.temperature, self.top_k, self.top_p

    @property
    def draw(self) -> tuple[int, int | None]:
        """Which of several answers to one question: the number of the repeat, and its seed."""
        return self.repeat, self.seed

    @property
    def case(self) -> tuple[object, ...]:
        return self.question, self.sampling, self.draw

    @property
    def identity(self) -> tuple[object, ...]:
        return self.timing, self.models, self.pipeline, self.method, self.tree, self.bita, self.case


def read_rows(sources: Iterable[Path]) -> list[SweepRow]:
    """The rows of several sweeps (directories, or JSONL files) together; of rows that were measured twice, the later one.

    Raises:
        UserError: a file is missing, empty or holds a line that is no row of a sweep. A last line without its end is ignored:
            whoever wrote it was interrupted.
    """
    latest: dict[object, SweepRow] = {}
    for source in sources:
        path = source / ROWS_FILE if source.is_dir() else source
        num_rows = 0
        for number, record in read_records(path):
            row = _checked_row(record, path, number)
            latest.pop(row.identity, None)
            latest[row.identity] = row
            num_rows += 1
        if num_rows == 0:
            raise UserError(f"{path} holds no rows: write some with pipedec bench sweep")
    return list(latest.values())


def studies(rows: Sequence[SweepRow]) -> dict[str, list[SweepRow]]:
    """The rows that may stand in one picture, by timing: answers of more than one token, from one pair of models.

    Stochastic answers are there beside greedy ones alone: no picture shows them by themselves.

    Raises:
        UserError: the rows are of several pairs, or none is left.
    """
    models = sorted({row.models for row in rows if row.method != SMALL_MODEL})
    if len(models) > 1:
        raise UserError(f"the rows are of several pairs of models ({', '.join(models)}): plot each pair's rows alone")
    by_timing = {timing: [row for row in rows if row.timing == timing and row.tokens > 0] for timing in TIMINGS}
    shown = {timing: chosen for timing, chosen in by_timing.items() if greedy(chosen)}
    if not shown:
        raise UserError("no row holds a greedy answer of two tokens or more: sweep with --temperature 0 and --max-tokens above 1")
    return shown


def greedy(rows: Iterable[SweepRow]) -> list[SweepRow]:
    return [row for row in rows if row.is_greedy]


def read_records(path: Path, wanted: str = SCHEMA) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers and rows as they were written, their schema checked. Raises UserError as ``read_rows`` does."""
    for number, record in _documents(path, wanted):
        schema = record.get("schema") if isinstance(record, dict) else None
        if schema != wanted:
            found = f"schema {schema}" if schema is not None else "no schema"
            raise UserError(f"{path}, line {number}: {found}, not {wanted}; give what {_writer(wanted)} wrote")
        yield number, record


def _writer(schema: str) -> str:
    """The command whose rows have this schema."""
    return f"pipedec bench {schema.removeprefix('pipedec.').partition('/')[0]}"


def _documents(path: Path, wanted: str) -> Iterator[tuple[int, Any]]:
    """Line numbers and what the lines hold."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give what {_writer(wanted)} wrote") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            if number == len(lines):
                return
            raise UserError(f"{path}, line {number}: not JSON; remove the line or give what {_writer(wanted)} wrote") from None


def _checked_row(record: Any, path: Path, number: int) -> SweepRow:
    try:
        return _row(record)
    except KeyError as error:
        raise UserError(f"{path}, line {number}: {error.args[0]} is missing; sweep again or remove the line") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise UserError(f"{path}, line {number}: {error}; sweep again or remove the line") from None


def _row(record: dict[str, Any]) -> SweepRow:
    """A row from its line. Raises KeyError for what is missing, ValueError and TypeError for what is of the wrong kind."""
    sampling, pair, emulated = _of(dict, record, "sampling"), _of(dict, record, "pair"), _of(bool, record, "emulated")
    clock, tokens = _of(str, record, "clock"), _count(record, "output_tokens") - 1
    temperature, top_k, top_p, seed = _drawing(sampling)
    if clock not in ("measured", "computed"):
        raise ValueError(f"clock must be measured or computed, not {clock}")
    return SweepRow(
        timing="computed" if clock == "computed" else "measured" if emulated else "machine",
        pipeline=_pipeline(record["preset"], _of(dict, record, "cluster")),
        method=_of(str, record, "method"),
        tree=_tree(record),
        bita=_bita(_of(dict, record, "bita")) if record["method"] == BITA else None,
        prompt_set=_of(str, record, "prompt_set"),
        prompt_index=_count(record, "prompt_index"),
        repeat=_count(record, "repeat"),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        max_tokens=_count(sampling, "max_tokens"),
        ignore_eos=_of(bool, sampling, "ignore_eos"),
        models=str(pair.get("digest") or pair["target"]),
        machine=str(_of(dict, record, "machine").get("gpu") or "CPU"),
        slow_motion=_optional(record, "slow_motion") or 1.0,
        tokens=max(0, tokens),
        timesteps=_count(record, "timesteps", least=1 if tokens > 0 else 0),
        hits=_count(record, "hits"),
        misses=_count(record, "misses"),
        decode_ms=_number(record, "decode_ms", above=0 if tokens > 0 else None),
        computed_ms_per_token=_optional(record, "computed_ms_per_token"),
        overran=_optional(record, "overran"),
        breakdown=_breakdown(record),
    )


def _drawing(sampling: dict[str, Any]) -> tuple[float, int, float, int | None]:
    """Temperature, top_k, top_p and seed, the last three as if not given where the likeliest token is taken."""
    temperature = _number(sampling, "temperature")
    if temperature == 0:
        return temperature, 0, 1.0, None
    return temperature, max(0, _of(int, sampling, "top_k")), _number(sampling, "top_p"), _of(int, sampling, "seed")


def _pipeline(preset: Any, cluster: dict[str, Any]) -> Pipeline:
    stages, groups = _count(cluster, "stages"), _count(cluster, "groups")
    if not 1 <= groups <= stages:
        raise ValueError(f"cluster.groups must lie between 1 and cluster.stages, not {groups} for {stages} stages")
    model, dtype = cluster.get("model"), cluster.get("dtype")
    devices = tuple(str(device) for device in cluster.get("devices") or ())
    return Pipeline(_text(preset), _text(model), _text(dtype), stages, groups, devices, cluster.get("fits") is not False)


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _tree(record: dict[str, Any]) -> Tree | None:
    if record["tree"] is None:
        return None
    raw = _of(dict, record, "tree")
    names = ("width", "children", "depth", "rows")
    width, children, depth, rows = (None if raw.get(name) is None else _count(raw, name) for name in names)
    return Tree(width, children, depth, rows, _one_of(SHAPES, raw, "shape") if record["method"] == BITA else None)


def _bita(raw: dict[str, Any]) -> TrainedBita:
    digest, name, prompting = _of(str, raw, "digest"), _of(str, raw, "name"), _one_of(PROMPTINGS, raw, "prompting")
    return TrainedBita(digest, prompting, _count(raw, "masks", least=1), _count(raw, "prompt_tokens"), name)


def _breakdown(record: dict[str, Any]) -> dict[str, float] | None:
    raw = None if record["breakdown"] is None else _of(dict, record, "breakdown")
    return None if raw is None else {name: _number(raw, name) for name in raw}


def _of(kind: type[Any], raw: dict[str, Any], name: str) -> Any:
    value = raw[name]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"{name} is {value!r}, not of type {kind.__name__}")
    return value


def _one_of(known: Sequence[str], raw: dict[str, Any], name: str) -> str:
    value: str = _of(str, raw, name)
    if value not in known:
        raise ValueError(f"{name} is {value!r}, not one of {', '.join(known)}")
    return value


def _count(raw: dict[str, Any], name: str, least: int = 0) -> int:
    value = _of(int, raw, name)
    if value < least:
        raise ValueError(f"{name} is {value}, below {least}")
    return int(value)


def _number(raw: dict[str, Any], name: str, above: float | None = None) -> float:
    value = raw[name]
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise ValueError(f"{name} is {value!r}, not a number from 0")
    if above is not None and value <= above:
        raise ValueError(f"{name} is {value!r}, not above {above:g}")
    return float(value)


def _optional(raw: dict[str, Any], name: str) -> float | None:
    return None if raw[name] is None else _number(raw, name)
