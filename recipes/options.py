"""Options that the commands of several recipes have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pipedec.core import UserError
from pipedec.flags import Help

Problems = Annotated[Path | None, Help("Word problems in the GSM8K JSONL format (training split).", "FILE")]


def existing(problems: Path | None) -> Path | None:
    """The file of ``--problems``. Raises UserError if it is missing."""
    if problems is not None and not problems.is_file():
        raise UserError(f"--problems {problems}: there is no such file")
    return problems
