"""Decode threads on emulated pipelines: styles × methods × stage counts × prompts, one JSONL row per answer.

Owns the order of the grid. In one style every method and pipeline
must generate the same answer. ``answers`` generates one answer, ``summary`` computes statistics of the rows.
``pipedec-bestfirst`` keeps what it has learned from answer to answer of one style; an interruption loses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec.structs import replace

from pipedec.bench.grid import Grid, SameAnswers
from pipedec.bench.options import Drawing, Preset, StageCounts
from pipedec.bench.progress import SweepProgress
from pipedec.bench.prompts import DrawnPrompt, draw
from pipedec.bench.record import Row, plain
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated, pair_digest
from pipedec.bench.threads.answers import Style, ThreadAnswers, find_style
from pipedec.bench.threads.rows import BASELINE, SCHEMA, SEQUENTIAL
from pipedec.config import ClusterConfig
from pipedec.core import DEFAULT_METHOD, SamplingParams, UserError
from pipedec.data.prompts import PromptSet
from pipedec.flags import Help, check_fields
from pipedec.messages import PromptRequest
from pipedec.methods import find_method


@dataclass(frozen=True)
class ThreadsConfig(Drawing):
    """What is measured.

    Attributes:
        sampling: how to decode; with a temperature, ``seed`` also seeds the tokens.

    Raises:
        UserError: an unknown method, dialect or preset, or a number below 1.
    """

    cluster: ClusterConfig
    preset: Preset
    stages: StageCounts = ()
    dialects: Annotated[tuple[str, ...], Help(f"Dialects by name or file; {SEQUENTIAL}: one thread, the baseline.")] = (
        SEQUENTIAL, "apar", "pasta",
    )  # fmt: skip
    methods: Annotated[tuple[str, ...], Help(f"Methods; speed-ups are over {BASELINE}.")] = (BASELINE, DEFAULT_METHOD)
    sampling: SamplingParams = SamplingParams(max_tokens=64)
    pair: ModelPair = ModelPair()

    def __post_init__(self) -> None:
        for method in self.methods:
            find_method(method)
        check_fields(self)
        self.cluster.find_partition(self.preset)
        self.styles()

    def styles(self) -> dict[str, Style]:
        """By name."""
        found = [self.style(name) for name in self.dialects]
        named = {style.name: style for style in found}
        if len(named) < len(found):
            raise UserError("--dialects names a dialect twice")
        return named

    def style(self, dialect: str) -> Style:
        """The style of one of ``dialects``. Raises UserError for an unknown one."""
        return find_style(dialect)

    def shapes(self) -> Iterator[Shape]:
        for stages in self.stages or (None,):
            yield emulated(self.cluster, self.preset, stages, self.pair, own_work=self.own_work)

    def seeded_sampling(self) -> SamplingParams:
        """Sampling parameters of every answer."""
        return replace(self.sampling, seed=self.seed) if self.sampling.is_stochastic else self.sampling


def bench_threads(config: ThreadsConfig, prompt_sets: list[PromptSet], out: Path, progress: SweepProgress) -> list[Row]:
    """Measure the answers that are missing in ``out``; returns the rows of all answers of this configuration.

    Raises:
        UserError: no prompt fits into the context, the target lacks a dialect's control tokens, or ``out`` contains rows of
            another schema.
        PipedecError: two methods or pipelines gave different answers in the same style.
    """
    return ThreadsBench(config, out, progress).run(prompt_sets)


class ThreadsBench:
    """One grid, written to one directory."""

    def __init__(self, config: ThreadsConfig, out: Path, progress: SweepProgress) -> None:
        self._config = config
        self._styles = config.styles()
        self._progress = progress
        self._grid = Grid(SCHEMA, out, progress)
        self._same = SameAnswers()

    def run(self, prompt_sets: list[PromptSet]) -> list[Row]:
        shapes = list(self._config.shapes())
        per_cell = sum(min(self._config.samples, len(one.prompts)) for one in prompt_sets)
        self._progress.start(len(shapes) * len(self._styles) * len(self._config.methods) * per_cell)
        for shape in shapes:
            self._measure_shape(shape, prompt_sets)
        return self._grid.rows

    def _measure_shape(self, shape: Shape, prompt_sets: list[PromptSet]) -> None:
        self._progress.busy(shape.label)
        answers = ThreadAnswers(shape.spec, self._styles)
        request = PromptRequest("", self._config.raw_prompts, sampling=self._config.seeded_sampling())
        for prompt in draw(answers, prompt_sets, request, self._config.samples, self._config.seed):
            for dialect in self._styles:
                for method in self._config.methods:
                    self._measure(shape, prompt, dialect, method, answers)

    def _measure(self, shape: Shape, prompt: DrawnPrompt, dialect: str, method: str, answers: ThreadAnswers) -> None:
        identity = self._identity(shape, prompt, dialect, method)
        asked = [prompt.request.prompt, prompt.request.raw, self._styles[dialect].settings]

        def generate() -> Row:
            figures = answers.generate(replace(prompt.request, method=method), dialect)
            self._check({**identity, **figures})  # before it is written
            return figures

        self._grid.row(identity, asked, generate, self._check)

    def _identity(self, shape: Shape, prompt: DrawnPrompt, dialect: str, method: str) -> Row:
        """The fields that identify an answer."""
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
        """Raise PipedecError unless the answer equals that of the first method on the first pipeline."""
        question = row["prompt_set"], row["prompt_index"], row["dialect"]
        name = f"to prompt {row['prompt_index']} of {row['prompt_set']}, dialect {row['dialect']}"
        self._same.check(question, (row["document"], row["finish_reason"]), row, name)
