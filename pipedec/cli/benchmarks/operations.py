"""``pipedec bench operations``: operations on tree, cache and attention, timed one by one."""

from __future__ import annotations

from typing import Any

import click
from rich.console import Console
from rich.table import Table

from pipedec.bench.kernels.operations import OperationsConfig, measure_operations
from pipedec.bench.record import check_writable
from pipedec.cli.benchmarks.shared import Out, append, machine_text
from pipedec.cli.show import console
from pipedec.flags import options_of, own_options

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


@click.command()
@options_of(OperationsConfig, "config")
@own_options
def operations(config: OperationsConfig, out: Out = None) -> None:
    """Time growing, committing, pruning and attention, by tree size (width 32, 16 children).

    The default shape is that of the shipped target, with six of its layers in a stage.
    """
    check_writable(out)
    with console.status("measuring") as status:
        measured = measure_operations(config, lambda row: status.update(f"measured {row['operation']}, {row['tree_rows']} rows"))
    Console().print(operations_table(measured, _caption(measured[0])))
    append(out, measured)


def operations_table(rows: list[dict[str, Any]], caption: str) -> Table:
    """One line per operation, one column per tree size; below them the number of rows that a hit keeps."""
    table = Table(title="Time of one operation in µs, by rows in the tree", caption=caption)
    table.title_justify = table.caption_justify = "left"
    sizes = sorted({row["tree_rows"] for row in rows})
    for name in ("", *map(str, sizes)):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    times = {(row["operation"], row["verdict"], row["tree_rows"]): _spread(row["time_us"]) for row in rows}
    measured = {(row["operation"], row["verdict"]) for row in rows}
    for key in [key for key in _LABELS if key in measured]:
        table.add_row(_LABELS[key], *(times.get((*key, size), "-") for size in sizes))
    kept = {row["tree_rows"]: str(row["kept_rows"]) for row in rows if row["verdict"] == "hit"}
    table.add_section()
    table.add_row("rows that the hit keeps", *(kept.get(size, "-") for size in sizes))
    return table


def _spread(figures: dict[str, float]) -> str:
    return f"{figures['median']:.0f} ({figures['p90']:.0f})"


def _caption(row: dict[str, Any]) -> str:
    config = row["config"]
    return (
        f"Median (90th percentile). {machine_text(row)}. {config['dtype']}; tokens before the tree: "
        f"{config['past']}. Attention and its mask: {config['heads']} heads, {config['kv_heads']} key-value heads of "
        f"{config['head_dim']}, one layer, the last {config['width']} rows. Pruning also commits the accepted row; the cache "
        f"is that of {config['layers']} layers. A hit keeps the largest subtree, a miss nothing."
    )
