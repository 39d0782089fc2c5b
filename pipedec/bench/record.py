"""The JSONL files of all benchmarks: the header of a row (machine, revision, date, configuration), appending and reading rows.

Also ``Grid``: cases that are measured into one directory, one row per case; a grid that was interrupted goes on where it stopped.
Owns the header and the file format. It does not know what the fields of a benchmark mean.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import torch

from pipedec import __version__
from pipedec.config.environment import processor_name, usable_cpus
from pipedec.core.errors import UserError

Row = dict[str, Any]

ROWS_FILE = "rows.jsonl"  # in the directory of a benchmark's results

_CHECKOUT = Path(__file__).resolve().parent.parent.parent
_GIT_SECONDS = 5.0


def header(benchmark: str, config: Row) -> Row:
    """The fields that begin every row of one run of ``benchmark``."""
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "version": __version__,
        "revision": revision(),
        "machine": machine(),
        "config": config,
    }


def revision() -> str:
    """The commit of the checkout that contains this package, with ``-dirty`` appended if files differ; else ``unknown``."""
    commit = _git("rev-parse", "HEAD")
    # A package installed inside another repository must not report that repository's commit.
    if commit is None or _git("rev-parse", "--show-toplevel") != str(_CHECKOUT):
        return "unknown"
    return f"{commit}-dirty" if _git("status", "--porcelain", "--untracked-files=no") else commit


def machine() -> Row:
    """Hardware and software versions that the results depend on."""
    return {
        "cpu": processor_name(),
        "cores": usable_cpus(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": round(psutil.getloadavg()[0], 2),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "platform": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def plain(value: Any) -> Row:
    """The fields of a dataclass or a struct, as reading them back from a JSON file would give them."""
    fields: Row = msgspec.json.decode(msgspec.json.encode(value))
    return fields


def check_writable(path: Path | None, flag: str = "--out") -> None:
    """Raise UserError, before anything is measured, if the results of ``flag`` could not be written to ``path``."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise UserError(f"{flag} {path}: there is no directory {path.parent}")
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UserError(f"{flag} {path}: it cannot be written")


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append ``rows`` to a JSONL file; one file may collect many runs."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read_records(path: Path, schema: str) -> Iterator[tuple[int, Row]]:
    """Line numbers and rows of a JSONL file whose rows have this schema (``pipedec.BENCHMARK/NUMBER``).

    An unfinished last line is ignored: its writer was interrupted. Raises UserError if the file cannot be read, or a line is not
    JSON or of another schema.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}; give a file of rows of {schema}") from None
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError):
            if number == len(lines):
                return
            raise UserError(f"{path}, line {number}: not JSON; remove the line, or give a file of rows of {schema}") from None
        found = record.get("schema") if isinstance(record, dict) else None
        if found != schema:
            problem = "no schema" if found is None else f"schema {found}"
            raise UserError(f"{path}, line {number}: {problem}, not {schema}; give another file")
        yield number, record


def key_of(identity: Any) -> str:
    """A digest of plain JSON values: equal for equal values."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]


def drop_unfinished_line(path: Path) -> None:
    """Remove an unfinished last line, left by a benchmark that was killed while it wrote; its row will be measured again."""
    if not path.is_file():
        return
    text = path.read_bytes()
    whole = text[: text.rfind(b"\n") + 1]
    if whole != text:
        with path.open("r+b") as file:
            file.truncate(len(whole))


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


def _git(*arguments: str) -> str | None:
    """The stripped output of git; None if git is missing or this is no checkout."""
    try:
        command = ["git", "-C", str(_CHECKOUT), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_SECONDS, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
