"""Ranks that count what they send to each other, and that kill themselves at a message that they are told beforehand.

Messages are counted where torch takes them, whatever the package does above. A rank imports this module, which imports little.
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo

_Gloo: Any = ProcessGroupGloo


class CountsMessages(str):
    """The name of a transport. Once it arrives in a rank's process, that process notes its messages in a file of ``folder``."""

    folder: Path

    def __new__(cls, transport: str, folder: Path) -> CountsMessages:
        counts = super().__new__(cls, transport)
        counts.folder = folder
        return counts

    def __reduce__(self) -> tuple[Any, ...]:
        return _count, (str(self), self.folder)


def _count(transport: str, folder: Path) -> str:
    send = _Gloo.send
    notes = os.open(folder / f"{os.getpid()}.sent", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def noted(group: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        _die_if_told(_order(folder, group.rank()))
        os.write(notes, f"{group.rank()}>{peer} {sum(tensor.nbytes for tensor in tensors)}\n".encode())
        return send(group, tensors, peer, tag)

    _Gloo.send = noted
    return transport


def _die_if_told(order: Path) -> None:
    if not order.exists():
        return
    if left := int(order.read_text()):
        order.write_text(str(left - 1))
        return
    order.unlink()  # it is not for the process that takes this one's place
    os.kill(os.getpid(), signal.SIGKILL)


def _order(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.dies"


def kill_after(folder: Path, rank: int, messages: int) -> None:
    """The process of ``rank`` sends so many messages more, and kills itself instead of sending the next one."""
    _order(folder, rank).write_text(str(messages))


def sent(folder: Path) -> Counter[tuple[str, str]]:
    """The ``messages`` and ``bytes`` sent so far over each link, which is named ``a>b``."""
    counts: Counter[tuple[str, str]] = Counter()
    for line in (line for file in folder.glob("*.sent") for line in file.read_text().splitlines()):
        link, num_bytes = line.split()
        counts[link, "messages"] += 1
        counts[link, "bytes"] += int(num_bytes)
    return counts
