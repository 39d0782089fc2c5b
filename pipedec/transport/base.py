"""What every transport can do, and how steps and verdicts become messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import Step, Verdict

_BYTES_PER_ID = 8
MAX_VERDICT_TOKENS = 125
HEADER_VALUES = 3 + MAX_VERDICT_TOKENS  # rows, accepted tokens, why the answer ended, the tokens
HEADER_BYTES = 8 * HEADER_VALUES
_ENDINGS = (None, "stop", "length", "cancelled")


@dataclass(frozen=True)
class Envelope:
    """What goes from a rank to the next once per timestep inside a window: a verdict to replay first, then a step.

    Both may be absent: then the message only says that the timestep has come this far.
    """

    step: Step | None = None
    verdict: Verdict | None = None


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

    def send_envelope(self, envelope: Envelope, dst: int) -> None:
        """Send a header of fixed size, and the step behind it if there is one; does not wait for the receiver.

        Raises:
            RankLost: the peer is gone or did not answer in time.
            ValueError: the verdict has more than MAX_VERDICT_TOKENS tokens.
        """

    def receive_envelope(self, src: int) -> Envelope:
        """Wait for the next envelope from rank ``src``.

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


def pack_header(envelope: Envelope, out: Tensor) -> None:
    """Write everything but the step's rows into ``out``, int64 [HEADER_VALUES]."""
    verdict = envelope.verdict
    tokens = verdict.tokens if verdict else ()
    if len(tokens) > MAX_VERDICT_TOKENS:
        raise ValueError(f"a verdict of {len(tokens)} tokens does not fit into a header of {MAX_VERDICT_TOKENS}")
    rows = envelope.step.num_rows if envelope.step else 0
    ending = _ENDINGS.index(verdict.finished if verdict else None)
    values = out.numpy()
    values[:3] = rows, len(tokens) if verdict else -1, ending
    values[3 : 3 + len(tokens)] = tokens


def unpack_header(header: Tensor) -> tuple[int, Verdict | None]:
    """The number of rows that follow, and the verdict, of int64 [HEADER_VALUES]."""
    values = header.numpy()
    rows, num_tokens, ending = values[:3].tolist()
    if num_tokens < 0:
        return rows, None
    return rows, Verdict(tuple(values[3 : 3 + num_tokens].tolist()), _ENDINGS[ending])
