"""``python -m benchmarks.kernels``: operations on tree, cache and attention one by one, large layers and a draft against the
roofline, own kernels beside torch.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks.kernels.comparison import ComparisonConfig, compare_kernels
from benchmarks.kernels.drafting import DraftingConfig, measure_drafting
from benchmarks.kernels.layers import LayersConfig, check_entry, measure_layers
from benchmarks.kernels.operations import OperationsConfig, measure_operations
from benchmarks.kernels.stopwatch import device_named
from benchmarks.output import Out, append, console, machine_text, titled_table
from pipedec.bench.record import Row, check_writable
from pipedec.flags import Help, options_of, own_options, run_command
from pipedec.hardware import DEVICES, GIGA
from pipedec.plan.speeds import MeasuredSpeed, write_speed

_LABELS = {
    ("grow", None): "grow by a layer",
    ("prune tree", "hit"): "prune tree, hit",
    ("prune tree", "miss"): "prune tree, miss",
    ("prune cache", "hit"): "prune cache, hit",
    ("prune cache", "miss"): "prune cache, miss",
    ("attention plan", None): "attention mask",
    ("tree attention", None): "tree attention",
    ("reference attention", None): "Algorithm 1 as written",
}


@click.group()
def kernels() -> None:
    """Time what a stage computes."""


@kernels.command()
@options_of(OperationsConfig, "config")
@own_options
def operations(config: OperationsConfig, out: Out = None) -> None:
    """Time growing, committing, pruning and attention, by tree size (width 32, 16 children).

    The default shape is that of the shipped target, with six of its layers in a stage.
    """
    check_writable(out)
    with console.status("measuring") as status:
        measured = measure_operations(config, lambda row: status.update(f"measured {row['operation']}, {row['tree_rows']} rows"))
    settings = measured[0]["config"]
    caption = (
        f"Median (90th percentile). {machine_text(measured[0])}. {settings['dtype']}; tokens before the tree: "
        f"{settings['past']}. Attention and its mask: {settings['heads']} heads, {settings['kv_heads']} key-value heads of "
        f"{settings['head_dim']}, one layer, the last {settings['width']} rows. Pruning also commits the accepted row; the cache "
        f"is that of {settings['layers']} layers. A hit keeps the largest subtree, a miss nothing."
    )
    Console().print(_operations_table(measured, caption))
    append(out, measured)


def _operations_table(rows: list[dict[str, Any]], caption: str) -> Table:
    """One line per operation, one column per tree size; below them the number of rows that a hit keeps."""
    sizes = sorted({row["tree_rows"] for row in rows})
    table = titled_table("Time of one operation in µs, by rows in the tree", ("", *map(str, sizes)), caption)
    measured = {(row["operation"], row["verdict"], row["tree_rows"]): row["time_us"] for row in rows}
    times = {key: f"{time_us['median']:.0f} ({time_us['p90']:.0f})" for key, time_us in measured.items()}
    for operation, label in _LABELS.items():
        if any(key[:2] == operation for key in times):
            table.add_row(label, *(times.get((*operation, size), "-") for size in sizes))
    kept = {row["tree_rows"]: str(row["kept_rows"]) for row in rows if row["verdict"] == "hit"}
    table.add_section()
    table.add_row("rows that the hit keeps", *(kept.get(size, "-") for size in sizes))
    return table


@kernels.command()
@options_of(LayersConfig, "config")
@own_options
def layers(
    config: LayersConfig,
    out: Out = None,
    write: Annotated[
        Path | None, Help("Write what plans take of this device to this file (pipedec/plan/speeds.json).", "FILE")
    ] = None,
) -> None:
    """Time layers with random weights against memory bandwidth and peak arithmetic; no checkpoint is needed.

    On a laptop: --model llama-3.2-1b --layers 1 --rows 1,8 --past 64 --lanes 8.
    """
    check_writable(out)
    check_writable(write, "--write")
    if write is not None:
        check_entry(write, device_named(config.device))
    with console.status("creating the layers") as status:
        measured = measure_layers(config, lambda row: status.update(f"measured: {row['operation']}"))
    forward = [row for row in measured if row["operation"] == "forward"]
    output = Console()
    output.print(_forward_table([row for row in forward if "over_one_lane" not in row]))
    if config.lanes:
        output.print(_lanes_table([row for row in forward if "over_one_lane" in row]))
    longest = max(row["past"] for row in forward)
    caption = f"Median (90th percentile). The KV cache is the whole stage's, with {longest} accepted tokens before the tree."
    output.print(_operations_table([row for row in measured if row["operation"] not in ("forward", "products")], caption))
    append(out, measured)
    _report_speed(next(row["speed"] for row in measured if row["operation"] == "products"), write)


def _report_speed(entry: Row | None, write: Path | None) -> None:
    """The entry for plans, printed and written to a file, if it has a data sheet."""
    if entry is None:
        return
    device, speed = entry["device"], MeasuredSpeed(**{key: value for key, value in entry.items() if key != "device"})
    share = f"{speed.bandwidth_share:.0%} of {DEVICES[device].bandwidth_gb_per_s:g} GB/s"
    console.print(f"For plans, {device}: products of one row read at {share}; a layer takes {speed.layer_us:g} µs beside.")
    if write is not None:
        write_speed(write, device, speed)
        console.print(f"Written to {write}")


def _forward_table(rows: list[dict[str, Any]]) -> Table:
    first, config, roofline = rows[0], rows[0]["config"], rows[0]["roofline"]
    driver = f", driver {first['driver']}" if first["driver"] else ""
    caption = (
        f"Median (90th percentile). {machine_text(first)}{driver}. Bound: weights and cache read once at "
        f"{roofline['bytes_per_second'] / GIGA:.0f} GB/s, or all products at {roofline['flops_per_second'] / 1e12:.3g} TFLOP/s, "
        f"whichever takes longer ({roofline['source']}). GB/s: weights and cache by measured time."
    )
    title = f"Stage of {config['model']}, {config['dtype']}, layers: {config['layers']}; one step"
    columns = ("past", "rows", "measured ms", "bound ms", "set by", "of the bound", "GB/s")
    table = titled_table(title, columns, caption, left=("set by",))
    for past, steps in groupby(rows, key=lambda row: row["past"]):
        for row in steps:
            reached = row["bytes"] / (row["time_us"]["median"] / 1e6) / GIGA
            cells = (f"{row['bound_us'] / 1000:.2f}", row["bound_by"], f"{row['share_of_bound']:.0%}", f"{reached:.0f}")
            table.add_row(str(past), str(row["rows"]), _spread_ms(row["time_us"]), *cells)
        table.add_section()
    return table


def _lanes_table(rows: list[dict[str, Any]]) -> Table:
    caption = "Median (90th percentile). One request: a step with as many rows, all of one request."
    columns = ("past", "requests", "measured ms", "bound ms", "one request ms", "ratio")
    table = titled_table("One row of each of many requests", columns, caption)
    for row in rows:
        bound, ratio = f"{row['bound_us'] / 1000:.2f}", f"{row['over_one_lane']:.2f}"
        of_one = _spread_ms(row["one_lane_time_us"])
        table.add_row(str(row["past"]), str(row["lanes"]), _spread_ms(row["time_us"]), bound, of_one, ratio)
    return table


def _spread_ms(time_us: dict[str, float]) -> str:
    return f"{time_us['median'] / 1000:.2f} ({time_us['p90'] / 1000:.2f})"


@kernels.command()
@options_of(ComparisonConfig, "config")
@own_options
def compare(config: ComparisonConfig, out: Out = None) -> None:
    """Time pipedec's own kernels beside torch's operations, with the share of the memory's bandwidth.

    On a laptop: --model llama-3.2-1b --rows 1,4 --past 64. With the package triton and TRITON_INTERPRET=1 kernels compute in
    Triton's interpreter: all but matmul within seconds (--only), with --rows 1 --repeats 1.
    """
    check_writable(out)
    with console.status("measuring") as status:
        measured = compare_kernels(config, lambda row: status.update(f"measured {row['operation']}, {row['rows']} rows"))
    first, settings = measured[0], measured[0]["config"]
    caption = (
        f"Median per call. {machine_text(first)}. {settings['model']}, {settings['dtype']}. Computed by {first['computed_by']}. "
        f"In brackets: the share of {first['roofline']['bytes_per_second'] / GIGA:.0f} GB/s at which operands and result pass "
        f"({first['roofline']['source']}). Difference: of the results, at most, as a share of the largest number."
    )
    table = titled_table("Own kernels beside torch", ("kernel", "past", "rows", "own µs", "torch µs", "difference"), caption)
    for row in measured:
        own, other = (
            f"{row[time]['median']:.1f} ({row[share]:.0%})"
            for time, share in (("time_us", "share_of_bandwidth"), ("torch_time_us", "torch_share"))
        )
        table.add_row(row["operation"], str(row["past"] or "-"), str(row["rows"]), own, other, f"{row['difference']:.0e}")
    Console().print(table)
    append(out, measured)


@kernels.command()
@options_of(DraftingConfig, "config")
@own_options
def draft(config: DraftingConfig, out: Out = None) -> None:
    """Time a small draft's forwards, and count how many fit into a timestep of a stage; no checkpoint is needed.

    On a laptop: --draft qwen3-0.6b --model llama-3.2-1b --layers 1 --rows 1,4 --past 64.
    """
    check_writable(out)
    with console.status("creating the models") as status:
        measured = measure_drafting(config, lambda row: status.update(f"measured: {row['operation']}"))
    step, *forwards = measured
    settings = step["config"]
    caption = (
        f"Median (90th percentile). {machine_text(step)}. {settings['dtype']}, after {settings['past']} tokens. A timestep: "
        f"{settings['layers']} layers of {settings['model']}, {settings['stage_rows']} rows, {_spread_ms(step['time_us'])} ms. "
        f"Bound: {step['roofline']['source']}."
    )
    columns = ("rows", "forward ms", "bound ms", "of the bound", "per timestep")
    table = titled_table(f"Draft {settings['draft']}; one forward", columns, caption)
    for row in forwards:
        bound = f"{row['bound_us'] / 1000:.2f}", f"{row['share_of_bound']:.0%}"
        table.add_row(str(row["rows"]), _spread_ms(row["time_us"]), *bound, str(row["per_timestep"]))
    Console().print(table)
    append(out, measured)


if __name__ == "__main__":
    run_command(kernels)
