"""Figures of requests under load, from when they were submitted and when their tokens came."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.load.results import Goals, LoadOutcome, ServedRequest, load_figure, steady_throughput


def served(submitted: float, *events: tuple[float, int], ended: float | None = None, refused: str | None = None) -> ServedRequest:
    last = events[-1][0] if events else submitted
    return ServedRequest("set", 0, 5, submitted, events, last if ended is None else ended, 0.25, refused=refused)


FAST = served(0.0, (1.0, 1), (1.5, 2), (3.0, 1))
SLOW = served(1.0, (4.0, 1), (8.0, 2))
REFUSED = served(2.0, refused="the queue is full")


def test_times_of_one_request() -> None:
    assert (FAST.ttft, FAST.tpot, FAST.e2e, FAST.itl) == (1.0, pytest.approx(2 / 3), 3.0, [0.5, 1.5])
    assert (SLOW.ttft, SLOW.tpot, SLOW.itl) == (3.0, 2.0, [4.0])
    assert served(0.0, (1.0, 1)).tpot is None


def test_figures_of_all() -> None:
    figures = LoadOutcome((FAST, SLOW, REFUSED), timesteps=10, rows=25).figures(2, Goals(ttft_ms=1500))
    assert (figures["requests"], figures["refused"], figures["output_tokens"]) == (3, 1, 7)
    assert figures["makespan_s"] == 8.0 and figures["tokens_per_s"] == pytest.approx(7 / 8)
    assert figures["goodput_per_s"] == pytest.approx(1 / 8)
    assert (figures["rows_per_timestep"], figures["tokens_per_timestep"]) == (2.5, 0.7)
    assert figures["ttft_ms"] == {"mean": 2000, "p50": 3000, "p90": 3000, "p99": 3000, "max": 3000}
    assert figures["itl_ms"]["mean"] == 2000 and figures["tpot_ms"]["mean"] == pytest.approx(1333.333)
    assert figures["e2e_ms"]["mean"] == 5000 and figures["queue_ms"]["p50"] == 250
    assert LoadOutcome((REFUSED,)).figures(1, Goals())["ttft_ms"] is None


def test_prompts_are_counted_by_turn() -> None:
    first = [replace(FAST, cached_tokens=2, ttft_timesteps=3), replace(SLOW, pauses=2)]
    second = [replace(FAST, turn=2, prompt_tokens=9, cached_tokens=7, ttft_timesteps=2)]
    figures = LoadOutcome((*first, *second)).figures(2, Goals())
    assert (figures["prompt_tokens"], figures["cached_tokens"], figures["prefilled_tokens"]) == (19, 9, 10)
    assert figures["pauses"] == 2 and figures["kv"] is None
    one, two = figures["turns"]
    assert (one["turn"], one["prefilled_tokens"], one["ttft_timesteps"]) == (1, 8, 3)
    assert (two["turn"], two["prompt_tokens"], two["cached_tokens"], two["ttft_timesteps"]) == (2, 9, 7, 2)
    assert two["ttft_ms"]["mean"] == 1000
    assert LoadOutcome(tuple(first)).figures(2, Goals())["turns"] == [], "no conversations"


def test_goodput_counts_what_meets_all_goals() -> None:
    limits = (Goals(), 2), (Goals(ttft_ms=1000), 1), (Goals(ttft_ms=999), 0), (Goals(tpot_ms=700), 1), (Goals(3000, 2000), 2)
    for goals, met in limits:
        assert sum(one.meets(goals) for one in (FAST, SLOW, REFUSED)) == met


def test_steady_throughput_counts_while_the_load_is_full() -> None:
    """Two at a time: from when two have begun until the last is submitted."""
    four = [served(0.0, (1.0, 1), (3.0, 5)), served(0.0, (2.0, 1), (5.0, 3)), served(3.0, (4.0, 2)), served(6.0, (7.0, 9))]
    assert steady_throughput(four, 2) == pytest.approx((5 + 3 + 2) / (6.0 - 2.0))
    assert steady_throughput(four, None) == pytest.approx((1 + 5 + 1 + 3 + 2) / 6.0)
    assert steady_throughput(four[:2], 2) is None and steady_throughput([], 2) is None


def test_the_figure_has_a_panel_for_each_measure_and_a_line_for_each_policy() -> None:
    figures = LoadOutcome((FAST, SLOW)).figures(2, Goals())
    run = {"cluster": {"preset": "paper-14", "stages": 14}, "version": "1", "revision": "0" * 12}
    rows = [
        {**run, **figures, "method": method, "policy": method, "max_num_seqs": 4, "pattern": {"rate": None, "concurrency": load}}
        for method in ("pp", "pipedec")
        for load in (1, 2)
    ]
    figure = load_figure(rows)
    assert figure is not None and load_figure(rows[:1]) is None
    assert [axes.get_ylabel() for axes in figure.axes] == ["throughput (tokens/s)", "TPOT (ms)", "TTFT (ms)"]
    assert {axes.get_xlabel() for axes in figure.axes} == {"concurrent requests"}
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["PP", "PipeDec"]
