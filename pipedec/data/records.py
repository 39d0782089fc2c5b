"""Records of JSONL, JSONL.gz and CSV files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from pathlib import Path
from typing import Any

from pipedec.core import UserError


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL, JSONL.gz or CSV file, in the file's order.

    Raises:
        UserError: the file is missing or not in one of these formats.
    """
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, EOFError, zlib.error):
        raise UserError(f"{path} is neither UTF-8 text nor a complete gzip file of UTF-8 text") from None
    if path.suffix == ".csv":
        return list(csv.DictReader(io.StringIO(text)))
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            raise UserError(f"{path}, line {number}: not a JSON document") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object with fields")
        rows.append(row)
    return rows
