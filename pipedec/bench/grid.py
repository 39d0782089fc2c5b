"""A grid of cases that is measured into one directory, one row per case; a grid that was interrupted goes on where it stopped.

Owns ``rows.jsonl``: a row is known by its key, and a known case is not measured again. Knows neither pipelines nor prompts.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pipedec.bench.record import ROWS_FILE, Row, append_rows, drop_unfinished_line, header, key_of, read_records
from pipedec.core import PipedecError


class SweepProgress(Protocol):
    """Receives the total number of rows, each row that is finished or known, and a text about the current work."""

    def start(self, total: int) -> None: ...

    def busy(self, text: str) -> None: ...

    def row(self) -> None: ...


class Grid:
    """The rows of one run (``rows``, in the order of its cases), and those that the directory has from earlier ones.

    Raises UserError if ``out`` holds rows of another schema.
    """

    def __init__(self, schema: str, out: Path, progress: SweepProgress) -> None:
        self.rows: list[Row] = []
        self._schema = schema
        self._path = out / ROWS_FILE
        self._progress = progress
        now = header("", {})
        self._provenance = {name: now[name] for name in ("date", "version", "revision", "machine")}
        out.mkdir(parents=True, exist_ok=True)
        drop_unfinished_line(self._path)
        records = read_records(self._path, schema) if self._path.is_file() else ()
        self._known: dict[str, Row] = {record["key"]: record for _, record in records}

    def row(self, identity: Row, asked: list[Any], measure: Callable[[], Row], check: Callable[[Row], None]) -> Row:
        """The row of one case.

        Args:
            identity: the fields that distinguish the case from others.
            asked: values that do so, too, and are no fields of the row.
            measure: returns the other fields; called if the row is not known.
            check: raises PipedecError for a row that cannot be right, known or not.
        """
        key = key_of([identity, *asked])
        if key not in self._known:
            row = {"schema": self._schema, "key": key, **self._provenance, **identity, **measure()}
            append_rows(self._path, [row])
            self._known[key] = row
        row = self._known[key]
        check(row)
        self.rows.append(row)
        self._progress.row()
        return row


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
