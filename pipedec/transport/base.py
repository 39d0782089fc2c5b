"""What every transport can do, and how steps and verdicts become messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import MAX_VERDICT_TOKENS, NUM_ROW_IDS, ROW_ID_BYTES, Share, Step, Verdict

_HEADER_COUNTS = 6  # rows, accepted tokens, why the answer ended, places of the forecast, tokens for each of them, shares
HEADER_VALUES = _HEADER_COUNTS + MAX_VERDICT_TOKENS
HEADER_BYTES = 8 * HEADER_VALUES
_ENDINGS = (None, "stop", "length", "cancelled", "cache_full")


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
            ValueError: the verdict, its forecast and its shares are more than MAX_VERDICT_TOKENS.
        """

    def receive_envelope(self, src: int) -> Envelope:
        """Wait for the next envelope from rank ``src``.

        Raises:
            RankLost: the peer is gone or did not answer in time.
        """

    def close(self) -> None:
        """Leave the group and free its sockets."""


def message_bytes(num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Bytes of a step of ``num_rows`` rows: token ids, parents, threads, then the activations (so that all are aligned)."""
    return num_rows * (ROW_ID_BYTES + hidden_size * dtype.itemsize)


def pack(step: Step, out: Tensor) -> None:
    """Write ``step`` into ``out``, uint8 [message_bytes]."""
    rows = step.num_rows
    split = rows * ROW_ID_BYTES
    ids = out[:split].view(torch.int64)
    ids[:rows] = step.token_ids
    ids[rows : 2 * rows] = step.parents
    ids[2 * rows :] = 0 if step.threads is None else step.threads
    if step.hidden is not None:
        out[split:].view(step.hidden.dtype).copy_(step.hidden.flatten())


def unpack(message: Tensor, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Step:
    """The step in ``message``, as views of it. ``hidden_size`` 0 means a step without activations."""
    split = num_rows * ROW_ID_BYTES
    token_ids, parents, threads = message[:split].view(torch.int64).view(NUM_ROW_IDS, num_rows)
    hidden = message[split:].view(dtype).view(num_rows, hidden_size) if hidden_size else None
    return Step(token_ids, parents, hidden, threads)


def pack_header(envelope: Envelope, out: Tensor) -> None:
    """Write everything but the step's rows into ``out``, int64 [HEADER_VALUES]."""
    rows = envelope.step.num_rows if envelope.step else 0
    verdict = envelope.verdict or Verdict(())
    shares = [thread << 16 | tokens << 8 | places for thread, tokens, places in verdict.shares]
    tokens = [*shares, *verdict.tokens, *(token for named in verdict.forecast for token in named)]
    if len(tokens) > MAX_VERDICT_TOKENS:
        raise ValueError(f"a verdict of {len(tokens)} tokens does not fit into a header of {MAX_VERDICT_TOKENS}")
    num_tokens = -1 if envelope.verdict is None else len(verdict.tokens)
    named = len(verdict.forecast[0]) if verdict.forecast else 0
    values = out.numpy()
    values[:_HEADER_COUNTS] = rows, num_tokens, _ENDINGS.index(verdict.finished), len(verdict.forecast), named, len(shares)
    values[_HEADER_COUNTS : _HEADER_COUNTS + len(tokens)] = tokens


def unpack_header(header: Tensor) -> tuple[int, Verdict | None]:
    """The number of rows that follow, and the verdict, of int64 [HEADER_VALUES]."""
    values = header.numpy()
    rows, num_tokens, ending, places, named, num_shares = values[:_HEADER_COUNTS].tolist()
    if num_tokens < 0:
        return rows, None
    first = _HEADER_COUNTS + num_shares
    shares = tuple(Share(value >> 16, value >> 8 & 0xFF, value & 0xFF) for value in values[_HEADER_COUNTS:first].tolist())
    tokens = values[first : first + num_tokens + places * named].tolist()
    forecast = (tuple(tokens[start : start + named]) for start in range(num_tokens, len(tokens), named or 1))
    return rows, Verdict(tuple(tokens[:num_tokens]), _ENDINGS[ending], tuple(forecast), shares)
