"""Stage messages as bytes and back."""

from __future__ import annotations

import json
import struct
from contextlib import suppress

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.counted_device import DEVICE, CountedDevice
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import ROW_ID_BYTES, NewRequest, RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Accepted, Verdict
from pipedec.transport.wire import (
    MAX_HEAD_BYTES,
    MAX_ROWS,
    PREFIX_BYTES,
    PROTOCOL,
    Prefix,
    RowFormat,
    pack_hidden,
    pack_message,
    unpack_message,
    unpack_prefix,
)

HIDDEN_SIZE, DTYPE = 3, torch.float32
FORMAT = RowFormat(HIDDEN_SIZE, DTYPE)
INT64 = st.integers(-(2**63), 2**63 - 1)
REASONS = st.sampled_from([None, "stop", "length", "cancelled", "cache_full", "paused", "corrupted", "failed"])
TOKENS = st.lists(INT64, max_size=5).map(tuple)
ROWS = st.lists(TOKENS, max_size=4).map(tuple)
ACCEPTED = st.builds(Accepted, INT64, TOKENS, ROWS, ROWS)


def is_utf8(text: str) -> bool:
    return text.encode(errors="replace").decode() == text


FAILURES = st.none() | st.text().filter(is_utf8)
VERDICTS = st.builds(Verdict, st.lists(ACCEPTED, max_size=40).map(tuple), REASONS, FAILURES)


@st.composite
def steps(draw: st.DrawFn, max_rows: int = 40, hidden_size: int = HIDDEN_SIZE, dtype: torch.dtype | None = DTYPE) -> Step:
    num_rows = draw(st.integers(1, max_rows))
    ids = st.lists(INT64, min_size=num_rows, max_size=num_rows).map(torch.tensor)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    hidden = None if dtype is None else torch.randn(num_rows, hidden_size, generator=generator).to(dtype)
    return Step(draw(ids), draw(ids), hidden, draw(st.none() | ids))


SLOTS = st.lists(st.tuples(st.integers(0, 2**40), st.integers(1, 2**20)), max_size=4).map(tuple)
OPENINGS = st.builds(
    NewRequest,
    st.integers(1, 9),
    st.builds(SamplingParams, logprobs=st.none() | st.just(2)),
    st.integers(0, 5),
    st.none() | st.text().filter(is_utf8),
    st.booleans(),
    TOKENS,
    SLOTS,
    st.integers(0, 2**40),
    st.tuples(st.integers(0, 2**40), st.integers(0, 15)),
)
ROWS_OF_LOGPROBS = st.lists(
    st.lists(st.tuples(st.integers(0, 99), st.floats(max_value=0, allow_nan=False, allow_infinity=False)), max_size=3).map(tuple)
)
UPDATES = st.builds(
    RequestUpdate, INT64, st.none() | OPENINGS, st.none() | VERDICTS, st.none() | steps(), ROWS_OF_LOGPROBS.map(tuple), SLOTS,
    failure=FAILURES,
)  # fmt: skip
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8)


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    elements = torch.randint(0, 200, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 1000))))
    return elements.to(draw(st.sampled_from(DTYPES))).movedim(0, -1) if shape else elements.to(torch.bfloat16)


TENSORS = st.dictionaries(st.text(min_size=1, max_size=64).filter(is_utf8), tensors(), max_size=3)
MESSAGES = st.builds(
    lambda updates, ends, named: StageMessage(updates, ends, tensors=named),
    st.lists(UPDATES, max_size=5, unique_by=lambda update: update.number).map(tuple),
    st.booleans(),
    TENSORS,
)


def assert_equal(received: Step, sent: Step) -> None:
    threads = torch.zeros_like(sent.parents) if sent.threads is None else sent.threads
    assert torch.equal(received.token_ids, sent.token_ids) and torch.equal(received.parents, sent.parents)
    assert received.threads is not None and torch.equal(received.threads, threads)
    assert (received.hidden is None) == (sent.hidden is None)
    if sent.hidden is not None and received.hidden is not None:
        assert received.hidden.dtype == sent.hidden.dtype and torch.equal(received.hidden, sent.hidden)


@pytest.mark.parametrize(("dtype", "hidden_size"), [(torch.float32, 3), (torch.float64, 1), (torch.bfloat16, 8)])
def test_activations_round_trip(dtype: torch.dtype, hidden_size: int) -> None:
    sent = torch.randn(5, 2 * hidden_size).to(dtype)[:, ::2]  # a slice of a larger tensor, too
    rows = RowFormat(hidden_size, dtype)
    message = pack_hidden(sent, None)
    assert message.nbytes == rows.hidden_bytes(5) == 5 * (rows.row_bytes - ROW_ID_BYTES)
    assert torch.equal(rows.decoded(message, 5), sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_rows_of_int8_are_within_half_a_step_of_their_scale(dtype: torch.dtype) -> None:
    sent = (torch.randn(6, 40) * torch.tensor([1e-4, 0, 1, 3, 50, 200])[:, None]).to(dtype)[:, ::2]
    rows = RowFormat(20, dtype, torch.int8)
    message = pack_hidden(sent, torch.int8)
    assert message.nbytes == rows.hidden_bytes(6) == 6 * (20 + 4)
    received = rows.decoded(message, 6)
    assert received.dtype == dtype
    info = torch.finfo(dtype)
    rounding = info.eps * sent.abs().clamp_min(info.smallest_normal)
    scale_R1 = sent.abs().amax(1, keepdim=True).double() / 127
    assert ((received.double() - sent.double()).abs() <= scale_R1 * 0.501 + rounding).all()
    assert not torch.equal(received, sent)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_does_not_become_finite_on_its_way(value: float) -> None:
    sent = torch.ones(3, 4)
    sent[1, 2] = value
    received = RowFormat(4, torch.float32, torch.int8).decoded(pack_hidden(sent, torch.int8), 3)
    assert received.isfinite().all(1).tolist() == [True, False, True]


@pytest.mark.parametrize("wire_dtype", [None, torch.int8])
def test_messages_of_another_device_hold_the_same_bytes(wire_dtype: torch.dtype | None) -> None:
    rows = RowFormat(4, torch.bfloat16, wire_dtype)
    sent = torch.randn(5, 4).to(rows.dtype)
    with CountedDevice() as counted:
        message = pack_hidden(sent.to(DEVICE), wire_dtype)
        received = rows.decoded(message, 5)
        assert message.device == received.device == DEVICE and not counted.reads and not counted.mixed
    assert torch.equal(message, pack_hidden(sent, wire_dtype)) and torch.equal(received, rows.decoded(message, 5))


def test_slices_of_larger_tensors_can_be_packed() -> None:
    hidden = torch.arange(18.0).view(3, 6)[:, ::2]
    step = Step(torch.arange(6)[::2], torch.tensor([-1, 0, 0]), hidden)
    found = received(*pack_message(StageMessage((RequestUpdate(3, step=step),)))).updates[0].step
    assert found is not None
    assert_equal(found, step)


def received(message: Tensor, following: Tensor | None) -> StageMessage:
    """As a transport unpacks a message; it lies in a larger buffer."""
    buffer = np.concatenate((message.numpy(), np.full(99, 0xAB, np.uint8)))
    prefix = unpack_prefix(buffer, FORMAT.row_bytes)
    hidden = message[prefix.end :] if following is None else pack_hidden(following, None)
    assert len(hidden) == FORMAT.hidden_bytes(prefix.rows) and len(message) == prefix.end + (following is None) * len(hidden)
    arrived = FORMAT.decoded(hidden, prefix.rows) if prefix.rows else None
    return unpack_message(buffer[PREFIX_BYTES : prefix.end], arrived, prefix)


@given(MESSAGES, st.booleans())
def test_messages_round_trip(sent: StageMessage, holds_hidden: bool) -> None:
    found = received(*pack_message(sent, holds_hidden=holds_hidden))
    assert found.ends_session == sent.ends_session and len(found.updates) == len(sent.updates)
    for ours, theirs in zip(found.updates, sent.updates, strict=True):
        assert replace(ours, step=None) == replace(theirs, step=None)
        assert (ours.step is None) == (theirs.step is None)
        if ours.step is not None and theirs.step is not None:
            assert_equal(ours.step, theirs.step)
    assert list(found.tensors) == list(sent.tensors)
    for name, tensor in sent.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype and torch.equal(found.tensors[name], tensor)


@pytest.mark.parametrize(
    "named",
    [
        {"": torch.zeros(1)},
        {"x" * 65: torch.zeros(1)},
        {"x": torch.zeros(1, dtype=torch.complex64)},
        {"x": torch.zeros(1, dtype=torch.float8_e4m3fn)},
        {"x": torch.zeros((1,) * 9)},
        {"x": torch.zeros(0, 2**20, 2**20)},
        {str(number): torch.zeros(1) for number in range(65)},
    ],
    ids=lambda named: str(named)[:30],
)
def test_tensors_that_no_receiver_takes_are_not_sent(named: dict[str, Tensor]) -> None:
    with pytest.raises(ValueError, match="tensor"):
        pack_message(StageMessage(tensors=named))


def with_tensors(*heads: object, elements: bytes = b"") -> None:
    """Unpack a message with these heads of tensors."""
    text = json.dumps([[], heads]).encode()
    text += b" " * (-len(text) % 8)
    head = np.frombuffer(bytearray(text + elements), np.uint8)
    unpack_message(head, None, Prefix(len(head), len(text), 0, 0, 0))


def test_what_are_no_tensors_is_refused() -> None:
    with_tensors(["x", "bfloat16", [2, 1]], ["y", "int64", []], elements=bytes(16))
    for elements in (bytes(8), bytes(24), b""):
        with pytest.raises(ValueError, match="do not fill the rest"):
            with_tensors(["x", "bfloat16", [2, 1]], ["y", "int64", []], elements=elements)
    for head in (
        ["", "int64", [0]],
        ["x" * 65, "int64", [0]],
        ["x", "complex64", [0]],
        ["x", "int64", [0, 2**40]],
        ["x", "int64", [1] * 9],
    ):
        with pytest.raises(ValueError, match="tensor"):
            with_tensors(head)
    with pytest.raises(ValueError, match="two of one name"):
        with_tensors(["x", "int64", [0]], ["x", "int64", [0]])
    for head in (["x", "int64"], ["x", "int64", [-1]], ["x", "int64", [0], 1], ["x", "int64", ["0"]], [5, "int64", [0]], {}):
        with pytest.raises(ValueError, match="cannot be read"):
            with_tensors(head)


def test_a_message_with_little_in_it_has_few_bytes() -> None:
    assert len(pack_message(StageMessage())[0]) == PREFIX_BYTES
    assert len(pack_message(StageMessage((RequestUpdate(3, verdict=Verdict.of(5)),)))[0]) == 128


def test_seeds_and_biases_arrive_as_they_are() -> None:
    sampling = SamplingParams(0.7, seed=2**64 - 1, stop=("a", "\u00e9"), stop_token_ids=(3,), logit_bias={5: -1.5}, logprobs=2)
    sent = StageMessage((RequestUpdate(2**40, NewRequest(9, sampling, 3, '{"name": "x"}', True)),))
    assert received(*pack_message(sent)) == sent


@pytest.mark.fast_cases
@pytest.mark.parametrize(
    ("update", "message"),
    [
        (RequestUpdate(1, step=Step(torch.zeros(MAX_ROWS + 1, dtype=torch.int64), torch.zeros(MAX_ROWS + 1))), "65537 rows"),
        (RequestUpdate(1, verdict=Verdict.of(*[1] * (MAX_HEAD_BYTES // 2))), "a head of"),
    ],
    ids=["rows", "head"],
)
def test_what_no_receiver_accepts_is_not_sent(update: RequestUpdate, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pack_message(StageMessage((update,)))


PREFIX = struct.Struct("<iiiii4x")
ROWS = st.integers(-1, 2**17) | st.integers(-(2**31), 2**31 - 1)


@given(
    st.binary(min_size=24, max_size=24) | st.builds(PREFIX.pack, ROWS, ROWS, ROWS, st.just(FORMAT.row_bytes), st.integers(0, 1))
)
@pytest.mark.failure_case("S12")
def test_any_prefix_is_within_the_bounds_or_refused(lengths: bytes) -> None:
    try:
        prefix = unpack_prefix(np.frombuffer(PROTOCOL.encode() + lengths, np.uint8), FORMAT.row_bytes)
    except ValueError:
        return
    assert 0 <= prefix.rows <= MAX_ROWS and 0 <= prefix.text_bytes <= prefix.head_bytes <= MAX_HEAD_BYTES


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 6) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)
MAYBE = st.none() | JSON
FIELDS = st.tuples(st.integers(-1, 3) | JSON, MAYBE, MAYBE, st.integers(-1, 2) | JSON, JSON, JSON, JSON, MAYBE)
HEADS = st.tuples(st.lists(FIELDS, max_size=3), JSON)


@given(st.binary(max_size=40) | (JSON | HEADS).map(lambda value: json.dumps(value).encode()))
@pytest.mark.failure_case("S12")
def test_any_head_is_a_message_or_refused(head: bytes) -> None:
    """What arrives may be anything: a receiver refuses it with a ValueError, and nothing else happens."""
    padded = head + b" " * (-len(head) % 8)
    prefix = Prefix(len(padded), len(padded), 0, 0, 0)
    with suppress(ValueError):
        assert isinstance(unpack_message(np.frombuffer(padded, np.uint8), None, prefix), StageMessage)


HUGE = st.sampled_from([2**63, -(2**70), 1e300, float("inf"), True, "7", None, [], {}])
PLACES = ["number", "thread", "token", "rows", "slot", "slots", "score"]


def with_values(**values: object) -> StageMessage:
    """Unpack a message with one update, in which these places have other values."""
    fields: dict[str, object] = dict.fromkeys(PLACES, 0) | values
    verdict = {"accepted": [[fields["thread"], [fields["token"]], []]]}
    logprobs, slots = [[[fields["score"], -1.0]]], [[fields["slot"], fields["slots"]]]
    update = [fields["number"], None, verdict, fields["rows"], logprobs, slots, [], None]
    head = json.dumps([[update]]).encode()
    return unpack_message(np.frombuffer(head, np.uint8), None, Prefix(len(head), len(head), 0, 0, 0))


@given(st.sampled_from(PLACES), HUGE)
@pytest.mark.failure_case("S12")
def test_any_wrong_value_in_an_update_is_refused(place: str, value: object) -> None:
    assert with_values().updates[0].slots == ((0, 0),)
    if place == "rows" and value is None:
        return  # no rows
    with pytest.raises(ValueError, match="cannot be read"):
        with_values(**{place: value})


def test_updates_that_do_not_fit_together_are_refused() -> None:
    for updates, problem in (([[1, None, None, 1]], "have 1 rows, not 0"), ([[1], [1]], "two updates of one request")):
        head = json.dumps([updates]).encode()
        with pytest.raises(ValueError, match=problem):
            unpack_message(np.frombuffer(head, np.uint8), None, Prefix(len(head), len(head), 0, 0, 0))


@given(st.integers(1, 40), st.data())
def test_a_truncated_head_is_refused(num_tokens: int, data: st.DataObject) -> None:
    first = pack_message(StageMessage((RequestUpdate(7, verdict=Verdict.of(*range(num_tokens))),)))[0].numpy()
    end = data.draw(st.integers(PREFIX_BYTES + 1, len(bytes(first).rstrip()) - 1))
    with pytest.raises(ValueError, match="cannot be read"):
        unpack_message(first[PREFIX_BYTES:end], None, unpack_prefix(first, FORMAT.row_bytes))
