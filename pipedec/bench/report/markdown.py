"""Markdown tables that are also readable as plain text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


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
