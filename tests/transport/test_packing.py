"""Packing steps and headers into messages and back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipedec.core import Part, Share, Step, Verdict
from pipedec.decoding.bita import MAX_NAMED
from pipedec.decoding.threaded import MAX_ROWS, MAX_THREADS
from pipedec.model.bita import MAX_MASKS
from pipedec.transport.base import (
    HEADER_VALUES,
    MAX_VERDICT_TOKENS,
    Envelope,
    message_bytes,
    pack,
    pack_header,
    unpack,
    unpack_header,
)  # fmt: skip

INT64 = st.integers(-(2**63), 2**63 - 1)


@settings(deadline=None)
@given(st.data(), st.integers(1, 40), st.sampled_from([1, 3, 8]), st.sampled_from([torch.float32, torch.bfloat16, None]))
def test_round_trip(data: st.DataObject, num_rows: int, hidden_size: int, dtype: torch.dtype | None) -> None:
    ids = st.lists(INT64, min_size=num_rows, max_size=num_rows)
    token_ids, parents = torch.tensor(data.draw(ids)), torch.tensor(data.draw(ids))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    hidden = None if dtype is None else torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    threads = torch.tensor(data.draw(ids)) if data.draw(st.booleans()) else None
    sent = Step(token_ids, parents, hidden, threads)
    wire_size, wire_dtype = (hidden_size, dtype) if dtype else (0, torch.float32)

    message = torch.full((message_bytes(num_rows, wire_size, wire_dtype),), 0xAB, dtype=torch.uint8)
    pack(sent, message)
    assert message.is_contiguous() and message.nbytes == num_rows * (24 + wire_size * wire_dtype.itemsize)

    received = unpack(message, num_rows, wire_size, wire_dtype)
    assert received.num_rows == num_rows
    assert torch.equal(received.token_ids, token_ids) and torch.equal(received.parents, parents)
    assert torch.equal(received.threads, torch.zeros_like(parents) if threads is None else threads)  # type: ignore[arg-type]
    assert (received.hidden is None) == (hidden is None)
    if hidden is not None:
        assert received.hidden is not None and received.hidden.dtype == dtype and torch.equal(received.hidden, hidden)


def test_a_slice_of_a_larger_tensor_can_be_packed() -> None:
    hidden = torch.arange(24.0).view(3, 8)[:, ::2]
    message = torch.empty(message_bytes(3, 4, torch.float32), dtype=torch.uint8)
    pack(Step(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 0]), hidden), message)
    assert torch.equal(unpack(message, 3, 4, torch.float32).hidden, hidden)  # type: ignore[arg-type]


def test_a_message_of_another_size_is_refused() -> None:
    step = Step(torch.tensor([1, 2]), torch.tensor([-1, 0]), torch.zeros(2, 4))
    with pytest.raises(RuntimeError):
        pack(step, torch.empty(message_bytes(2, 3, torch.float32), dtype=torch.uint8))


@pytest.mark.parametrize("rows", [0, 1, 32])
@pytest.mark.parametrize(
    "verdict",
    [
        None,
        Verdict((5,)),
        Verdict((2**40, 7, 0), "stop"),
        Verdict((1,) * MAX_VERDICT_TOKENS, "length"),
        Verdict((), "cancelled"),
        Verdict((5, 6), None, ((7,),)),
        Verdict((5,), None, ((7, 8, 9), (2**40, 0, 1))),
        Verdict((), None, ((1, 2),) * 4),
        Verdict((5, 6, 7), None, (), (Share(0, 1), Share(40_000, 2))),
        Verdict((5, 6), None, ((1, 2), (3, 4), (5, 6)), (Share(3, 1, 2), Share(0, 1, 1))),
        Verdict((), "cancelled", (), (Share(7, 0),)),
        Verdict((3,) * (MAX_VERDICT_TOKENS - 64), None, tuple((index, index + 1, 0, 5) for index in range(16))),
    ],
    ids=lambda verdict: str(verdict)[:40],
)
def test_headers_round_trip(rows: int, verdict: Verdict | None) -> None:
    step = Step(torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.int64)) if rows else None
    header = torch.full((HEADER_VALUES,), -7)
    pack_header(Envelope(step, verdict), header)
    assert unpack_header(header) == (rows, verdict)


TOKENS = st.integers(0, 2**62)


@settings(deadline=None)
@given(st.data(), st.lists(TOKENS, max_size=MAX_VERDICT_TOKENS), st.sampled_from([None, "stop", "length", "cancelled"]))
def test_any_verdict_that_fits_round_trips(data: st.DataObject, tokens: list[int], finished: str | None) -> None:
    room = MAX_VERDICT_TOKENS - len(tokens)
    named = data.draw(st.integers(1, room)) if room else 0
    places = data.draw(st.integers(0, room // named)) if room else 0
    forecast = tuple(tuple(data.draw(st.lists(TOKENS, min_size=named, max_size=named))) for _ in range(places))
    verdict, header = Verdict(tuple(tokens), finished, forecast), torch.full((HEADER_VALUES,), -7)
    pack_header(Envelope(None, verdict), header)
    assert unpack_header(header) == (0, verdict)


@settings(deadline=None)
@given(st.data())
def test_any_verdict_with_shares_that_fits_round_trips(data: st.DataObject) -> None:
    room, parts, named = MAX_VERDICT_TOKENS, [], data.draw(st.integers(1, 3))
    for thread in data.draw(st.lists(st.integers(0, 2**40), unique=True, max_size=40)):
        tokens = data.draw(st.lists(TOKENS, min_size=1, max_size=4))
        forecast = data.draw(st.lists(st.tuples(*[TOKENS] * named), max_size=2))
        room -= 1 + len(tokens) + named * len(forecast)
        if room < 0:
            break
        parts.append(Part(thread, tuple(tokens), tuple(forecast)))
    verdict, header = Verdict.of_parts(parts), torch.full((HEADER_VALUES,), -7)
    pack_header(Envelope(None, verdict), header)
    assert unpack_header(header) == (0, verdict)
    assert list(verdict.parts()) == (parts or [Part(0, ())])


@pytest.mark.parametrize(
    "verdict",
    [
        Verdict((1,) * (MAX_VERDICT_TOKENS + 1)),
        Verdict((1,) * (MAX_VERDICT_TOKENS - 1), None, (), (Share(0, 60), Share(1, MAX_VERDICT_TOKENS - 61))),
        Verdict((), None, ((1,) * (MAX_VERDICT_TOKENS + 1),)),
        Verdict((1,) * (MAX_VERDICT_TOKENS - 11), None, ((1, 2, 3),) * 4),
    ],
    ids=["tokens", "shares", "forecast", "together"],
)
def test_a_verdict_that_is_too_long_is_refused(verdict: Verdict) -> None:
    with pytest.raises(ValueError, match=rf"a verdict of {MAX_VERDICT_TOKENS + 1} tokens does not fit into a header"):
        pack_header(Envelope(None, verdict), torch.empty(HEADER_VALUES, dtype=torch.int64))


def test_every_verdict_on_the_rows_of_a_step_fits() -> None:
    """Even if every row of the largest step is accepted, with a share for every thread."""
    assert MAX_ROWS + MAX_THREADS <= MAX_VERDICT_TOKENS and MAX_THREADS < 2**16 and MAX_VERDICT_TOKENS < 2**8


def test_every_verdict_of_bita_fits() -> None:
    """Even with the largest number of masks, all accepted, and the largest forecast."""
    assert MAX_MASKS + 1 + MAX_NAMED <= MAX_VERDICT_TOKENS
