"""``python -m soak.reads``: how often the ranks wait for their device, and whether they keep to their budgets.

Reads are counted per timestep while a pipeline answers. Everything runs in one process on a ``CountedDevice``, as it would run
on GPUs: with the attention of torch, without the kernels of flash-attention, and without log-probabilities, which are read when
they are asked for.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any

import click
from rich.console import Console
from rich.table import Table
from support.counted_device import DEVICE, CountedDevice

from pipedec.bench.options import Counts
from pipedec.bench.record import Row, append_rows, check_writable, header, plain
from pipedec.config import AUTO, Settings, settings_options
from pipedec.core.errors import PipedecError, UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.values import check_fields
from pipedec.engine.build import load_drafter, load_prompter, load_stage, new_scheduler, resolve
from pipedec.engine.local import LocalPipeline
from pipedec.flags import Help, own_options, partial_of, run_command
from pipedec.methods import find_method, make_options
from pipedec.plan.spec import PipelineSpec
from pipedec.stage import StageWorker
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, load_dialect

RANK_ZERO = "rank 0"
STAGE_BUDGET = 2.0  # reads per timestep
BUDGETS = {"pipedec": 4.0}  # of rank 0, by method
USUAL_BUDGET = 8.0  # of rank 0
_WORK = ("reset", "replay", "advance")
_MOST_PLACES = 12


@dataclass(frozen=True)
class ReadsConfig:
    """The requests that are answered while reads are counted."""

    methods: Annotated[tuple[str, ...], Help("Methods.")] = ("pp", "pipedec", "pipedec-bestfirst", "bita")
    requests: Annotated[Counts, Help("How many requests at a time.")] = (1, 16)  # each number is a run of its own
    prompt: Annotated[str, Help("Prompt of the requests.", "TEXT")] = "What does shutil.copytree() do?"
    sampling: SamplingParams = SamplingParams(max_tokens=32)
    threads: Annotated[
        str | None, Help("Let answers open decode threads: apar, pasta, parallel, or a dialect file.", "NAME|FILE")
    ] = None

    def __post_init__(self) -> None:
        for method in self.methods:
            find_method(method)
        check_fields(self)
        if self.sampling.max_tokens < 2:
            raise UserError("--max-tokens must be at least 2")


def measure_reads(spec: PipelineSpec, config: ReadsConfig, on_run: Callable[[str], None] = lambda text: None) -> list[Row]:
    """One row per method and number of requests. Raises UserError if a method cannot run with this pipeline."""
    counted = CountedDevice()
    with counted:
        pipeline = _pipeline(spec, counted)
    prompter = load_prompter(spec)
    rows = []
    for method in config.methods:
        for count in config.requests:
            on_run(f"{method}, {count} at a time")
            rows.append(_measured(spec, config, pipeline, counted, prompter, method, count))
    return rows


def _pipeline(spec: PipelineSpec, counted: CountedDevice) -> LocalPipeline:
    stages = [load_stage(spec, rank, DEVICE) for rank in range(1, spec.settings.cut.stages + 1)]
    for rank, stage in enumerate(stages, start=1):
        _attribute(stage, counted, f"stage {rank}")
    return LocalPipeline(spec, stages, new_scheduler(spec, load_drafter(spec, DEVICE), DEVICE))


def _attribute(worker: StageWorker, counted: CountedDevice, name: str) -> None:
    """Let reads during a worker's work be its own."""

    def attributed(work: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(work)
        def call(*args: Any, **kwargs: Any) -> Any:
            with counted.working(name):
                return work(*args, **kwargs)

        return call

    for work in _WORK:
        setattr(worker, work, attributed(getattr(worker, work)))


def _measured(
    spec: PipelineSpec, config: ReadsConfig, pipeline: LocalPipeline, counted: CountedDevice, prompter: Prompter, method: str,
    count: int,
) -> Row:  # fmt: skip
    counted.reads.clear()
    counted.mixed.clear()
    requests = [_request(config, method, prompter, number) for number in range(1, count + 1)]
    with counted, counted.working(RANK_ZERO):
        for _ in pipeline.run_all({1: requests}):
            pass
    timesteps = len(pipeline.fill)
    by_rank: Counter[str] = Counter()
    for (who, _), reads in counted.reads.items():
        by_rank[who] += reads
    stages = {f"stage {rank}": by_rank[f"stage {rank}"] / timesteps for rank in range(1, spec.settings.cut.stages + 1)}
    budget = BUDGETS.get(method, USUAL_BUDGET)
    figures = {
        "rank_0": by_rank[RANK_ZERO] / timesteps, "stages": stages, "budget": budget, "stage_budget": STAGE_BUDGET,
        "mixed": sum(counted.mixed.values()), "timesteps": timesteps,
        "places": [[who, line, reads / timesteps] for (who, line), reads in counted.reads.most_common()],
        "mixed_places": [[who, line, number] for (who, line), number in counted.mixed.most_common()],
    }  # fmt: skip
    return header("reads", plain(config) | {"method": method, "requests": count}) | figures


def _request(config: ReadsConfig, method: str, prompter: Prompter, number: int) -> TokenizedRequest:
    """A request of its own: the prompts end with different numbers."""
    dialect: Dialect | None = None if config.threads is None else load_dialect(config.threads)
    prompt = config.prompt if number == 1 else f"{config.prompt} {number}"
    ids = prompter.token_ids(prompt, False, config.sampling.max_tokens, None if dialect is None else dialect.name)
    threads = None if dialect is None else dialect.to_json()
    return TokenizedRequest(number, ids, config.sampling, method=method, options=make_options(method, {}), threads=threads)


def over_budget(row: Row) -> list[str]:
    """A line for each figure of a row that is above its budget."""
    method, requests = row["config"]["method"], row["config"]["requests"]
    what = f"{method} with {requests} requests"
    found = [f"{what}: rank 0 reads {row['rank_0']:.1f} times per timestep"] if row["rank_0"] > row["budget"] else []
    found += [f"{what}: {name} reads {reads:.1f} times" for name, reads in row["stages"].items() if reads > row["stage_budget"]]
    return found + ([f"{what}: {row['mixed']} operations on tensors of host and device"] if row["mixed"] else [])


@click.command()
@settings_options
@partial_of(ReadsConfig, "counted")
@own_options
def reads(
    settings: Settings,
    counted: Callable[..., ReadsConfig],
    max_tokens: Annotated[int, Help("Maximum number of output tokens.")] = 32,
    temperature: Annotated[float, Help("Sampling temperature; 0 is greedy.")] = 0.0,
    places: Annotated[bool, Help("Name the lines that read most often.")] = False,
    out: Annotated[Path | None, Help("Append the results to this JSONL file.", "FILE")] = None,
) -> None:
    """Count the host's reads of values that the device computes, per timestep: on a GPU each of them waits.

    All ranks run in one process, on a device that counts. Fails if rank 0 or a stage reads more often than its budget allows, or
    if tensors of host and device meet in an operation, which a GPU would refuse. The draft has the target's data type unless
    --draft-dtype is given, as on GPUs.
    """
    config = counted(sampling=SamplingParams(temperature, seed=0 if temperature else None, max_tokens=max_tokens))
    check_writable(out)
    numbers = settings.numbers
    spec = resolve(settings.replaced(draft_dtype=numbers.dtype) if numbers.draft_dtype == AUTO else settings)
    rows = measure_reads(spec, config, on_run=partial(click.echo, err=True))
    Console().print(_table(rows))
    for row in rows if places else ():
        _print_places(row)
    if out is not None:
        append_rows(out, rows)
    if found := [line for row in rows for line in over_budget(row)]:
        raise PipedecError("; ".join(found))


def _table(rows: list[Row]) -> Table:
    table = Table(title="Host reads per timestep", title_justify="left", caption_justify="left")
    table.caption = "A stage is the one that reads most often."
    for name in ("method", "requests", "timesteps", "rank 0", "budget", "stage", "budget", "mixed"):
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        config, stage = row["config"], max(row["stages"].values())
        table.add_row(
            config["method"], str(config["requests"]), str(row["timesteps"]), f"{row['rank_0']:.2f}", f"{row['budget']:.0f}",
            f"{stage:.2f}", f"{row['stage_budget']:.0f}", str(row["mixed"]),
        )  # fmt: skip
    return table


def _print_places(row: Row) -> None:
    click.echo(f"{row['config']['method']}, {row['config']['requests']} requests:")
    for who, line, count in row["places"][:_MOST_PLACES]:
        click.echo(f"  {count:6.2f} {who}: {line}")
    for who, line, count in row["mixed_places"][:_MOST_PLACES]:
        click.echo(f"  mixed {count} times, {who}: {line}")


if __name__ == "__main__":
    run_command(reads)
