"""TTFT and TPOT, from the arrival of tokens at the client."""

from __future__ import annotations

import time

import pytest

from pipedec.client.reply import TokenArrivals


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock whose one entry is the time."""
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    return now


def test_an_answer_without_tokens_has_neither(clock: list[float]) -> None:
    arrivals = TokenArrivals()
    clock[0] += 1
    arrivals.note(0)
    assert arrivals.ttft_seconds is None and arrivals.tpot_seconds is None


def test_one_token_has_a_ttft_alone(clock: list[float]) -> None:
    arrivals = TokenArrivals()
    clock[0] += 0.25
    arrivals.note(1)
    assert arrivals.ttft_seconds == 0.25 and arrivals.tpot_seconds is None


def test_tpot_is_the_time_from_the_first_token_to_the_last_over_the_tokens_between(clock: list[float]) -> None:
    arrivals = TokenArrivals()
    for seconds, tokens in ((0.5, 1), (1.0, 3), (2.0, 2), (9.0, 0)):  # the last piece is text without a token
        clock[0] = 100 + seconds
        arrivals.note(tokens)
    assert arrivals.ttft_seconds == 0.5
    assert arrivals.tpot_seconds == pytest.approx(1.5 / 5)
    assert arrivals.itl_seconds == pytest.approx([0.5, 1.0])
