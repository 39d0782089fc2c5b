"""Steps and envelopes as bytes.

A step is its token ids, parents and threads, then its activations. An envelope is one message: a prefix with the lengths of
what follows, the head (JSON: everything but rows), and the rows of all updates as one step. A receiver posts a buffer for the
next envelope before it knows that one's lengths, so a head of more than INLINE_HEAD_BYTES, and more rows than the link takes
inline, each follow in a message of their own, whose size the prefix tells.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipedec.core import NUM_ROW_IDS, ROW_ID_BYTES, Envelope, Step
from pipedec.messages import envelope_from_payload, envelope_to_payload

MAX_ROWS = 65_536  # of an envelope; a prefix that announces more is refused
MAX_HEAD_BYTES = 2**26
INLINE_HEAD_BYTES = 8192
PREFIX_BYTES = 24
Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview

_HOST = torch.device("cpu")
_MAGIC = b"pipedec4"
_PREFIX = struct.Struct("<8siiii")  # a multiple of 8 bytes, so that what follows is aligned


class Prefix(NamedTuple):
    """The lengths that an envelope's first message begins with.

    Attributes:
        head_bytes: of the head, a multiple of 8.
        rows: of all updates.
        row_bytes: of each row.
        ends_session: 1 if no envelope follows.
    """

    head_bytes: int
    rows: int
    row_bytes: int
    ends_session: int

    @property
    def end(self) -> int:
        """Where the first message goes on behind prefix and head."""
        return PREFIX_BYTES + (self.head_bytes if self.head_bytes <= INLINE_HEAD_BYTES else 0)


def message_bytes(num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """Size of a step in bytes: token ids, parents and threads first, then the activations, so that all are aligned."""
    return num_rows * (ROW_ID_BYTES + hidden_size * dtype.itemsize)


def _row_bytes(step: Step | None) -> int:
    return 0 if step is None else ROW_ID_BYTES + (0 if step.hidden is None else step.hidden.shape[1] * step.hidden.itemsize)


def pack(step: Step, device: torch.device) -> Tensor:
    """The step as one message, uint8, on ``device``."""
    if device == _HOST:
        return _message(_parts(step))
    threads = torch.zeros_like(step.parents) if step.threads is None else step.threads
    ids = torch.stack((step.token_ids, step.parents, threads)).flatten().to(device)
    parts = [ids, *([] if step.hidden is None else [step.hidden.flatten()])]
    return torch.cat([part.view(torch.uint8) for part in parts])


def unpack(message: Tensor, num_rows: int, hidden_size: int, dtype: torch.dtype) -> Step:
    """The step in ``message``, its activations as a view of that. With ``hidden_size`` 0 the step has none."""
    if message.device == _HOST:
        return unpack_from(message.numpy(), 0, num_rows, hidden_size, dtype)
    split = num_rows * ROW_ID_BYTES
    token_ids, parents, threads = message[:split].view(torch.int64).view(NUM_ROW_IDS, num_rows).cpu()
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


def pack_envelope(envelope: Envelope, inline_rows: int) -> tuple[Tensor, Tensor | None, Step | None]:
    """The first message of an envelope; its head if that does not fit into the first message; and its rows if they do not.

    Args:
        inline_rows: more rows than that are not in the first message.

    Raises:
        ValueError: more than MAX_ROWS rows or MAX_HEAD_BYTES bytes of head.
    """
    step = _merged([update.step for update in envelope.updates if update.step is not None])
    rows = 0 if step is None else step.num_rows
    head = json.dumps(envelope_to_payload(envelope), separators=(",", ":")).encode() if envelope.updates else b""
    head += b" " * (-len(head) % 8)
    prefix = Prefix(len(head), rows, _row_bytes(step), int(envelope.ends_session))
    _check(prefix)
    parts: list[Buffer] = [_PREFIX.pack(_MAGIC, *prefix)]
    if len(head) <= INLINE_HEAD_BYTES:
        parts.append(head)
    if step is not None and rows <= inline_rows:
        parts += _parts(step)
    return _message(parts), None if len(head) <= INLINE_HEAD_BYTES else _message([head]), step if rows > inline_rows else None


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
    _check(prefix)
    if prefix.rows and prefix.row_bytes != row_bytes:
        raise ValueError(f"rows of {prefix.row_bytes} bytes, not {row_bytes}")
    return prefix


def unpack_envelope(head: Bytes, step: Step | None, prefix: Prefix) -> Envelope:
    """The envelope of a head and the rows of all updates. Raises ValueError if they are no envelope."""
    ends_session = bool(prefix.ends_session)
    if not len(head):
        return Envelope((), ends_session)
    try:
        envelope, counts = envelope_from_payload(json.loads(head.tobytes()), ends_session)
    except (ValueError, RecursionError):
        raise ValueError("its head cannot be read") from None
    if sum(counts) != prefix.rows:
        raise ValueError(f"its updates have {sum(counts)} rows, not {prefix.rows}")
    steps = iter(() if step is None else _split(step, [count for count in counts if count]))
    updates = (
        replace(update, step=next(steps)) if count else update for update, count in zip(envelope.updates, counts, strict=True)
    )
    return Envelope(tuple(updates), ends_session)


def _check(prefix: Prefix) -> None:
    if not 0 <= prefix.rows <= MAX_ROWS:
        raise ValueError(f"{prefix.rows} rows, which must be between 0 and {MAX_ROWS}")
    if not 0 <= prefix.head_bytes <= MAX_HEAD_BYTES or prefix.head_bytes % 8:
        raise ValueError(f"a head of {prefix.head_bytes} bytes, of which {MAX_HEAD_BYTES} are allowed")


def _merged(steps: list[Step]) -> Step | None:
    """The rows of several steps as one."""
    if len(steps) < 2:
        return steps[0] if steps else None
    token_ids, parents = torch.cat([step.token_ids for step in steps]), torch.cat([step.parents for step in steps])
    threads = [torch.zeros_like(step.parents) if step.threads is None else step.threads for step in steps]
    hidden = None if steps[0].hidden is None else torch.cat([step.hidden for step in steps if step.hidden is not None])
    return Step(token_ids, parents, hidden, torch.cat(threads))


def _split(step: Step, counts: list[int]) -> list[Step]:
    """The rows of one step as several, views of it."""
    if len(counts) == 1:
        return [step]
    assert step.threads is not None
    hidden = [None] * len(counts) if step.hidden is None else step.hidden.split(counts)
    columns = (step.token_ids.split(counts), step.parents.split(counts), hidden, step.threads.split(counts))
    return [Step(*parts) for parts in zip(*columns, strict=True)]
