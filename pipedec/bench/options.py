"""Annotated types, a check and the choice of prompts that the configurations of several benchmarks share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from pipedec.core import UserError
from pipedec.flags import Help

Positive = Annotated[int, Meta(ge=1)]
Counts = Annotated[tuple[Positive, ...], Meta(min_length=1)]

Preset = Annotated[str, Help("Partition of the emulated cluster, like paper-14.", "NAME")]
StageCount = Annotated[Positive | None, Help("Number of stages, on the preset's first device (default: the preset's own).")]
StageCounts = Annotated[
    tuple[Positive, ...], Help("Stage counts, like 1,4,14, on the preset's first device (default: the preset's own).")
]
ClusterFile = Annotated[Path | None, Help("A cluster.yaml whose partitions are the presets (default: the paper's).", "FILE")]
Target = Annotated[Path | None, Help("Target checkpoint directory (default: the shipped pair's).", "DIR")]
Draft = Annotated[str | None, Help("Draft checkpoint directory, or none.", "DIR|none")]
Device = Annotated[Literal["auto", "cpu", "cuda"], Help("Device; auto: a GPU if there is one.")]
Methods = Annotated[tuple[str, ...], Help("Methods.")]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Which prompts are answered (``samples`` of those that fit into the context), and what counts as their time."""

    samples: Annotated[Positive, Help("Number of prompts chosen from each set.")] = 10
    seed: Annotated[int, Help("Seed for choosing prompts and for sampling.")] = 0
    raw_prompts: Annotated[bool, Help("Do not apply the model's chat template.", flag="--raw-prompt")] = False
    own_work: Annotated[
        bool, Help("Count rank 0's own work in computed times, as measured on this machine.", flag="--own-work/--no-own-work")
    ] = True


def check_known(kind: str, name: str, choices: Iterable[str]) -> None:
    """Raise UserError unless ``name`` is one of ``choices``."""
    if name not in choices:
        raise UserError(f"unknown {kind} {name!r}: choose one of {', '.join(choices)}")
