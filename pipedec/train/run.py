"""Where a training computes, where it writes, and its report: ``training.json``, a model card and tables.

A card is a jinja2 template filled with the report. Each training defines the fields of its report.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from jinja2 import Environment, StrictUndefined
from msgspec import Meta
from rich.console import Console
from rich.table import Table

from pipedec.engine.build import DTYPES
from pipedec.flags import Help
from pipedec.transport.replicas import ALONE, Replicas

Row = dict[str, Any]
Cells = Callable[..., list[str]]  # of a measured row
CARDS = Path(__file__).parent / "cards"  # the templates


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a path for a file that takes the place of ``path`` when it is complete."""
    unfinished = path.with_suffix(".partial")
    yield unfinished
    unfinished.replace(path)


@dataclass(frozen=True)
class Run:
    """Options that decide where a training runs and what it leaves behind.

    Attributes:
        dtype: what forward passes compute in; trained weights are float32.
        replicas: the processes that train together.
    """

    out: Annotated[Path, Help("Directory for the trained model and its training.json.", "DIR")]
    work: Annotated[Path, Help("Directory for checkpoint, log and generated answers; a second run continues it.", "DIR")]
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1), Help("CPU threads.")] = 2
    device: torch.device = torch.device("cpu")
    replicas: Replicas = ALONE

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def write_report(self, report: dict[str, Any], card: str) -> None:
        """Write the model card, and last ``training.json``: where that file is, the training is complete."""
        (self.out / "README.md").write_text(card)
        with replacing(self.out / "training.json") as unfinished:
            unfinished.write_text(json.dumps(report, indent=2) + "\n")


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
