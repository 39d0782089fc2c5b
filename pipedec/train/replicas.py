"""Processes that train one model together, as copies or as stages, as torchrun starts them: gloo on CPUs, NCCL on GPUs.

Owns their process group. Does not know what is trained.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FrameType
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from pipedec.core.errors import RankLost

_PATIENCE = timedelta(minutes=30)  # one process may generate a batch of answers more than another


@dataclass(frozen=True)
class Replicas:
    """One of ``size`` processes, with a ``rank`` from 0; by default the only one."""

    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes the shared files."""
        return self.rank == 0

    def shares(self, number: int) -> bool:
        """Whether this process does piece ``number`` of some work."""
        return number % self.size == self.rank

    def wait(self) -> None:
        """Wait until all processes are here. Raises RankLost if one is not here in time, or has ended."""
        if self.size > 1:
            with reporting_losses():
                dist.barrier()

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace the gradients of all processes by their sums; one that a process lacks is 0. Raises RankLost as ``wait``."""
        if self.size == 1:
            return
        learned = [parameter for parameter in parameters if parameter.requires_grad]
        for parameter in learned:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [parameter.grad for parameter in learned if parameter.grad is not None]
        vector_to_parameters(self.total(parameters_to_vector(gradients)), gradients)

    def total(self, values: Tensor) -> Tensor:
        """Replaces values by their sums over all processes, and returns them. Raises RankLost as ``wait``."""
        if self.size > 1:
            with reporting_losses():
                dist.all_reduce(values)
        return values

    def sum_of(self, value: Tensor) -> float:
        """The sum of one number over all processes. Raises RankLost as ``wait``."""
        return self.total(value.detach().clone()).item()


ALONE = Replicas()


@contextmanager
def replicas(device: torch.device, patience: timedelta = _PATIENCE) -> Iterator[Replicas]:
    """The process group of torchrun's processes inside the block; a single process without torchrun. ``patience``: how long one
    waits for another.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        yield ALONE
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=patience)
    before = signal.signal(signal.SIGTERM, _stopped)
    try:
        yield Replicas(int(os.environ["RANK"]), size)
    finally:
        signal.signal(signal.SIGTERM, before)
        dist.destroy_process_group()


def _stopped(number: int, frame: FrameType | None) -> NoReturn:
    """torchrun stops the processes of a host when one of them has ended."""
    raise RankLost("stopped, as torchrun does when another process of this training has ended")


@contextmanager
def reporting_losses() -> Iterator[None]:
    """Raises RankLost for what torch raises if another process is lost, but not for what this one computed wrong."""
    try:
        yield
    except RuntimeError as error:
        if error.__cause__ is not None or isinstance(error, torch.OutOfMemoryError):
            raise
        reason = str(error).splitlines()[0].split("] ", 1)[-1].split(". ")[0][:160]  # without gloo's source file
        raise RankLost(f"another process of this training has ended or stands still ({reason})") from None


def local_rank() -> int:
    """The number of this process among torchrun's on this host; 0 without torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))
