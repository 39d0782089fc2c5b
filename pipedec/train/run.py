"""Where a training computes, where it writes, and the two files that every trained model comes with.

Owns ``training.json`` and the model card beside the weights. It does not know what is trained.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta

from pipedec.engine.build import DTYPES
from pipedec.flags import Help
from pipedec.transport.replicas import ALONE, Replicas


@dataclass(frozen=True)
class Run:
    """Options that decide where a training runs and what it leaves behind.

    Attributes:
        dtype: what forward passes compute in; trained weights are float32.
        replicas: the processes that train together.
    """

    out: Annotated[Path, Help("Directory for the trained model and its training.json.", "DIR")]
    work: Annotated[Path, Help("Directory for checkpoint, log and generated answers; a second run continues it.", "DIR")]
    dtype: str = "float32"
    threads: Annotated[int, Meta(ge=1), Help("CPU threads.")] = 2
    device: torch.device = torch.device("cpu")
    replicas: Replicas = ALONE

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def write_report(self, report: dict[str, Any], card: str) -> None:
        """Write the model card, and last ``training.json``: where that file is, the training is complete."""
        (self.out / "README.md").write_text(card)
        unfinished = self.out / "training.partial"
        unfinished.write_text(json.dumps(report, indent=2) + "\n")
        unfinished.replace(self.out / "training.json")
