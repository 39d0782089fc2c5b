"""Prompts for measuring: any JSONL, JSONL.gz or CSV file with the prompt in a named field.

Knows file formats and sampling; knows nothing of models or of what the prompts are for.
"""

from __future__ import annotations

import random
from collections.abc import Container
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipedec.core import UserError
from pipedec.data.records import read_rows

# Where the well-known sets keep their prompt, tried in order when no field is named.
_USUAL_FIELDS = ("prompt", "question", "turns", "request", "text", "instruction")


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one file, in its order."""

    name: str
    prompts: tuple[str, ...]

    def shuffled(self, seed: int = 0) -> list[int]:
        """The numbers of all prompts in an order drawn by ``seed``."""
        return random.Random(seed).sample(range(len(self.prompts)), len(self.prompts))

    def sample(self, count: int, seed: int = 0) -> PromptSet:
        """``count`` prompts drawn without replacement (all, if there are fewer), the same for the same seed."""
        rng = random.Random(seed)
        return PromptSet(self.name, tuple(rng.sample(self.prompts, min(count, len(self.prompts)))))


@dataclass(frozen=True)
class PromptSource:
    """Where a named set comes from: a file, or the records of a file whose ``key`` holds one of ``values``."""

    name: str
    path: Path
    key: str | None = None
    values: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> PromptSource:
        """``[NAME=]FILE[#KEY=VALUE,…]``; the name is by default the value, or the file's own.

        Raises:
            UserError: it is not of this form.
        """
        place, has_filter, chosen = text.partition("#")
        name, has_name, path = place.rpartition("=")
        key, has_value, values = chosen.partition("=")
        if not path or (has_filter and not (key and has_value and values)) or (has_name and not name):
            raise UserError(f"{text!r} names no prompts: write FILE, NAME=FILE or NAME=FILE#KEY=VALUE")
        default = values if has_filter and "," not in values else Path(path).name.split(".")[0]
        return cls(name or default, Path(path), key or None, tuple(values.split(",")) if values else ())

    def read(self, field: str | None = None) -> PromptSet:
        """Its prompts. Raises UserError as ``read_prompts`` does, or when no record has such a value."""
        return replace(read_prompts(self.path, field, self.key, self.values), name=self.name)


def read_prompts(path: Path, field: str | None = None, key: str | None = None, values: Container[str] = ()) -> PromptSet:
    """Read a prompt file. Of a conversation (a list of turns) the first turn is the prompt.

    Args:
        field: the field that holds the prompt; None for the usual ones.
        key, values: take only records whose field ``key`` is one of ``values``.

    Raises:
        UserError: the file is missing, empty, not of these formats, has no such field or no such record.
    """
    rows = read_rows(path)
    if not rows:
        raise UserError(f"{path} holds no prompts: it is empty")
    if key is not None:
        found = sorted({str(row.get(key)) for row in rows})
        rows = [row for row in rows if str(row.get(key)) in values]
        if not rows:
            raise UserError(f"{path} has no record with such a {key!r}: it holds {', '.join(found[:20])}")
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
