"""What several ``pipedec bench`` commands have in common: the results file, lists of numbers, the machine in words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from pipedec.cli.show import console
from pipedec.core import UserError

PATH = click.Path(path_type=Path)
OUT_HELP = "Append the figures to this JSONL file."


def numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise UserError(f"{flag} {text}: write numbers with commas between them, like 1,4,8") from None


def append(out: Path | None, rows: Iterable[dict[str, Any]]) -> None:
    """Add ``rows`` to the results file, if there is one, and say so."""
    from pipedec.bench.record import append_rows

    if out is not None:
        append_rows(out, rows)
        console.print(f"Figures appended to {out}")


def machine_text(row: dict[str, Any]) -> str:
    """For a caption: where a row that has ``device`` and ``threads`` in its configuration was measured."""
    machine, config = row["machine"], row["config"]
    if config["device"] == "cuda":
        return f"{machine['gpu']}, torch {machine['torch']}"
    load = f"load average before: {machine['load_average']}"
    return f"{machine['cpu']}, {machine['cores']} cores, threads: {config['threads']}, {load}, torch {machine['torch']}"
