"""What every transport can do, and how a step becomes one contiguous message."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import Step

_BYTES_PER_ID = 8


class Transport(Protocol):
    """Point-to-point transfer of steps. Sizes are agreed beforehand: the task that orders a transfer names its rows."""

    def send(self, step: Step, dst: int) -> None:
        """Send ``step`` to rank ``dst``; returns when its tensors may be reused.

        Raises:
            RankLost: the peer is gone or did not answer in time.
        """

    def receive(self, num_rows: int, src: int) -> Step:
        """Wait for a step of ``num_rows`` rows from rank ``src``.

        Raises:
            RankLost: the peer is gone or did not answer in time.
        """

    def close(self) -> None:
        """Leave the group and free its sockets."""


def message_bytes(num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of a step of ``num_rows`` rows: token ids, parents, then the activations (so that all are aligned)."""
    return num_rows * (2 * _BYTES_PER_ID + hidden_size * dtype.itemsize)


def pack(step: Step, out: Tensor) -> None:
    """Write ``step`` into ``out``, uint8 [message_bytes]."""
    split = step.num_rows * 2 * _BYTES_PER_ID
    ids = out[:split].view(torch.int64)
    ids[: step.num_rows] = step.token_ids
    ids[step.num_rows :] = step.parents
    if step.hidden is not None:
        out[split:].view(step.hidden.dtype).copy_(step.hidden.flatten())


def unpack(message: Tensor, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Step:
    """The step in ``message``, as views of it. ``hidden_size`` 0 means a step without activations."""
    split = num_rows * 2 * _BYTES_PER_ID
    ids = message[:split].view(torch.int64)
    hidden = message[split:].view(dtype).view(num_rows, hidden_size) if hidden_size else None
    return Step(token_ids=ids[:num_rows], parents=ids[num_rows:], hidden=hidden)
