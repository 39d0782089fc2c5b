"""Ranks that compute on the CPU but believe that each has a GPU of its own, whose free memory a test writes into a file."""

from __future__ import annotations

import os
from pathlib import Path

import torch

import pipedec.cluster.meeting

TOTAL_BYTES = 4 * 10**9


def pretend(folder: Path) -> None:
    """For ``PreparedRanks``. Asked for its free memory, a GPU also leaves a file that is named after the process."""

    def mem_get_info(device: torch.device) -> tuple[int, int]:
        free = int(free_file(folder).read_text())
        (folder / f"{os.getpid()}.asked").touch()
        return free, TOTAL_BYTES

    torch.cuda.mem_get_info = mem_get_info  # type: ignore[assignment]
    pipedec.cluster.meeting.gpu_id = lambda device: f"GPU-{os.getpid()}"


def free_file(folder: Path) -> Path:
    """Bytes that are free on every GPU."""
    return folder / "free"
