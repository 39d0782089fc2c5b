"""``StageMessage`` as bytes.

A message begins with a prefix, which has the lengths of the rest: the head, which always goes through host memory; and the
activations of the rows of all updates, unless they go from device to device. Receivers post buffers of ``part_bytes`` before they
know a message's lengths, and a longer one is sent in several parts of that size, each of which finds such a buffer.

Activations travel in their own data type, or as int8 with a scale for each row: float32 [R], then int8 [R, E].

The head has three sections: JSON (``MessageHead``); token ids, parents and threads of the rows of all updates; and the elements
of the named tensors, in the order of the JSON. Every section, and every tensor, is padded to a multiple of 8 bytes. A head is
empty if there are neither updates nor tensors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
import torch
from msgspec import Meta, structs
from numpy.typing import NDArray
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.core.records import Record
from pipedec.core.stage_message import NUM_ROW_IDS, ROW_ID_BYTES, RequestUpdate, StageMessage, Step
from pipedec.device import to_host

MAX_ROWS = 65_536  # a prefix that announces more is refused
MAX_HEAD_BYTES = 2**26
PART_HEAD_BYTES = 16_384  # a message with such a head and PART_ROWS rows is one part
PART_ROWS = 128
MAX_TENSORS = 64
MAX_NAME = 64  # characters of a tensor's name
MAX_DIMENSIONS = 8
PREFIX_BYTES = 32
_SCALE_BYTES = torch.float32.itemsize
_LEVELS = 127  # the largest int8
Bytes = NDArray[np.uint8]
Buffer = bytes | memoryview

PROTOCOL = "pipedec8"
_PREFIX = struct.Struct("<8siiiii4x")  # a multiple of 8 bytes, to align the rest
_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)
}


Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class TensorHead(Record, frozen=True, array_like=True):
    """A named tensor of a message."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


class MessageHead(Record, frozen=True, array_like=True):
    """The updates of a message, with the number of rows in place of each step, and its tensors, in the order in which rows and
    elements follow.
    """

    updates: tuple[RequestUpdate, ...]
    tensors: tuple[TensorHead, ...] = ()


class _Announced(Step):
    """Rows that follow the JSON, which has only their number."""

    def __init__(self, count: int) -> None:
        self.count = count


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(MessageHead, dec_hook=lambda _, count: _Announced(msgspec.convert(count, Count)))


class Prefix(NamedTuple):
    """The lengths at the start of a message."""

    head_bytes: int  # a multiple of 8
    text_bytes: int  # the head's JSON, a multiple of 8
    rows: int  # of all updates together
    row_bytes: int  # one row with its activations
    ends_session: int  # 1 if no message follows before the next session

    @property
    def end(self) -> int:
        """Where the activations begin, after prefix and head."""
        return PREFIX_BYTES + self.head_bytes


@dataclass(frozen=True)
class RowFormat:
    """How the activations of rows travel. Ranks that exchange rows must have the same.

    Attributes:
        hidden_size: E; 0 for rows without activations.
        dtype: in which the stages compute.
        wire_dtype: int8, which rounds them; None for ``dtype``.
    """

    hidden_size: int
    dtype: torch.dtype
    wire_dtype: torch.dtype | None = None

    @property
    def row_bytes(self) -> int:
        """Size of a row: token id, parent and thread, and the activations."""
        return ROW_ID_BYTES + self.hidden_bytes(1)

    def hidden_bytes(self, num_rows: int) -> int:
        """Size of the activations of so many rows."""
        if self.wire_dtype is None or not self.hidden_size:
            return num_rows * self.hidden_size * self.dtype.itemsize
        return num_rows * (_SCALE_BYTES + self.hidden_size)

    def decoded(self, received: Tensor, num_rows: int) -> Tensor:
        """The activations [R, E] in received bytes (uint8), as a view of them if they travelled in their own data type."""
        if self.wire_dtype is None:
            return received.view(self.dtype).view(num_rows, self.hidden_size)
        scale_R1 = received[: num_rows * _SCALE_BYTES].view(torch.float32)[:, None]
        level_RE = received[num_rows * _SCALE_BYTES :].view(torch.int8).view(num_rows, self.hidden_size)
        return (level_RE * scale_R1).to(self.dtype)


def part_bytes(rows: RowFormat) -> int:
    """Size of the parts into which a long message is divided."""
    return PREFIX_BYTES + PART_HEAD_BYTES + PART_ROWS * rows.row_bytes


def pack_hidden(hidden_RE: Tensor, wire_dtype: torch.dtype | None) -> Tensor:
    """Activations as bytes (uint8) on their device: a copy."""
    return _encoded(hidden_RE, wire_dtype).contiguous().flatten().view(torch.uint8).clone()


def _encoded(hidden_RE: Tensor, wire_dtype: torch.dtype | None) -> Tensor:
    """Activations as they travel. If one of a row is not finite, none of that row's is at the other end."""
    if wire_dtype is None:
        return hidden_RE
    hidden_RE = hidden_RE.float()
    scale_R1 = (hidden_RE.abs().amax(1, keepdim=True) / _LEVELS).clamp_min(torch.finfo(torch.float32).tiny)
    level_RE = (hidden_RE / scale_R1).round().to(wire_dtype)
    return torch.cat([scale_R1.flatten().view(torch.uint8), level_RE.flatten().view(torch.uint8)])


# A torch operation takes several microseconds when it follows a wait for the network, so messages in host memory are put
# together and taken apart by Python and numpy.


def _array(tensor: Tensor) -> Buffer:
    tensor = to_host(tensor).contiguous()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy().data  # numpy has no bfloat16


def pack_message(
    message: StageMessage, wire_dtype: torch.dtype | None = None, holds_hidden: bool = True
) -> tuple[Tensor, Tensor | None]:
    """A message as bytes (uint8), and the activations [R, E] that have to follow it; None if there are none, or it holds them.

    Raises:
        ValueError: more than MAX_ROWS rows or MAX_HEAD_BYTES bytes of head, or tensors that no receiver accepts.
    """
    steps = [update.step for update in message.updates if update.step is not None]
    step = Step.concatenated(steps) if len(steps) > 1 else steps[0] if steps else None
    num_rows, hidden = (0, None) if step is None else (step.num_rows, step.hidden)
    tensor_heads = tuple(
        TensorHead(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in message.tensors.items()
    )
    _check_tensors(tensor_heads)
    updates = tuple(structs.replace(one, step=0 if one.step is None else one.step.num_rows) for one in message.updates)
    text = _padded(_encoder.encode(MessageHead(updates, tensor_heads))) if updates or tensor_heads else b""
    tensors = b"".join(_padded(_array(tensor)) for tensor in message.tensors.values())
    head: list[Buffer] = [text, tensors]
    if step is not None:
        threads = bytes(8 * num_rows) if step.threads is None else _array(step.threads)
        head[1:1] = _array(step.token_ids), _array(step.parents), threads
    head_bytes = len(text) + num_rows * ROW_ID_BYTES + len(tensors)
    row_bytes = 0
    if num_rows:
        row_bytes = ROW_ID_BYTES if hidden is None else RowFormat(hidden.shape[1], hidden.dtype, wire_dtype).row_bytes
    prefix = Prefix(head_bytes, len(text), num_rows, row_bytes, int(message.ends_session))
    _check(prefix)
    held = [_array(_encoded(hidden, wire_dtype))] if hidden is not None and holds_hidden else []
    packed = bytearray().join([_PREFIX.pack(PROTOCOL.encode(), *prefix), *head, *held])
    return torch.frombuffer(packed, dtype=torch.uint8), None if holds_hidden else hidden


def _check_tensors(heads: Sequence[TensorHead]) -> None:
    if len(heads) > MAX_TENSORS or len({head.name for head in heads}) < len(heads):
        raise ValueError(f"more than {MAX_TENSORS} tensors, or two of one name")
    for head in heads:
        if head.dtype not in _DTYPES or not 1 <= len(head.name) <= MAX_NAME:
            raise ValueError(f"a tensor of dtype {head.dtype[:MAX_NAME]}, or with a name of {len(head.name)} characters")
        # A size of 0 counts as 1: torch multiplies the others, too.
        if len(head.shape) > MAX_DIMENSIONS or math.prod(max(size, 1) for size in head.shape) > MAX_HEAD_BYTES:
            raise ValueError(f"a tensor of shape {list(head.shape)[:MAX_DIMENSIONS]}")


def _padded(part: Buffer) -> bytes:
    """Pad with spaces to a multiple of 8 bytes."""
    data = bytes(part)
    return data + b" " * (-len(data) % 8)


def unpack_prefix(buffer: Bytes, row_bytes: int) -> Prefix:
    """The prefix of a message with rows of ``row_bytes`` bytes. Raises ValueError if these bytes are none, or its lengths are
    impossible.
    """
    magic, *lengths = _PREFIX.unpack_from(buffer.data)
    if magic != PROTOCOL.encode():
        raise ValueError("it begins with other bytes")
    prefix = Prefix(*lengths)
    _check(prefix)
    if prefix.rows and prefix.row_bytes != row_bytes:
        raise ValueError(f"rows of {prefix.row_bytes} bytes, not {row_bytes}")
    return prefix


def unpack_message(head: Bytes, hidden_RE: Tensor | None, prefix: Prefix) -> StageMessage:
    """The message of a head and the activations of all its rows. Raises ValueError if they are none."""
    ends_session = bool(prefix.ends_session)
    if not len(head):
        return StageMessage((), ends_session)
    try:
        decoded = _decoder.decode(head[: prefix.text_bytes].data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, UserError):
        raise ValueError("its head cannot be read") from None
    counts = [one.step.count if isinstance(one.step, _Announced) else 0 for one in decoded.updates]
    if sum(counts) != prefix.rows:
        raise ValueError(f"its updates have {sum(counts)} rows, not {prefix.rows}")
    if len({update.number for update in decoded.updates}) < len(counts):
        raise ValueError("it has two updates of one request")
    steps: Iterator[Step] = iter(())
    if prefix.rows:
        ids = head[prefix.text_bytes : prefix.text_bytes + prefix.rows * ROW_ID_BYTES].view(np.int64)
        token_ids, parents, threads = map(torch.from_numpy, ids.reshape(NUM_ROW_IDS, prefix.rows))
        steps = iter(Step(token_ids, parents, hidden_RE, threads).split([count for count in counts if count]))
    updates = tuple(
        structs.replace(one, step=next(steps) if count else None) for one, count in zip(decoded.updates, counts, strict=True)
    )
    tensors = _unpack_tensors(head, prefix.text_bytes + prefix.rows * ROW_ID_BYTES, decoded.tensors)
    return StageMessage(updates, ends_session, tensors=tensors)


def _unpack_tensors(head: Bytes, start: int, heads: Sequence[TensorHead]) -> dict[str, Tensor]:
    """The named tensors whose elements fill the rest of a head, as views of it. Raises ValueError if they do not."""
    _check_tensors(heads)
    found: dict[str, Tensor] = {}
    for one in heads:
        num_bytes = math.prod(one.shape) * _DTYPES[one.dtype].itemsize
        elements = torch.from_numpy(head[start : start + num_bytes])
        if len(elements) < num_bytes:
            break
        found[one.name] = elements.view(_DTYPES[one.dtype]).view(one.shape)
        start += num_bytes + -num_bytes % 8
    if len(found) < len(heads) or start != len(head):
        raise ValueError("its tensors do not fill the rest of its head")
    return found


def _check(prefix: Prefix) -> None:
    if not 0 <= prefix.rows <= MAX_ROWS:
        raise ValueError(f"{prefix.rows} rows, which must be between 0 and {MAX_ROWS}")
    if not 0 <= prefix.head_bytes <= MAX_HEAD_BYTES or prefix.head_bytes % 8:
        raise ValueError(f"a head of {prefix.head_bytes} bytes, of which {MAX_HEAD_BYTES} are allowed")
    if prefix.text_bytes % 8 or not 0 <= prefix.text_bytes <= prefix.head_bytes - prefix.rows * ROW_ID_BYTES:
        raise ValueError(
            f"a head of {prefix.head_bytes} bytes for {prefix.text_bytes} of JSON and {prefix.rows} rows, of which each takes "
            f"{ROW_ID_BYTES}"
        )
