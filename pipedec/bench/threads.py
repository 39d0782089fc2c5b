"""Decode threads on emulated pipelines: dialects × methods × stage counts × prompts, one JSONL row per answer.

Owns the grid and the rows (``rows.jsonl``); a row that is there is not measured again. In a dialect every method and pipeline
must say the same. How one answer is got is ``threads_answers``' business, what the rows show together ``threads_summary``'s.
What ``pipedec-bestfirst`` has learned goes from answer to answer of one dialect, and is lost with an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pipedec.bench.progress import SweepProgress
from pipedec.bench.prompts import DrawnPrompt, draw
from pipedec.bench.record import ROWS_FILE, Row, drop_unfinished_line, header, key_of, plain, read_records
from pipedec.bench.sweep.pipelines import Pair, Shape, emulated, pair_digest
from pipedec.bench.threads_answers import ThreadAnswers
from pipedec.bench.threads_rows import BASELINE, SCHEMA, SEQUENTIAL
from pipedec.config import ClusterConfig
from pipedec.core import PipedecError, SamplingParams, UserError
from pipedec.data.prompts import PromptSet
from pipedec.decoding import DEFAULT_METHOD, METHODS
from pipedec.messages import PromptRequest
from pipedec.threads import Dialect, load_dialect


@dataclass(frozen=True)
class ThreadsConfig:
    """What is measured.

    Attributes:
        preset: a partition of ``cluster``.
        stages: stage counts; empty for that of the preset.
        dialects: names or files of dialects; SEQUENTIAL for answers in one thread, with which the others are compared.
        methods: of METHODS.
        samples: prompts of each set, drawn by ``seed`` from those that fit into the context.
        sampling: how to decode; with a temperature, tokens are drawn by ``seed``.

    Raises:
        UserError: an unknown method, dialect or preset, or a number below 1.
    """

    cluster: ClusterConfig
    preset: str
    stages: tuple[int, ...] = ()
    dialects: tuple[str, ...] = (SEQUENTIAL, "apar", "pasta")
    methods: tuple[str, ...] = (BASELINE, DEFAULT_METHOD)
    samples: int = 10
    seed: int = 0
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    raw_prompts: bool = False
    pair: Pair = Pair()

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise UserError(f"unknown method {method!r}: choose from {', '.join(METHODS)}")
        for flag, values in {"--stages": self.stages, "--samples": (self.samples,)}.items():
            if any(value < 1 for value in values):
                raise UserError(f"{flag} must be at least 1")
        self.cluster.find_partition(self.preset)
        self.load_dialects()

    def load_dialects(self) -> dict[str, Dialect | None]:
        """Every dialect by its own name; None for answers in one thread."""
        loaded = [None if name == SEQUENTIAL else load_dialect(name) for name in self.dialects]
        named = {SEQUENTIAL if dialect is None else dialect.name: dialect for dialect in loaded}
        if len(named) < len(loaded):
            raise UserError("--dialects names a dialect twice")
        return named

    def shapes(self) -> Iterator[Shape]:
        for stages in self.stages or (None,):
            yield emulated(self.cluster, self.preset, stages, self.pair, 1.0)

    def drawn_sampling(self) -> SamplingParams:
        """How every answer is decoded."""
        return replace(self.sampling, seed=self.seed) if self.sampling.is_stochastic else self.sampling


def bench_threads(config: ThreadsConfig, prompt_sets: list[PromptSet], out: Path, progress: SweepProgress) -> list[Row]:
    """Measure what ``out`` lacks; returns all rows of this configuration, those measured before included.

    Raises:
        UserError: no prompt fits, the target has no tokens for a dialect, or ``out`` holds rows of another schema.
        PipedecError: a method or pipeline gave another answer than the first that was asked.
    """
    return ThreadsBench(config, out, progress).run(prompt_sets)


class ThreadsBench:
    """One grid into one directory."""

    def __init__(self, config: ThreadsConfig, out: Path, progress: SweepProgress) -> None:
        self._config = config
        self._dialects = config.load_dialects()
        self._path = out / ROWS_FILE
        self._progress = progress
        self._header = header("threads", {})
        out.mkdir(parents=True, exist_ok=True)
        drop_unfinished_line(self._path)
        records = read_records(self._path, SCHEMA) if self._path.is_file() else ()
        self._known: dict[str, Row] = {record["key"]: record for _, record in records}
        self._first: dict[tuple[object, ...], Row] = {}

    def run(self, prompt_sets: list[PromptSet]) -> list[Row]:
        shapes = list(self._config.shapes())
        per_cell = sum(min(self._config.samples, len(one.prompts)) for one in prompt_sets)
        self._progress.start(len(shapes) * len(self._dialects) * len(self._config.methods) * per_cell)
        return [row for shape in shapes for row in self._of_shape(shape, prompt_sets)]

    def _of_shape(self, shape: Shape, prompt_sets: list[PromptSet]) -> Iterator[Row]:
        self._progress.busy(shape.label)
        answers = ThreadAnswers(shape.spec, self._dialects)
        asked = PromptRequest("", self._config.raw_prompts, sampling=self._config.drawn_sampling())
        for prompt in draw(answers, prompt_sets, asked, self._config.samples, self._config.seed):
            for dialect in self._dialects:
                for method in self._config.methods:
                    row = self._row(shape, prompt, dialect, method, answers)
                    self._check(row)
                    self._progress.row()
                    yield row

    def _row(self, shape: Shape, prompt: DrawnPrompt, dialect: str, method: str, answers: ThreadAnswers) -> Row:
        identity = self._identity(shape, prompt, dialect, method)
        grammar = self._dialects[dialect]
        key = key_of([identity, prompt.request.prompt, prompt.request.raw, grammar and grammar.to_json()])
        if key not in self._known:
            figures = answers.ask(replace(prompt.request, method=method), dialect)
            provenance = {name: self._header[name] for name in ("date", "version", "revision", "machine")}
            row = {"schema": SCHEMA, "key": key, **provenance, **identity, **figures}
            self._check(row)
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
            self._known[key] = row
        return self._known[key]

    def _identity(self, shape: Shape, prompt: DrawnPrompt, dialect: str, method: str) -> Row:
        """What tells this row from all others."""
        spec = shape.spec
        return {
            "preset": shape.preset,
            "cluster": shape.cluster,
            "pair": {
                "target": str(spec.target), "draft": str(spec.draft) if spec.draft else None, "digest": pair_digest(spec),
            },
            "dialect": dialect,
            "method": method,
            "prompt_set": prompt.prompt_set,
            "prompt_index": prompt.index,
            "sampling": plain(prompt.request.sampling),
        }  # fmt: skip

    def _check(self, row: Row) -> None:
        """Raises PipedecError unless the answer is that of the first method on the first pipeline."""
        first = self._first.setdefault((row["prompt_set"], row["prompt_index"], row["dialect"]), row)
        if (row["document"], row["finish_reason"]) != (first["document"], first["finish_reason"]):
            both = " and ".join(f"{one['method']} on {one['cluster']['stages']} stages" for one in (row, first))
            place = f"prompt {row['prompt_index']} of {row['prompt_set']}, dialect {row['dialect']}"
            raise PipedecError(f"{both} gave different answers to {place}: a defect (or a near tie, if not in float32)")
