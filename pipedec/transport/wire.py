"""Steps and envelopes as bytes.

A step is its token ids, parents and threads, then its activations. An envelope is one message: a prefix with the lengths of
what follows, the verdict, the step. A receiver posts a buffer for the next envelope before it knows that one's lengths, so a
verdict of more than INLINE_VALUES values, and a step of more rows than the link takes inline, each follow in a message of their
own, whose size the prefix tells.

A verdict is int64 values: for each thread its number, the number of its tokens, the number of its forecast's positions, the
tokens, and for each position the number of its tokens and these.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipedec.core import NUM_ROW_IDS, ROW_ID_BYTES, Accepted, Envelope, Step, Verdict

MAX_ROWS = 65_536  # of an envelope's step; a prefix that announces more is refused
MAX_VERDICT_VALUES = 2**20
INLINE_VALUES = 256
PREFIX_BYTES = 24
Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview

_MAGIC = b"pipedec2"
_PREFIX = struct.Struct("<8siiii")  # a multiple of 8 bytes, so that what follows is aligned
_FINISH_REASONS = (None, "stop", "length", "cancelled", "cache_full")
_NO_VERDICT = -1


class Prefix(NamedTuple):
    """The lengths that an envelope's first message begins with.

    Attributes:
        rows: of the step; 0 without a step.
        row_bytes: of each row.
        values: int64 values of the verdict.
        reason: index of why the answer ended; negative without a verdict.
    """

    rows: int
    row_bytes: int
    values: int
    reason: int

    @property
    def is_last(self) -> bool:
        """Whether the verdict ends the answer."""
        return self.reason > 0

    @property
    def end(self) -> int:
        """Where the first message goes on behind prefix and verdict."""
        return PREFIX_BYTES + (8 * self.values if self.values <= INLINE_VALUES else 0)


def message_bytes(num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Size of a step in bytes: token ids, parents and threads first, then the activations, so that all are aligned."""
    return num_rows * (ROW_ID_BYTES + hidden_size * dtype.itemsize)


def _row_bytes(step: Step | None) -> int:
    return 0 if step is None else ROW_ID_BYTES + (0 if step.hidden is None else step.hidden.shape[1] * step.hidden.itemsize)


def pack(step: Step, device: torch.device) -> Tensor:
    """The step as one message, uint8, on ``device``."""
    if device.type == "cpu":
        return _message(_parts(step))
    threads = torch.zeros_like(step.parents) if step.threads is None else step.threads
    parts = [step.token_ids, step.parents, threads, *([] if step.hidden is None else [step.hidden.flatten()])]
    return torch.cat([part.view(torch.uint8) for part in parts])


def unpack(message: Tensor, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Step:
    """The step in ``message``, as views of it. With ``hidden_size`` 0 the step has no activations."""
    if message.device.type == "cpu":
        return unpack_from(message.numpy(), 0, num_rows, hidden_size, dtype)
    split = num_rows * ROW_ID_BYTES
    token_ids, parents, threads = message[:split].view(torch.int64).view(NUM_ROW_IDS, num_rows)
    hidden = message[split:].view(dtype).view(num_rows, hidden_size) if hidden_size else None
    return Step(token_ids, parents, hidden, threads)


def unpack_from(buffer: Bytes, start: int, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Step:
    """The step that begins at ``start``, as views of ``buffer``."""
    split = start + num_rows * ROW_ID_BYTES
    ids = buffer[start:split].view(np.int64).reshape(NUM_ROW_IDS, num_rows)
    token_ids, parents, threads = map(torch.from_numpy, ids)
    hidden = None
    if hidden_size:
        hidden = torch.frombuffer(buffer, dtype=dtype, count=num_rows * hidden_size, offset=split).view(num_rows, hidden_size)
    return Step(token_ids, parents, hidden, threads)


# A torch operation takes several microseconds when it follows a wait for the network, so messages in host memory are put
# together and taken apart by Python and numpy.


def _message(parts: Iterable[Buffer]) -> Tensor:
    return torch.frombuffer(bytearray().join(parts), dtype=torch.uint8)


def _parts(step: Step) -> list[Buffer]:
    """The bytes of a step, in order."""
    threads = bytes(8 * step.num_rows) if step.threads is None else _array(step.threads)
    hidden = [] if step.hidden is None else [_array(step.hidden)]
    return [_array(step.token_ids), _array(step.parents), threads, *hidden]


def _array(tensor: Tensor) -> Buffer:
    tensor = tensor.cpu().contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().data  # numpy has no bfloat16


def pack_envelope(envelope: Envelope, inline_rows: int) -> tuple[Tensor, Tensor | None]:
    """The first message of an envelope, and the verdict's own if it does not fit into the first; uint8.

    Args:
        inline_rows: a step of more rows is not in the first message.

    Raises:
        ValueError: more than MAX_ROWS rows or MAX_VERDICT_VALUES values.
    """
    step, verdict = envelope.step, envelope.verdict
    rows, reason, values = 0 if step is None else step.num_rows, _NO_VERDICT, list[int]()
    if verdict is not None:
        reason, values = _FINISH_REASONS.index(verdict.finished), _verdict_values(verdict)
    _check(rows, len(values), reason)
    parts: list[Buffer] = [_PREFIX.pack(_MAGIC, rows, _row_bytes(step), len(values), reason)]
    packed = struct.pack(f"{len(values)}q", *values)
    if len(values) <= INLINE_VALUES:
        parts.append(packed)
    if step is not None and rows <= inline_rows:
        parts += _parts(step)
    return _message(parts), None if len(values) <= INLINE_VALUES else _message([packed])


def unpack_prefix(buffer: Bytes, row_bytes: int) -> Prefix:
    """What an envelope's first message announces.

    Args:
        row_bytes: size of the sender's rows.

    Raises:
        ValueError: it is no such message, or announces what cannot be.
    """
    magic, *lengths = _PREFIX.unpack_from(buffer.data)
    if magic != _MAGIC:
        raise ValueError("it begins with other bytes")
    prefix = Prefix(*lengths)
    _check(prefix.rows, prefix.values, prefix.reason)
    if prefix.rows and prefix.row_bytes != row_bytes:
        raise ValueError(f"rows of {prefix.row_bytes} bytes, not {row_bytes}")
    return prefix


def unpack_verdict(values: list[int], prefix: Prefix) -> Verdict | None:
    """The verdict; None if the envelope has none. Raises ValueError if ``values`` are no verdict."""
    if prefix.reason == _NO_VERDICT:
        return None
    source, accepted = iter(values), []

    def take(count: int) -> tuple[int, ...]:
        taken = tuple(islice(source, count)) if 0 <= count <= len(values) else ()
        if len(taken) != count:
            raise ValueError("a verdict whose lengths do not add up")
        return taken

    for thread in source:
        num_tokens, num_positions = take(2)
        tokens = take(num_tokens)
        if num_positions < 0:
            raise ValueError(f"a forecast of {num_positions} positions")
        accepted.append(Accepted(thread, tokens, tuple(take(*take(1)) for _ in range(num_positions))))
    return Verdict(tuple(accepted), _FINISH_REASONS[prefix.reason])


def _check(rows: int, values: int, reason: int) -> None:
    if not 0 <= rows <= MAX_ROWS:
        raise ValueError(f"{rows} rows, which must be between 0 and {MAX_ROWS}")
    if not 0 <= values <= MAX_VERDICT_VALUES:
        raise ValueError(f"a verdict of {values} values, of which {MAX_VERDICT_VALUES} are allowed")
    if values and reason == _NO_VERDICT:
        raise ValueError(f"{values} values of no verdict")
    if not _NO_VERDICT <= reason < len(_FINISH_REASONS):
        raise ValueError(f"unknown finish reason {reason}")


def _verdict_values(verdict: Verdict) -> list[int]:
    values: list[int] = []
    for thread, tokens, forecast in verdict.accepted:
        values += (thread, len(tokens), len(forecast), *tokens)
        for candidates in forecast:
            values += (len(candidates), *candidates)
    return values
