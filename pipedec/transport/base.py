"""The interface of a transport, and the encoding of steps and verdicts as messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import MAX_VERDICT_TOKENS, Share, Step, Verdict

_BYTES_PER_ID = 8
_IDS_PER_ROW = 3  # token id, parent, thread
_HEADER_COUNTS = 6  # rows, accepted tokens, finish reason, forecast positions, tokens per forecast position, shares
HEADER_VALUES = _HEADER_COUNTS + MAX_VERDICT_TOKENS
HEADER_BYTES = 8 * HEADER_VALUES
_FINISH_REASONS = (None, "stop", "length", "cancelled", "cache_full")


@dataclass(frozen=True)
class Envelope:
    """The message from one rank to the next in each timestep of a window: a verdict to replay, then a step.

    An envelope without both only signals that the timestep has reached this rank.
    """

    step: Step | None = None
    verdict: Verdict | None = None


class Transport(Protocol):
    """Point-to-point transfer of steps and envelopes. The receiver of a single step knows its number of rows from the task."""

    def send(self, step: Step, dst: int) -> None:
        """Send ``step`` to rank ``dst``. Returns when its tensors may be reused.

        Raises:
            RankLost: the connection failed or timed out.
        """

    def receive(self, num_rows: int, src: int) -> Step:
        """Wait for a step of ``num_rows`` rows from rank ``src``.

        Raises:
            RankLost: the connection failed or timed out.
        """

    def send_envelope(self, envelope: Envelope, dst: int) -> None:
        """Send a header of fixed size, followed by the step if there is one. Does not wait for the receiver.

        Raises:
            RankLost: the connection failed or timed out.
            ValueError: tokens, forecast and shares of the verdict are more than MAX_VERDICT_TOKENS values together.
        """

    def receive_envelope(self, src: int) -> Envelope:
        """Wait for the next envelope from rank ``src``.

        Raises:
            RankLost: the connection failed or timed out.
        """

    def close(self) -> None:
        """Leave the process group and close its sockets."""


def message_bytes(num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Size of a step in bytes: token ids, parents and threads first, then the activations, so that all are aligned."""
    return num_rows * (_IDS_PER_ROW * _BYTES_PER_ID + hidden_size * dtype.itemsize)


def pack(step: Step, out: Tensor) -> None:
    """Write ``step`` into ``out``, uint8 [``message_bytes``]."""
    rows = step.num_rows
    split = rows * _IDS_PER_ROW * _BYTES_PER_ID
    ids = out[:split].view(torch.int64)
    ids[:rows] = step.token_ids
    ids[rows : 2 * rows] = step.parents
    ids[2 * rows :] = 0 if step.threads is None else step.threads
    if step.hidden is not None:
        out[split:].view(step.hidden.dtype).copy_(step.hidden.flatten())


def unpack(message: Tensor, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Step:
    """The step in ``message``, as views of it. With ``hidden_size`` 0 the step has no activations."""
    split = num_rows * _IDS_PER_ROW * _BYTES_PER_ID
    token_ids, parents, threads = message[:split].view(torch.int64).view(_IDS_PER_ROW, num_rows)
    hidden = message[split:].view(dtype).view(num_rows, hidden_size) if hidden_size else None
    return Step(token_ids, parents, hidden, threads)


def pack_header(envelope: Envelope, out: Tensor) -> None:
    """Write the number of rows and the verdict into ``out``, int64 [HEADER_VALUES]. Raises ValueError if they do not fit."""
    rows = envelope.step.num_rows if envelope.step else 0
    verdict = envelope.verdict or Verdict(())
    shares = [thread << 16 | num_tokens << 8 | positions for thread, num_tokens, positions in verdict.shares]
    body = [*shares, *verdict.tokens, *(token for candidates in verdict.forecast for token in candidates)]
    if len(body) > MAX_VERDICT_TOKENS:
        raise ValueError(f"a verdict of {len(body)} tokens does not fit into a header of {MAX_VERDICT_TOKENS}")
    num_tokens = -1 if envelope.verdict is None else len(verdict.tokens)
    reason, positions = _FINISH_REASONS.index(verdict.finished), len(verdict.forecast)
    tokens_per_position = len(verdict.forecast[0]) if verdict.forecast else 0
    values = out.numpy()
    values[:_HEADER_COUNTS] = rows, num_tokens, reason, positions, tokens_per_position, len(shares)
    values[_HEADER_COUNTS : _HEADER_COUNTS + len(body)] = body


def unpack_header(header: Tensor) -> tuple[int, Verdict | None]:
    """The number of rows that follow the header, and the verdict (None if there is none).

    Args:
        header: int64 [HEADER_VALUES].
    """
    values = header.numpy()
    rows, num_tokens, reason, positions, tokens_per_position, num_shares = values[:_HEADER_COUNTS].tolist()
    if num_tokens < 0:
        return rows, None
    first = _HEADER_COUNTS + num_shares
    shares = tuple(Share(value >> 16, value >> 8 & 0xFF, value & 0xFF) for value in values[_HEADER_COUNTS:first].tolist())
    tokens = values[first : first + num_tokens + positions * tokens_per_position].tolist()
    starts = range(num_tokens, len(tokens), tokens_per_position or 1)
    forecast = tuple(tuple(tokens[start : start + tokens_per_position]) for start in starts)
    return rows, Verdict(tuple(tokens[:num_tokens]), _FINISH_REASONS[reason], forecast, shares)
