"""Prompts for measuring: any JSONL, JSONL.gz or CSV file with the prompt in a named field.

Knows file formats and sampling; knows nothing of models or of what the prompts are for.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedec.core import UserError

# Where the well-known sets keep their prompt, tried in order when no field is named.
_USUAL_FIELDS = ("prompt", "question", "turns", "request", "text", "instruction")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one file, in its order."""

    name: str
    prompts: tuple[str, ...]

    def sample(self, count: int, seed: int = 0) -> PromptSet:
        """``count`` prompts drawn without replacement (all, if there are fewer), the same for the same seed."""
        rng = random.Random(seed)
        return PromptSet(self.name, tuple(rng.sample(self.prompts, min(count, len(self.prompts)))))


def read_prompts(path: Path, field: str | None = None) -> PromptSet:
    """Read a prompt file. Of a conversation (a list of turns) the first turn is the prompt.

    Raises:
        UserError: the file is missing, empty, not of these formats, or has no such field.
    """
    rows = _rows(path)
    if not rows:
        raise UserError(f"{path} holds no prompts: it is empty")
    chosen = field or next((name for name in _USUAL_FIELDS if name in rows[0]), None)
    if chosen is None or chosen not in rows[0]:
        raise UserError(f"{path} has no field {field or 'prompt'!r}: name one of {', '.join(map(str, rows[0]))}")
    prompts = []
    for number, row in enumerate(rows, start=1):
        value: Any = row.get(chosen)
        text = value[0] if isinstance(value, list) and value else value
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{path}, record {number}: the field {chosen!r} is no text")
        prompts.append(text)
    return PromptSet(path.name.split(".")[0], tuple(prompts))


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode("utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, EOFError, zlib.error):
        raise UserError(f"{path} is neither UTF-8 text nor a whole gzip file of it") from None
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
