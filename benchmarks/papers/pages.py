"""The page of a paper: each of its figures and tables with the result, what differs and the command, or why there is none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.output import markdown_table
from benchmarks.papers.experiment import Absent, Experiment, Result, Table


def page(title: str, about: str, entries: Sequence[Experiment | Absent], results: Mapping[str, Result]) -> str:
    """Markdown, entries in their order. ``about`` is the paragraph below the title."""
    parts = [f"# {title}", about]
    for entry in entries:
        parts.append(f"## {entry.title}")
        parts += [entry.reason] if isinstance(entry, Absent) else _measured(entry, results.get(entry.name))
    return "\n\n".join(parts) + "\n"


def _measured(experiment: Experiment, result: Result | None) -> list[str]:
    command = f"`python -m benchmarks.papers {experiment.name}`"
    if result is None:
        return [f"{command}, not run yet.", experiment.differs]
    size = "; ".join(text for text in (f"{result.size} size", result.place, result.prompts) if text)
    provenance = f"*{command}; {size}; {result.machine}; revision {result.revision[:8]}.*"
    return [provenance, *(_table(table) for table in result.tables), experiment.differs]


def _table(table: Table) -> str:
    left = [at for at in range(len(table.columns)) if not all(_is_number(row[at]) for row in table.rows)]
    parts = [f"*{table.title}*"] if table.title else []
    parts.append(markdown_table(table.columns, table.rows, left))
    parts += [table.note] if table.note else []
    return "\n\n".join(parts)


def _is_number(cell: str) -> bool:
    return not cell or cell == "–" or (cell[:1] in "−-+0123456789" and " (" not in cell)
