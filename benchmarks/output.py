"""Shared by the experiments, for what they print and write: tables, the machine of a row, and files of rows."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from rich.console import Console
from rich.table import Table

from pipedec.bench.options import Positive
from pipedec.bench.record import ROWS_FILE, Row, append_rows, plain
from pipedec.bench.report.style import save
from pipedec.cli.benchmarks.shared import print_files
from pipedec.core.errors import PipedecError, UserError
from pipedec.flags import Help
from pipedec.messages.run import RunDescription

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Device = Annotated[Literal["auto", "cpu", "cuda"], Help("Device; auto: a GPU if there is one.")]
Preset = Annotated[str, Help("Partition of the emulated cluster, like paper-14.", "NAME")]
StageCount = Annotated[Positive | None, Help("Number of stages, on the preset's first device (default: the preset's own).")]
StageCounts = Annotated[
    tuple[Positive, ...], Help("Stage counts, like 1,4,14, on the preset's first device (default: the preset's own).")
]
Out = Annotated[Path | None, Help("Append the results to this JSONL file.", "FILE")]
console = Console(stderr=True, highlight=False)  # for what is not a result


def pipeline_row(description: RunDescription) -> Row:
    """A run's description with every setting by its own name, as rows have always had it."""
    fields = plain(description)
    settings = fields.pop("settings")
    models = {key: getattr(description, key) for key in ("target", "draft", "bita")}
    return {**{name: value for group in settings.values() for name, value in group.items()}, **models, **fields}


def titled_table(title: str, columns: Sequence[str], caption: str | None = None, left: Collection[str] = ()) -> Table:
    """An empty table. Numbers are on the right: all columns except the first one and those named in ``left``."""
    table = Table(title=title, caption=caption, min_width=len(title), title_justify="left", caption_justify="left")
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number == 0 or name in left else "right", overflow="fold")
    return table


def machine_text(row: Row) -> str:
    """For a caption: the machine of a row whose configuration has ``device`` and ``threads``."""
    machine, config = row["machine"], row["config"]
    if config["device"] == "cuda":
        return f"{machine['gpu']}, torch {machine['torch']}"
    load = f"load average before: {machine['load_average']}"
    return f"{machine['cpu']}, {machine['cores']} cores, threads: {config['threads']}, {load}, torch {machine['torch']}"


def append(out: Path | None, rows: Sequence[Row]) -> None:
    """Append ``rows`` to the results file, if one was given, and report it."""
    if out is not None:
        append_rows(out, rows)
        console.print(f"Results appended to {out}")


def draw(figures: dict[str, Figure | None], out: Path) -> list[Path]:
    """Write the figures, except those that are None, into the directory ``out``. Raises UserError if that fails."""
    return [path for name, figure in figures.items() if figure is not None for path in save(figure, out / name)]


class SameAnswers:
    """Checks that the answers to a question are equal, by every method on every pipeline."""

    def __init__(self) -> None:
        self._first: dict[object, tuple[object, Row]] = {}

    def check(self, question: object, answer: object, row: Row, name: str) -> None:
        """Raise PipedecError unless ``answer`` is the first one that was given to ``question``, whose name is ``name``."""
        expected, first = self._first.setdefault(question, (answer, row))
        if answer != expected:
            both = " and ".join(f"{one['method']} on {one['cluster']['stages']} stages" for one in (row, first))
            raise PipedecError(f"{both} gave different answers {name}: a defect (or a near tie, if not in float32)")


def write_json(path: Path, document: Row) -> None:
    """Write a JSON file as a whole, or not at all."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def check_known(kind: str, name: str, choices: Iterable[str]) -> None:
    """Raise UserError unless ``name`` is one of ``choices``."""
    if name not in choices:
        raise UserError(f"unknown {kind} {name!r}: choose one of {', '.join(choices)}")


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> str:
    """A table whose columns are padded to equal width; those in ``left`` are left-aligned, others right-aligned."""
    lines = [list(titles), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(titles))]

    def joined(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def aligned(line: Sequence[str]) -> str:
        return joined(
            cell.ljust(width) if at in left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )

    rule = joined("-" * width if at in left else "-" * (width - 1) + ":" for at, width in enumerate(widths))
    return "\n".join([aligned(lines[0]), rule, *(aligned(line) for line in lines[1:])])


def write_summary(out: Path, text: str, document: str) -> None:
    """Write ``summary.md`` and ``summary.json`` beside the rows, print the former, and name all files."""
    (out / "summary.md").write_text(text, encoding="utf-8")
    (out / "summary.json").write_text(document, encoding="utf-8")
    print(text, end="")
    print_files(out / ROWS_FILE, out / "summary.md", out / "summary.json")
