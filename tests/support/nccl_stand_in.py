"""What stands for NCCL between ranks on CPUs: groups that, when a peer is lost, hang or abort the process as NCCL may.

For ``PreparedRanks``. They are connected by gloo.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from pipedec.transport.torch_distributed import ProcessGroups, gloo_group

_dying = False


def hangs_on_loss(folder: Path) -> None:
    """Ranks that request NCCL get groups over which a transfer from or to a lost peer never ends.

    Their abort hangs, too, and leaves a file in ``folder``. From SIGUSR1 on a rank dies instead of its next transfer to the
    next stage, which has been told that it comes.
    """
    _stand_in(folder, _hang)


def aborts_on_loss(folder: Path) -> None:
    """As ``hangs_on_loss``, but a transfer from or to a lost peer aborts the process."""
    _stand_in(folder, os.abort)


def _stand_in(folder: Path, fail: Callable[[], NoReturn]) -> None:
    def connect_pair(groups: ProcessGroups, sender: int, device: torch.device) -> _Pair:
        own = groups.rendezvous
        return _Pair(gloo_group(groups.pair_store(sender), own.rank - sender, 2, own.interface), folder, fail)

    replaced = {
        "places": MappingProxyType({"gloo": ("cpu",), "nccl": ("cpu",)}),
        "versions": staticmethod(lambda: {"NCCL": "a stand-in"}),
        "connect_pair": connect_pair,
    }
    for name, value in replaced.items():
        setattr(ProcessGroups, name, value)
    signal.signal(signal.SIGUSR1, _die_soon)


def _die_soon(number: int, frame: Any) -> None:
    global _dying
    _dying = True


def _hang() -> NoReturn:
    while True:
        time.sleep(60)


class _Pair:
    """A group of two stages."""

    def __init__(self, group: Any, folder: Path, fail: Callable[[], NoReturn]) -> None:
        self._group, self._folder, self._fail = group, folder, fail

    def send(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        if _dying:
            os.kill(os.getpid(), signal.SIGKILL)
        return _Work(self._attempt(lambda: self._group.send(tensors, peer, tag)), self._attempt)

    def recv(self, tensors: list[torch.Tensor], peer: int, tag: int) -> _Work:
        return _Work(self._attempt(lambda: self._group.recv(tensors, peer, tag)), self._attempt)

    def abort(self) -> None:
        (self._folder / f"{os.getpid()}.aborts").touch()
        _hang()

    def _attempt(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except RuntimeError:
            self._fail()


class _Work:
    def __init__(self, work: Any, attempt: Callable[[Callable[[], Any]], Any]) -> None:
        self._work, self._attempt = work, attempt

    def wait(self) -> None:
        self._attempt(self._work.wait)
