"""Structured answers on emulated pipelines: questions × methods × stage counts, each with its schema and without one.

Without one an answer gets as many tokens as it has with its schema: in a short answer, every pass through the pipeline counts.
Owns the grid and the rows (``rows.jsonl``), one per answer; rows in the file are not measured again. All methods and pipelines
must give the same answer. Times are computed, and do not count rank 0's own work: a run gives the same figures anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from pipedec.bench.options import Methods, Positive, Preset, StageCounts
from pipedec.bench.progress import SweepProgress
from pipedec.bench.record import ROWS_FILE, Row, append_rows, drop_unfinished_line, header, key_of, plain, read_records
from pipedec.bench.structured.cases import Case, load_cases
from pipedec.bench.sweep.pipelines import Pair, Shape, emulated, pair_digest
from pipedec.config import ClusterConfig
from pipedec.core import PipedecError, Request, SamplingParams
from pipedec.engine.local import LocalPipeline
from pipedec.flags import Help, check_fields
from pipedec.methods import METHOD_NAMES, find_method
from pipedec.model import ModelConfig
from pipedec.text.prompt import Prompter

SCHEMA = "pipedec.structured/1"


@dataclass(frozen=True)
class StructuredConfig:
    """What is measured. Raises UserError for an unknown method or preset, or a number below 1."""

    cluster: ClusterConfig
    preset: Preset
    stages: StageCounts = ()
    methods: Methods = METHOD_NAMES
    questions: Annotated[Positive, Help("How many of the thirty questions, from the first on.")] = 30
    sampling: SamplingParams = SamplingParams(max_tokens=80)
    pair: Pair = Pair()

    def __post_init__(self) -> None:
        for method in self.methods:
            find_method(method)
        check_fields(self)
        self.cluster.find_partition(self.preset)

    def shapes(self) -> Iterator[Shape]:
        for stages in self.stages or (None,):
            yield emulated(self.cluster, self.preset, stages, self.pair, own_work=False)


class StructuredBench:
    """One grid, written to one directory."""

    def __init__(self, config: StructuredConfig, out: Path, progress: SweepProgress) -> None:
        self._config = config
        self._cases = load_cases()[: config.questions]
        self._path = out / ROWS_FILE
        self._progress = progress
        self._header = header("structured", {})
        out.mkdir(parents=True, exist_ok=True)
        drop_unfinished_line(self._path)
        records = read_records(self._path, SCHEMA) if self._path.is_file() else ()
        self._known: dict[str, Row] = {record["key"]: record for _, record in records}
        self._first: dict[tuple[str, bool], Row] = {}

    def run(self) -> list[Row]:
        """Measure the answers that are missing; returns the rows of all answers of this configuration.

        Raises:
            UserError: the file has rows of another schema, or the pair has no draft or BiTA for a method.
            PipedecError: two methods or pipelines gave different answers.
        """
        shapes = list(self._config.shapes())
        self._progress.start(len(shapes) * len(self._config.methods) * len(self._cases) * 2)
        return [row for shape in shapes for row in self._of_shape(shape)]

    def _of_shape(self, shape: Shape) -> Iterator[Row]:
        self._progress.busy(shape.label)
        pipeline = _Answers(shape)
        for case, is_structured, method in product(self._cases, (True, False), self._config.methods):
            row = self._row(shape, case, is_structured, method, pipeline)
            self._check(row)
            self._progress.row()
            yield row

    def _row(self, shape: Shape, case: Case, is_structured: bool, method: str, pipeline: _Answers) -> Row:
        sampling = self._sampling(case, is_structured)
        identity = {
            "preset": shape.preset,
            "cluster": shape.cluster,
            "pair": pair_digest(shape.spec),
            "kind": case.kind,
            "structured": is_structured,
            "method": method,
            "sampling": plain(sampling),
        }
        key = key_of([identity, case.prompt])
        if key not in self._known:
            provenance = {name: self._header[name] for name in ("date", "version", "revision", "machine")}
            figures = pipeline.generate(case.prompt, sampling, method)
            self._known[key] = {"schema": SCHEMA, "key": key, **provenance, **identity, **figures}
            append_rows(self._path, [self._known[key]])
        return self._known[key]

    def _sampling(self, case: Case, is_structured: bool) -> SamplingParams:
        if is_structured:
            return replace(self._config.sampling, structured_outputs=case.structure)
        return replace(self._config.sampling, max_tokens=len(self._first[case.kind, True]["token_ids"]))

    def _check(self, row: Row) -> None:
        """Raise PipedecError unless the answer equals that of the first method on the first pipeline."""
        first = self._first.setdefault((row["kind"], row["structured"]), row)
        if row["token_ids"] != first["token_ids"]:
            both = " and ".join(f"{one['method']} on {one['cluster']['stages']} stages" for one in (row, first))
            raise PipedecError(f"{both} gave different answers about {row['kind']}: a defect (or a near tie, if not in float32)")


class _Answers:
    """Answers of one pipeline, which is loaded for the first one that has to be generated."""

    def __init__(self, shape: Shape) -> None:
        self._spec = shape.spec
        self._prompter = Prompter(self._spec.target, ModelConfig.from_directory(self._spec.target).max_positions)
        self._pipeline: LocalPipeline | None = None

    def generate(self, prompt: str, sampling: SamplingParams, method: str) -> Row:
        """The figures of one answer. ``parses``: whether it is JSON; None if it was cut."""
        self._pipeline = self._pipeline or LocalPipeline.load(self._spec)
        token_ids = self._prompter.token_ids(prompt, False, sampling.max_tokens)
        verdicts = list(self._pipeline.run(Request(0, token_ids, sampling, method)))
        said = [token for verdict in verdicts for token in verdict.tokens]
        metrics, reason = self._pipeline.last.metrics, verdicts[-1].finished
        text = self._prompter.text(said)
        return {
            "token_ids": said,
            "text": text,
            "finish_reason": reason,
            "parses": _is_json(text) if reason == "stop" else None,
            "timesteps": metrics.timesteps,
            "hits": metrics.hits,
            "misses": metrics.misses,
            "draft_tokens": metrics.draft_tokens,
            "decode_ms": round(1000 * metrics.decode_seconds, 3),
        }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
