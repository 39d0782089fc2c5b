"""Steps and envelopes as messages and back."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from pipedec.core import Accepted, Envelope, Step, Verdict
from pipedec.transport.wire import (
    INLINE_VALUES,
    MAX_ROWS,
    MAX_VERDICT_VALUES,
    PREFIX_BYTES,
    message_bytes,
    pack,
    pack_envelope,
    unpack,
    unpack_from,
    unpack_prefix,
    unpack_verdict,
)

CPU = torch.device("cpu")
HIDDEN_SIZE, DTYPE = 3, torch.float32
ROW_BYTES = message_bytes(1, HIDDEN_SIZE, DTYPE)
INLINE_ROWS = 8
INT64 = st.integers(-(2**63), 2**63 - 1)
REASONS = st.sampled_from([None, "stop", "length", "cancelled", "cache_full"])
TOKENS = st.lists(INT64, max_size=5).map(tuple)
ACCEPTED = st.builds(Accepted, INT64, TOKENS, st.lists(TOKENS, max_size=4).map(tuple))
VERDICTS = st.builds(Verdict, st.lists(ACCEPTED, max_size=40).map(tuple), REASONS)


@st.composite
def steps(draw: st.DrawFn, max_rows: int = 40, hidden_size: int = HIDDEN_SIZE, dtype: torch.dtype | None = DTYPE) -> Step:
    num_rows = draw(st.integers(1, max_rows))
    ids = st.lists(INT64, min_size=num_rows, max_size=num_rows).map(torch.tensor)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    hidden = None if dtype is None else torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    return Step(draw(ids), draw(ids), hidden, draw(st.none() | ids))


def assert_equal(received: Step, sent: Step) -> None:
    threads = torch.zeros_like(sent.parents) if sent.threads is None else sent.threads
    assert torch.equal(received.token_ids, sent.token_ids) and torch.equal(received.parents, sent.parents)
    assert received.threads is not None and torch.equal(received.threads, threads)
    assert (received.hidden is None) == (sent.hidden is None)
    if sent.hidden is not None and received.hidden is not None:
        assert received.hidden.dtype == sent.hidden.dtype and torch.equal(received.hidden, sent.hidden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, None], ids=str)
@given(data=st.data(), hidden_size=st.sampled_from([1, 3, 8]))
def test_steps_round_trip(dtype: torch.dtype | None, data: st.DataObject, hidden_size: int) -> None:
    sent = data.draw(steps(hidden_size=hidden_size, dtype=dtype))
    wire_size, wire_dtype = (hidden_size, dtype) if dtype else (0, torch.float32)
    message = pack(sent, CPU)
    assert message.nbytes == message_bytes(sent.num_rows, wire_size, wire_dtype)
    assert_equal(unpack(message, sent.num_rows, wire_size, wire_dtype), sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, None], ids=str)
def test_messages_of_another_device_hold_the_same_bytes(dtype: torch.dtype | None) -> None:
    class Elsewhere(torch.Tensor):
        """A tensor in host memory that says that it is on a GPU."""

        device = property(lambda self: torch.device("cuda"))  # type: ignore[assignment]

    hidden = None if dtype is None else torch.randn(5, 4).to(dtype)
    for threads in (None, torch.arange(5)):
        sent = Step(torch.arange(5), torch.arange(5) - 1, hidden, threads)
        message = pack(sent, torch.device("cuda"))
        assert torch.equal(message, pack(sent, CPU))
        elsewhere = message.as_subclass(Elsewhere)  # type: ignore[arg-type]
        received = unpack(elsewhere, 5, 0 if dtype is None else 4, dtype or torch.float32)
        assert_equal(received, sent)


def test_a_slice_of_a_larger_tensor_can_be_packed() -> None:
    hidden = torch.arange(24.0).view(3, 8)[:, ::2]
    message = pack(Step(torch.arange(6)[::2], torch.tensor([-1, 0, 0]), hidden), CPU)
    received = unpack(message, 3, 4, torch.float32)
    assert received.token_ids.tolist() == [0, 2, 4]
    assert torch.equal(received.hidden, hidden)  # type: ignore[arg-type]


def received(first: Tensor, rest: Tensor | None) -> Envelope:
    """As a transport unpacks an envelope; the first message lies in a larger buffer."""
    buffer = np.concatenate((first.numpy(), np.full(99, 0xAB, np.uint8)))
    prefix = unpack_prefix(buffer, ROW_BYTES)
    assert (rest is None) == (prefix.values <= INLINE_VALUES)
    body = buffer[PREFIX_BYTES : prefix.end] if rest is None else rest.numpy()
    verdict = unpack_verdict(body.view(np.int64).tolist(), prefix)
    is_inline = 0 < prefix.rows <= INLINE_ROWS
    assert len(first) == prefix.end + is_inline * message_bytes(prefix.rows, HIDDEN_SIZE, DTYPE)
    step = unpack_from(buffer, prefix.end, prefix.rows, HIDDEN_SIZE, DTYPE) if is_inline else None
    assert prefix.is_last == (verdict is not None and verdict.finished is not None)
    return Envelope(step, verdict)


@given(st.none() | steps(), st.none() | VERDICTS)
def test_envelopes_round_trip(step: Step | None, verdict: Verdict | None) -> None:
    found = received(*pack_envelope(Envelope(step, verdict), INLINE_ROWS))
    assert found.verdict == verdict
    if step is not None and step.num_rows <= INLINE_ROWS:
        assert found.step is not None
        assert_equal(found.step, step)
    else:
        assert found.step is None, "the rows are not in the first message"


@pytest.mark.parametrize("num_tokens", [INLINE_VALUES - 3, INLINE_VALUES - 2, 10_000])
def test_a_long_verdict_has_a_message_of_its_own(num_tokens: int) -> None:
    verdict = Verdict.of(*range(num_tokens))
    assert received(*pack_envelope(Envelope(None, verdict), INLINE_ROWS)).verdict == verdict


def test_a_short_envelope_is_a_short_message() -> None:
    assert len(pack_envelope(Envelope(), INLINE_ROWS)[0]) == 24
    assert len(pack_envelope(Envelope(None, Verdict.of(5)), INLINE_ROWS)[0]) == 56


@pytest.mark.parametrize(
    ("envelope", "message"),
    [
        (Envelope(Step(torch.zeros(MAX_ROWS + 1, dtype=torch.int64), torch.zeros(MAX_ROWS + 1))), "65537 rows"),
        (Envelope(None, Verdict.of(*[1] * MAX_VERDICT_VALUES)), "a verdict of 1048579 values"),
        (Envelope(None, Verdict((), "tired")), "not in tuple"),
    ],
    ids=["rows", "values", "reason"],
)
def test_what_no_receiver_accepts_is_not_sent(envelope: Envelope, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_envelope(envelope, INLINE_ROWS)


PREFIX = struct.Struct("<iiii")
ROWS = st.integers(-1, 2**17) | st.integers(-(2**31), 2**31 - 1)


@given(st.binary(min_size=16, max_size=16) | st.builds(PREFIX.pack, ROWS, st.just(ROW_BYTES), ROWS, st.integers(-2, 6)))
def test_any_prefix_is_within_the_bounds_or_refused(lengths: bytes) -> None:
    try:
        prefix = unpack_prefix(np.frombuffer(b"pipedec2" + lengths, np.uint8), ROW_BYTES)
    except ValueError:
        return
    assert 0 <= prefix.rows <= MAX_ROWS and 0 <= prefix.values <= MAX_VERDICT_VALUES


@given(st.lists(st.integers(-3, 6) | INT64, max_size=30))
def test_any_values_are_one_verdict_or_refused(values: list[int]) -> None:
    prefix = unpack_prefix(np.frombuffer(b"pipedec2" + PREFIX.pack(0, 0, len(values), 0), np.uint8), 0)
    try:
        verdict = unpack_verdict(values, prefix)
    except ValueError:
        return
    assert received(*pack_envelope(Envelope(None, verdict), INLINE_ROWS)).verdict == verdict
