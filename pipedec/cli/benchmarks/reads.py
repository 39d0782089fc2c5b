"""``pipedec bench reads``: how often the ranks wait for their device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.bench.reads.counting import ReadsConfig, measure_reads, over_budget
from pipedec.bench.record import check_writable
from pipedec.cli.benchmarks.shared import Out, append
from pipedec.cli.options import MaxTokens, Temperature
from pipedec.cli.show import console
from pipedec.config import AUTO, Settings, settings_options
from pipedec.core import PipedecError, SamplingParams
from pipedec.engine.build import resolve
from pipedec.flags import Help, own_options, partial_of

_MOST_PLACES = 12


@click.command()
@settings_options
@partial_of(ReadsConfig, "counted")
@own_options
def reads(
    settings: Settings,
    counted: Callable[..., ReadsConfig],
    max_tokens: MaxTokens = 32,
    temperature: Temperature = 0.0,
    places: Annotated[bool, Help("Name the lines that read most often.")] = False,
    out: Out = None,
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
    with console.status("reads") as status:
        rows = measure_reads(spec, config, on_run=status.update)
    Console().print(_table(rows))
    for row in rows if places else ():
        _print_places(row)
    append(out, rows)
    if found := [line for row in rows for line in over_budget(row)]:
        raise PipedecError("; ".join(found))


def _table(rows: list[dict[str, Any]]) -> Table:
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


def _print_places(row: dict[str, Any]) -> None:
    console.print(f"{row['config']['method']}, {row['config']['requests']} requests:", highlight=False)
    for who, line, count in row["places"][:_MOST_PLACES]:
        console.print(f"  {count:6.2f} {who}: {line}", markup=False, highlight=False, soft_wrap=True)
    for who, line, count in row["mixed_places"][:_MOST_PLACES]:
        console.print(f"  mixed {count} times, {who}: {line}", markup=False, highlight=False, soft_wrap=True)
