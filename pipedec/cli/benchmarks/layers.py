"""``pipedec bench layers``: large layers compared with the device's roofline."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.cli.benchmarks.operations import operations_table
from pipedec.cli.benchmarks.shared import OUT_HELP, PATH, append, comma_numbers, machine_text
from pipedec.cli.show import console
from pipedec.hardware import GIGA, MODEL_SHAPES


def _numbers_if_given(context: click.Context, parameter: click.Parameter, text: str | None) -> tuple[int, ...]:
    return () if text is None else comma_numbers(context, parameter, text)


@click.command()
@click.option("--model", default="llama-3.1-70b", show_default=True, help=f"Model shape: {', '.join(MODEL_SHAPES)}.")
@click.option("--layers", type=int, default=6, show_default=True, help="Number of layers of the stage.")
@click.option(
    "--rows", default="1,2,4,8,16,32,64,128", show_default=True, callback=comma_numbers, help="Rows per step, comma-separated."
)
@click.option(
    "--past", default="512,2048,8192", show_default=True, callback=comma_numbers,
    help="Accepted tokens before the step, comma-separated.",
)  # fmt: skip
@click.option(
    "--lanes", callback=_numbers_if_given,
    help="Numbers of requests, comma-separated: a step with one row of each is compared with one of as many rows of one request.",
)  # fmt: skip
@click.option("--runs", type=int, default=1, show_default=True, help="Runs of slots in which each KV cache lies.")
@click.option(
    "--tree-rows", default="32,448", show_default=True, callback=comma_numbers,
    help="Sizes of the trees that are grown and pruned, comma-separated.",
)  # fmt: skip
@click.option("--dtype", help="float32, bfloat16 or float16 (default: bfloat16 on CUDA, float32 on CPU).")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--repeats", type=int, default=20, show_default=True, help="Number of timed runs per step.")
@click.option("--out", type=PATH, help=OUT_HELP)
def layers(out: Path | None, **settings: Any) -> None:
    """Time layers with random weights against memory bandwidth and peak arithmetic; no checkpoint is needed.

    On a laptop: --model llama-3.2-1b --layers 1 --rows 1,8 --past 64 --lanes 8.
    """
    from pipedec.bench.kernels.layers import LayersConfig, measure_layers
    from pipedec.bench.record import check_writable

    config = LayersConfig(**settings)
    check_writable(out)
    with console.status("creating the layers") as status:
        measured = measure_layers(config, lambda row: status.update(f"measured: {row['operation']}"))
    forward = [row for row in measured if row["operation"] == "forward"]
    output = Console()
    output.print(_forward_table([row for row in forward if "over_one_lane" not in row]))
    if config.lanes:
        output.print(_lanes_table([row for row in forward if "over_one_lane" in row]))
    longest = max(row["past"] for row in forward)
    caption = f"Median (90th percentile). The KV cache is the whole stage's, with {longest} accepted tokens before the tree."
    output.print(operations_table([row for row in measured if row["operation"] != "forward"], caption))
    append(out, measured)


def _forward_table(rows: list[dict[str, Any]]) -> Table:
    config = rows[0]["config"]
    title = f"Stage of {config['model']}, {config['dtype']}, layers: {config['layers']}; one step"
    table = Table(title=title, caption=_caption(rows[0]), title_justify="left", caption_justify="left")
    for name in ("past", "rows", "measured ms", "bound ms", "set by", "of the bound", "GB/s"):
        table.add_column(name, justify="left" if name == "set by" else "right")
    for past, steps in groupby(rows, key=lambda row: row["past"]):
        for row in steps:
            reached = row["bytes"] / (row["time_us"]["median"] / 1e6) / GIGA
            cells = (f"{row['bound_us'] / 1000:.2f}", row["bound_by"], f"{row['share_of_bound']:.0%}", f"{reached:.0f}")
            table.add_row(str(past), str(row["rows"]), _spread_ms(row["time_us"]), *cells)
        table.add_section()
    return table


def _lanes_table(rows: list[dict[str, Any]]) -> Table:
    caption = "Median (90th percentile). One request: a step with as many rows, all of one request."
    table = Table(title="One row of each of many requests", caption=caption, title_justify="left", caption_justify="left")
    for name in ("past", "requests", "measured ms", "bound ms", "one request ms", "ratio"):
        table.add_column(name, justify="right")
    for row in rows:
        bound, ratio = f"{row['bound_us'] / 1000:.2f}", f"{row['over_one_lane']:.2f}"
        of_one = _spread_ms(row["one_lane_time_us"])
        table.add_row(str(row["past"]), str(row["lanes"]), _spread_ms(row["time_us"]), bound, of_one, ratio)
    return table


def _spread_ms(time_us: dict[str, float]) -> str:
    return f"{time_us['median'] / 1000:.2f} ({time_us['p90'] / 1000:.2f})"


def _caption(row: dict[str, Any]) -> str:
    roofline = row["roofline"]
    driver = f", driver {row['driver']}" if row["driver"] else ""
    return (
        f"Median (90th percentile). {machine_text(row)}{driver}. Bound: weights and cache read once at "
        f"{roofline['bytes_per_second'] / GIGA:.0f} GB/s, or all products at {roofline['flops_per_second'] / 1e12:.3g} TFLOP/s, "
        f"whichever takes longer ({roofline['source']}). GB/s: weights and cache by measured time."
    )
