"""Reports of a training as model cards and tables.

A card is a jinja2 template filled with the report that training writes as ``training.json``. Each training defines the fields of
its report.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]
Cells = Callable[..., list[str]]  # of a measured row

CARDS = Path(__file__).parent / "cards"  # the templates


def bita_cells(row: Row) -> list[str]:
    """Top 1, top 5 and loss of each mask; tokens per pass of chain and tree; groups."""
    shares = [" ".join(f"{share:.1%}" for share in row[key]) for key in ("top1", "top5")]
    loss = " ".join(f"{loss:.2f}" for loss in row["loss"])
    return [*shares, loss, f"{row['chain_tokens']:.2f}", f"{row['tree_tokens']:.2f}", f"{row['groups']:,}"]


def top_k_cells(row: Row) -> list[str]:
    """Top 1, top 4 and top 16."""
    return [f"{row[key]:.1%}" for key in ("top1", "top4", "top16")]


def change_cells(before: Row, after: Row) -> list[str]:
    """Top 1, top 4 and top 16, before → after; tokens."""
    changes = zip(top_k_cells(before), top_k_cells(after), strict=True)
    return [*(f"{old} → {new}" for old, new in changes), f"{after['tokens']:,}"]


CELLS: dict[str, Cells] = {"bita_cells": bita_cells, "top_k_cells": top_k_cells, "change_cells": change_cells}


def card(template: Path, report: dict[str, Any], cells: dict[str, Cells] = CELLS) -> str:
    """Markdown for ``README.md`` beside the weights; the template may call ``cells``."""
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters["fmt"] = format  # {{ steps | fmt(",") }}
    environment.filters["line"] = lambda cells, *first: f"| {' | '.join([*first, *cells])} |"
    environment.filters["shares"] = lambda shares: ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    environment.filters["counts"] = lambda counts, *without: ", ".join(
        f"{count:,} {name}" for name, count in counts.items() if name not in without
    )
    environment.filters["phases"] = lambda phases: ", ".join(f"{layers} layers for {steps:,} steps" for layers, steps in phases)
    environment.globals.update(cells)
    return environment.from_string(template.read_text(encoding="utf-8")).render(report)


def print_table(title: str, columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> None:
    """Print a table whose first column is left-aligned, the others right."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in rows:
        table.add_row(*row)
    Console().print(table)
