"""Thirty questions, each with a JSON Schema for its answer: of the kinds that the JSON Schema Test Suite tests, one each.

Lengths and numbers have bounds, as a small model may go on with digits for ever.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipedec.core import StructuredOutputs

_FILE = Path(__file__).with_name("schemas.json")


@dataclass(frozen=True)
class Case:
    """One question.

    Attributes:
        kind: what the schema is about; different for every case.
    """

    kind: str
    prompt: str
    schema: dict[str, Any]

    @property
    def structure(self) -> StructuredOutputs:
        return StructuredOutputs(json=self.schema)


def load_cases() -> list[Case]:
    return [Case(**each) for each in json.loads(_FILE.read_text(encoding="utf-8"))]
