"""Prompt files: JSONL, JSONL.gz or CSV, with the prompt in one field of each record.

Knows how to select and sample prompts, but neither models nor what the prompts are for.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import random
import zlib
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipedec.core.errors import UserError

# The fields in which well-known data sets keep their prompt, tried in this order if no field is given.
_USUAL_FIELDS = ("prompt", "question", "turns", "request", "text", "instruction")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one file, in the file's order."""

    name: str
    prompts: tuple[str, ...]

    def shuffled(self, seed: int = 0) -> list[int]:
        """The indices of all prompts in a random order; the same for the same seed."""
        return random.Random(seed).sample(range(len(self.prompts)), len(self.prompts))

    def sample(self, count: int, seed: int = 0) -> PromptSet:
        """``count`` prompts sampled without replacement (all if there are fewer); the same for the same seed."""
        rng = random.Random(seed)
        return PromptSet(self.name, tuple(rng.sample(self.prompts, min(count, len(self.prompts)))))


@dataclass(frozen=True)
class PromptSource:
    """A named source of prompts: a file, or only those of its records whose field ``key`` is one of ``values``."""

    name: str
    path: Path
    key: str | None = None
    values: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> PromptSource:
        """Parse ``[NAME=]FILE[#KEY=VALUE,…]`` or raise UserError. The name defaults to a single value, else to the file's."""
        location, has_filter, condition = text.partition("#")
        name, has_name, path = location.rpartition("=")
        key, has_value, values = condition.partition("=")
        if not path or (has_filter and not (key and has_value and values)) or (has_name and not name):
            raise UserError(f"{text!r} is not a source of prompts: write FILE, NAME=FILE or NAME=FILE#KEY=VALUE")
        default = values if has_filter and "," not in values else Path(path).name.split(".")[0]
        return cls(name or default, Path(path), key or None, tuple(values.split(",")) if values else ())

    def read(self, field: str | None = None) -> PromptSet:
        """Read the prompts. Raises UserError as ``read_prompts`` does."""
        return replace(read_prompts(self.path, field, self.key, self.values), name=self.name)


def read_prompts(path: Path, field: str | None = None, key: str | None = None, values: Container[str] = ()) -> PromptSet:
    """Read a prompt file. If the field holds a conversation (a list of turns), the prompt is its first turn.

    Args:
        field: the field that holds the prompt; None to try the usual names.
        key, values: select the records whose field ``key`` is one of ``values``; None for all records.

    Raises UserError if the file cannot be read as one of these formats, a record has no prompt, or none is selected.
    """
    rows = read_rows(path)
    if not rows:
        raise UserError(f"{path} holds no prompts: it is empty")
    if key is not None:
        found = sorted({str(row.get(key)) for row in rows})
        rows = [row for row in rows if str(row.get(key)) in values]
        if not rows:
            raise UserError(f"{path} has no record with the requested {key!r}; its values are {', '.join(found[:20])}")
    chosen = field or next((name for name in _USUAL_FIELDS if name in rows[0]), None)
    if chosen is None or chosen not in rows[0]:
        raise UserError(f"{path} has no field {field or 'prompt'!r}: choose one of {', '.join(map(str, rows[0]))}")
    prompts = []
    for number, row in enumerate(rows, start=1):
        value: Any = row.get(chosen)
        text = value[0] if isinstance(value, list) and value else value
        if not isinstance(text, str) or not text.strip():
            raise UserError(f"{path}, record {number}: the field {chosen!r} holds no text")
        prompts.append(text)
    return PromptSet(path.name.split(".")[0], tuple(prompts))


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The records of a JSONL, JSONL.gz or CSV file, in the file's order. Raises UserError for any other file."""
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
