"""Timing operations on one device: the device, whether its memory suffices, and a stopwatch that waits for it.

Knows neither trees nor models.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import psutil
import torch

from benchmarks.output import check_known
from pipedec.config.settings import DEVICES
from pipedec.core.errors import UserError
from pipedec.device import Device, device_of
from pipedec.hardware import GIGA

_WARM_UP = 3
_USABLE_SHARE = 0.9

Prepared = TypeVar("Prepared")


@dataclass(frozen=True)
class Stopwatch:
    """Runs an operation on ``device``: a few times to warm up, then ``repeats`` times."""

    device: torch.device
    repeats: int
    marked: Device | None = None  # makes marks in the work of ``device``; None: as ``device_of`` does

    def time_us(self, prepare: Callable[[], Prepared], run: Callable[[Prepared], object]) -> dict[str, float]:
        """The spread of the microseconds of ``run``; ``prepare`` makes its argument before each run and is not timed.

        On CUDA a run ends when the device has finished: the time that the caller of a single operation waits.
        """
        device, times_us = self.marked or device_of(self.device), []
        for _ in range(_WARM_UP + self.repeats):
            prepared = prepare()
            device.record_event().wait()
            began = device.record_event()
            run(prepared)
            ended = device.record_event()
            ended.wait()
            times_us.append((ended.seconds - began.seconds) * 1e6)
        return spread(times_us[_WARM_UP:])


def device_named(name: str) -> torch.device:
    """The device for ``--device``; ``auto`` is CUDA if available. Raises UserError if there is no such device here."""
    check_known("device", name, DEVICES)
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UserError("--device cuda, but torch sees no GPU here: install a CUDA build of torch, or use --device cpu")
    return torch.device("cuda" if has_cuda and name != "cpu" else "cpu")


def check_memory(what: str, needed_bytes: int, device: torch.device, advice: str) -> None:
    """Raise UserError if ``needed_bytes`` are more than nine tenths of what ``device`` has free."""
    free_bytes = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    if needed_bytes > _USABLE_SHARE * free_bytes:
        raise UserError(
            f"{what} would take {needed_bytes / GIGA:.1f} GB, but {device.type} has {free_bytes / GIGA:.1f} GB free: {advice}"
        )


def spread(samples: Sequence[float]) -> dict[str, float]:
    """The 10th percentile (least disturbed by other work on the machine), the median and the 90th percentile."""
    ordered = sorted(samples)
    low, high = ordered[int(0.1 * len(ordered))], ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))]
    return {"p10": low, "median": statistics.median(ordered), "p90": high}
