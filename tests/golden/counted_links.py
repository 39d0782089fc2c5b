"""Ranks that count the messages they send, and that kill themselves at a given message.

Messages are counted where torch takes them, whatever the package does above.
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


def count(folder: Path) -> None:
    """From now on this process notes its messages in a file of ``folder``."""
    send = _Gloo.send
    notes = os.open(folder / f"{os.getpid()}.sent", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def noted(group: Any, tensors: list[Tensor], peer: int, tag: int) -> Any:
        _die_if_told(_order(folder, group.rank()))
        os.write(notes, f"{group.rank()}>{peer} {sum(tensor.nbytes for tensor in tensors)}\n".encode())
        return send(group, tensors, peer, tag)

    _Gloo.send = noted


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
