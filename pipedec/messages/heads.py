"""The head of an envelope: all that a stage message says besides its rows, as arrays without names."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from pipedec.core import Int64, NewRequest, Record, SlotRuns, TokenLogprobs, Verdict

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]


class UpdateHead(Record, frozen=True, array_like=True):
    """An ``Update``, with the number of its rows for its step."""

    number: Int64
    opening: NewRequest | None
    verdict: Verdict | None
    num_rows: Count
    logprobs: TokenLogprobs
    slots: SlotRuns
    prompt_logprobs: TokenLogprobs


class TensorHead(Record, frozen=True, array_like=True):
    """A named tensor of an envelope."""

    name: str
    dtype: str
    shape: tuple[Count, ...]


class StageMessageHead(Record, frozen=True, array_like=True):
    """The updates of an envelope, in order, and its tensors in the order in which their bytes follow."""

    updates: tuple[UpdateHead, ...]
    tensors: tuple[TensorHead, ...] = ()
