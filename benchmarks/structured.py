"""``python -m benchmarks.structured``: answers that follow a JSON Schema, by every method, on emulated pipelines.

Questions × methods × stage counts, each with its schema and without one. Without one an answer gets as many tokens as it has with
its schema: in a short answer, every pass through the pipeline counts. All methods and pipelines must give the same answer. Times
are computed, and do not count rank 0's own work: a run gives the same figures anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import click
from msgspec.structs import replace

from benchmarks.output import Preset, SameAnswers, StageCounts, markdown_table, write_summary
from pipedec.bench.options import ClusterFile, Positive
from pipedec.bench.record import Grid, Row, SweepProgress, plain
from pipedec.bench.sweep.pipelines import ModelPair, Shape, emulated, pair_digest
from pipedec.cli.benchmarks.shared import OutDirectory, ProgressBar, make_directory
from pipedec.config import ClusterConfig, load_cluster, paper_cluster
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.core.values import check_fields
from pipedec.engine.local import LocalPipeline
from pipedec.families import model_config
from pipedec.flags import Help, own_options, partial_of, run_command
from pipedec.methods import METHOD_NAMES, find_method
from pipedec.text.prompt import Prompter

_FILE = Path(__file__).with_name("structured_schemas.json")


@dataclass(frozen=True)
class Case:
    """One question."""

    kind: str  # what the schema is about; different for every case
    prompt: str
    schema: dict[str, Any]

    @property
    def structure(self) -> StructuredOutputs:
        return StructuredOutputs(json=self.schema)


def load_cases() -> list[Case]:
    return [Case(**each) for each in json.loads(_FILE.read_text(encoding="utf-8"))]


SCHEMA = "pipedec.structured/1"


@dataclass(frozen=True)
class StructuredConfig:
    """The grid of answers. Raises UserError for an unknown method or preset, or a number below 1."""

    cluster: ClusterConfig
    preset: Preset
    stages: StageCounts = ()
    methods: Annotated[tuple[str, ...], Help("Methods.")] = METHOD_NAMES
    questions: Annotated[Positive, Help("How many of the thirty questions, from the first on.")] = 30
    sampling: SamplingParams = SamplingParams(max_tokens=80)
    pair: ModelPair = ModelPair()

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
        self._config, self._progress = config, progress
        self._cases = load_cases()[: config.questions]
        self._grid, self._same = Grid(SCHEMA, out, progress), SameAnswers()

    def run(self) -> list[Row]:
        """Measure the answers that are missing; returns the rows of all answers of this configuration.

        Raises UserError if the file has rows of another schema, or the pair has no draft or BiTA for a method; PipedecError if
        two methods or pipelines gave different answers.
        """
        shapes = list(self._config.shapes())
        self._progress.start(len(shapes) * len(self._config.methods) * len(self._cases) * 2)
        for shape in shapes:
            self._progress.busy(shape.label)
            pipeline = _Answers(shape)
            for case in self._cases:
                sampling = replace(self._config.sampling, structured_outputs=case.structure)
                first, *_ = [self._row(case, method, sampling, pipeline) for method in self._config.methods]
                sampling = replace(self._config.sampling, max_tokens=len(first["token_ids"]))
                for method in self._config.methods:
                    self._row(case, method, sampling, pipeline)
        return self._grid.rows

    def _row(self, case: Case, method: str, sampling: SamplingParams, pipeline: _Answers) -> Row:
        """The row of one answer, which must equal that of the first method on the first pipeline."""
        identity = {
            **pipeline.identity, "kind": case.kind, "structured": sampling.structured_outputs is not None, "method": method,
            "sampling": plain(sampling),
        }  # fmt: skip

        def check(row: Row) -> None:
            self._same.check((row["kind"], row["structured"]), row["token_ids"], row, f"about {row['kind']}")

        return self._grid.row(identity, [case.prompt], lambda: pipeline.generate(case.prompt, sampling, method), check)


class _Answers:
    """Answers of one pipeline, which is loaded for the first one that has to be generated."""

    def __init__(self, shape: Shape) -> None:
        self._spec = shape.spec
        self.identity = {"preset": shape.preset, "cluster": shape.cluster, "pair": pair_digest(shape.spec)}
        self._prompter = Prompter(self._spec.target, model_config(self._spec.target).max_position_embeddings)
        self._pipeline: LocalPipeline | None = None

    def generate(self, prompt: str, sampling: SamplingParams, method: str) -> Row:
        """The figures of one answer. ``parses``: whether it is JSON; None if it was cut."""
        self._pipeline = self._pipeline or LocalPipeline.load(self._spec)
        token_ids = self._prompter.token_ids(prompt, False, sampling.max_tokens)
        verdicts = list(self._pipeline.run(TokenizedRequest(0, token_ids, sampling, method)))
        answer = [token for verdict in verdicts for token in verdict.tokens]
        metrics, reason = self._pipeline.last.metrics, verdicts[-1].finished
        text = self._prompter.text(answer)
        return {
            "token_ids": answer,
            "text": text,
            "finish_reason": reason,
            "parses": _is_json(text) if reason == "stop" else None,
            **{name: getattr(metrics, name) for name in ("timesteps", "hits", "misses", "draft_tokens")},
            "decode_ms": round(1000 * metrics.decode_seconds, 3),
        }


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


_TITLES = (
    "stages", "method", "answers", "ended", "parse", "tokens", "timesteps per token", "without", "ratio", "ms per token",
    "without", "ratio",
)  # fmt: skip
_ABOUT = (
    "Emulated, computed clock. Every question with its JSON Schema, and without one as many tokens; all methods and pipelines "
    "gave the same answers. Ended: with an end token; parse: of these, those that are JSON. Tokens: of an answer with a schema."
)


def figures(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Means for each number of stages and method, in the order of the rows."""
    groups: dict[tuple[int, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["cluster"]["stages"], row["method"]), []).append(row)
    return [_of(*group, found) for group, found in groups.items()]


def markdown(rows: Sequence[Row]) -> str:
    lines = [
        [
            str(one["stages"]), one["method"], str(one["answers"]), str(one["ended"]), f"{one['parses']:.0%}",
            f"{one['tokens']:.1f}",
            *(f"{one[unit][name]:.2f}" for unit in ("timesteps", "ms") for name in ("with", "without", "ratio")),
        ]
        for one in figures(rows)
    ]  # fmt: skip
    return f"{_ABOUT}\n\n{markdown_table(_TITLES, lines, left=(1,))}\n"


def document(rows: Sequence[Row]) -> str:
    return json.dumps({"benchmark": "structured", "figures": figures(rows)}, indent=1) + "\n"


def _of(stages: int, method: str, rows: Sequence[Row]) -> dict[str, Any]:
    with_schema = [row for row in rows if row["structured"]]
    ended = [row for row in with_schema if row["finish_reason"] == "stop"]
    return {
        "stages": stages,
        "method": method,
        "answers": len(with_schema),
        "ended": len(ended),
        "parses": sum(row["parses"] for row in ended) / max(len(ended), 1),
        "tokens": sum(len(row["token_ids"]) for row in with_schema) / max(len(with_schema), 1),
        "timesteps": _both(rows, "timesteps"),
        "ms": _both(rows, "decode_ms"),
    }


def _both(rows: Sequence[Row], field: str) -> dict[str, float]:
    """A field per token, with schemas and without, and the ratio."""
    found = {}
    for name, is_structured in (("with", True), ("without", False)):
        chosen = [row for row in rows if row["structured"] is is_structured]
        tokens = sum(len(row["token_ids"]) - 1 for row in chosen)
        found[name] = sum(row[field] for row in chosen) / max(tokens, 1)
    return {**found, "ratio": found["with"] / max(found["without"], 1e-9)}


@click.command()
@partial_of(StructuredConfig, "measured")
@own_options
def structured(
    measured: Callable[..., StructuredConfig],
    out: OutDirectory,
    cluster: ClusterFile = None,
    max_tokens: Annotated[int, Help("Maximum number of output tokens.")] = 80,
    temperature: Annotated[float, Help("Sampling temperature; 0 is greedy.")] = 0.0,
    seed: Annotated[int, Help("Seed for sampling.")] = 0,
) -> None:
    """Answer thirty questions with a JSON Schema for each, and without: one row per answer in OUT/rows.jsonl.

    All stages run in one process; times are computed for the preset. Writes OUT/summary.md and OUT/summary.json. Answers that
    OUT/rows.jsonl already contains are not measured again.
    """
    config = measured(
        cluster=load_cluster(cluster) if cluster else paper_cluster(),
        sampling=SamplingParams(temperature, seed=seed if temperature else None, max_tokens=max_tokens),
    )
    make_directory(out)
    with ProgressBar() as bar:
        rows = StructuredBench(config, out, bar).run()
    write_summary(out, markdown(rows), document(rows))


if __name__ == "__main__":
    run_command(structured)
