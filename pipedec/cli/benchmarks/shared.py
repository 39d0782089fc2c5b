"""Shared by several ``pipedec bench`` commands: options of prompts and models, progress, tables, the results file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from pipedec.bench.options import ClusterFile, Draft, Target
from pipedec.bench.sweep.pipelines import ModelPair
from pipedec.cli.options import MaxTokens, PromptField, Prompts, Temperature, TopK, TopP
from pipedec.cli.show import console
from pipedec.config import ClusterConfig, load_cluster, paper_cluster
from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.data import PromptSet, PromptSource
from pipedec.flags import Help, options_of

OutDirectory = Annotated[Path, Help("Directory of the results; an interrupted run is resumed.", "DIR")]
AS_IT_IS = "a running cluster is measured as it is: leave this out, or --redis, --run and --running"
PromptTexts = Annotated[tuple[str, ...], Help("A prompt; may be repeated.", "TEXT", "--prompt", repeated=True)]


@dataclass(frozen=True)
class EmulatedClusterFlags:
    """The cluster that is emulated, and the models that run."""

    cluster: ClusterFile = None
    target: Target = None
    draft: Draft = None

    @property
    def config(self) -> ClusterConfig:
        """The cluster.yaml. Raises UserError for an unsound file."""
        return load_cluster(self.cluster) if self.cluster else paper_cluster()

    @property
    def pair(self) -> ModelPair:
        return ModelPair(self.target, self.draft)


@dataclass(frozen=True)
class BenchPromptFlags(EmulatedClusterFlags):
    """Prompts, sampling, models and the emulated cluster."""

    sources: Prompts = ()
    field: PromptField = None
    texts: PromptTexts = ()
    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    max_tokens: MaxTokens = 64

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, max_tokens=self.max_tokens)

    def settings(self) -> dict[str, Any]:
        """The fields that the configurations of all these commands have."""
        return {"cluster": self.config, "sampling": self.sampling, "pair": self.pair}

    def prompt_sets(self) -> list[PromptSet]:
        """The prompt sets. Raises UserError if there are none, or one cannot be read."""
        sets = [PromptSource.parse(source).read(self.field) for source in self.sources]
        if self.texts:
            sets.append(PromptSet("prompt", self.texts))
        if not sets:
            raise UserError("no prompts: give --prompts FILE or --prompt TEXT")
        return sets


def make_directory(out: Path) -> None:
    """Create the directory of the results. Raises UserError if that cannot be."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out}: cannot create this directory: {error.strerror}") from None


def print_table(table: Table, width: int) -> None:
    """Print a table, in ``width`` columns unless a terminal determines them."""
    Console(width=None if Console().is_terminal else width).print(table)


def print_files(*files: Path) -> None:
    """Name files as they are: not wrapped, brackets in names kept."""
    for file in files:
        console.print(str(file), markup=False, soft_wrap=True)


question_options = options_of(BenchPromptFlags, "asked")


class ProgressBar:
    """The progress of a benchmark of many rows, with the time left."""

    def __init__(self) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
            console=console,
        )  # fmt: skip
        self._task = self._progress.add_task("prompts", total=None)

    def __enter__(self) -> ProgressBar:
        self._progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._progress.stop()

    def start(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def busy(self, text: str) -> None:
        self._progress.update(self._task, description=text)

    def row(self) -> None:
        self._progress.advance(self._task)
