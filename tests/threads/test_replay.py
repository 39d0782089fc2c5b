"""Answers in document order, read back into their threads."""

from __future__ import annotations

import pytest
from support.toy_dialects import ids, sequence_of, toy

from pipedec.threads import replay


def test_what_cannot_be_read_back() -> None:
    with pytest.raises(ValueError, match="instead of the forced token"):
        replay(sequence_of(toy("apar")), ids("a [Fork] b"))
    with pytest.raises(ValueError, match="follow the end"):
        replay(sequence_of(toy("apar")), ids("a <|end|> b"))


def test_reading_back_stops_at_the_cut_and_may_stop_anywhere() -> None:
    sequence = sequence_of(toy("apar"), max_tokens=4)
    replay(sequence, ids("a [Fork] [Child] x y <|end|> b <|end|>"))
    assert [token.token_id for token in sequence.document()] == ids("a [Fork] [Child] x")
    sequence = sequence_of(toy("apar"))
    replay(sequence, ids("a [Fork]"))
    assert [token.token_id for token in sequence.document()] == ids("a [Fork] [Child]")
