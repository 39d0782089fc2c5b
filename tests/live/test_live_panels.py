"""Runs on a terminal: what is drawn of them, and that it fits."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console, RenderableType

from pipedec.live.terminal import panel, printable, screen, summary
from pipedec.live.view import RunView, ShownRun

STATS = {
    "k": "stats", "running": 2, "waiting": 1, "kv": 0.5, "tokens_per_s": 68.5, "ttft_ms": 87.0, "tpot_ms": 14.6,
    "acceptance": [0.9, 0.5, 0.1], "hit_rate": 0.92, "recovering": False,
    "recoveries": [{"epoch": 1, "lost": [2], "reason": "rank 2 was killed", "seconds": 1.25}],
}  # fmt: skip


def shown(name: str = "one", stages: int = 3, requests: int = 1, **more: Any) -> ShownRun:
    """A run: of every request, a root at timestep 1, a piece of a prompt at 2 and a guess at 3; at 4 one verdict, a miss."""
    run = RunView(name)
    run.take({"k": "run", "v": 1, "epoch": 0, "stages": stages, "groups": stages, "target": "/models/pair/target"})
    numbers = range(requests)
    for number in numbers:
        run.take({"k": "open", "r": number, "method": "pipedec", "prompt": f"Question {number}?", "said": f"Answer {number} is"})
    run.take({"k": "step", "t": 1, "in": [{"r": number, "rows": [[0, -1, 5, " is", 1.0]]} for number in numbers]})
    run.take({"k": "step", "t": 2, "in": [{"r": number, "chunk": 4, "rows": []} for number in numbers]})
    run.take({"k": "step", "t": 3, "in": [{"r": number, "rows": [[1, 0, 6, " maybe", 0.6]]} for number in numbers]})
    out = [{"r": 0, "tokens": [[7, " known", None]], "text": " known", "hit": False, "pruned": [1], "end": None}]
    run.take({"k": "step", "t": 4, "out": out})
    run.take({"k": "step", "t": 5})
    return ShownRun(run, "up", **more)


def drawn(what: RenderableType, width: int) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, height=200, color_system=None).print(what)
    return out.getvalue().splitlines()


def test_stages_are_drawn_against_timesteps_with_verdicts_below() -> None:
    lines = [line[2:-2] for line in drawn(panel(shown(), 19, None, False), 19)]
    grid = [line for line in lines if line.startswith(("stage", "verdict"))]
    assert grid == ["stage 1   █▒█  ", "stage 2    █▒█ ", "stage 3     █▒░", "verdict      × "]


def test_a_request_shows_its_answer_and_what_may_follow() -> None:
    run = shown(requests=2)
    text = "\n".join(drawn(panel(run, 100, None, False), 100))
    assert "▸ 0  pipedec  1 tokens  hits 0%  Question 0?" in text and "Answer 0 is known" in text
    assert "1  Answer 1 is" in text and "Question 1" not in text
    run.chosen = 1
    text = "\n".join(drawn(panel(run, 100, None, False), 100))
    assert "▸ 1  pipedec  0 tokens  Question 1?" in text and "Answer 1 is┊ maybe" in text


def test_figures_and_recoveries_are_told() -> None:
    run = shown(ranks=(3, 4))
    assert "waiting for its figures" in "\n".join(drawn(panel(run, 100, None, False), 100))
    run.run.take(STATS)
    text = "\n".join(drawn(panel(run, 200, None, False), 200))
    for wanted in (
        "3 of 4 ranks alive",
        "2 running",
        "1 waiting",
        "KV ████░░░░ 50%",
        "68.5 tokens/s",
        "TTFT 87 ms",
        "TPOT 15 ms",
    ):
        assert wanted in text
    for wanted in ("hits 92%", "by position █▅▁ (first 90%)", "epoch 1: rank 2 was killed; went on after 1.2 s", "pair/target"):
        assert wanted in text


def test_a_run_that_has_ended_says_why() -> None:
    run = shown(note="rank 2 died: out of memory")
    run.state = "ended"
    assert "rank 2 died: out of memory" in "\n".join(drawn(panel(run, 80, 20, False), 80))
    assert drawn(summary(run, 80), 80) == ["one  ended  rank 2 died: out of memory"]


@pytest.mark.parametrize("width", [60, 131])
@pytest.mark.parametrize(
    ("runs", "stages", "requests", "height"), [(1, 14, 30, 24), (3, 4, 2, 50), (9, 14, 1, 30), (2, 1, 0, 23)]
)
@pytest.mark.parametrize("halves", [False, True])
def test_it_fits_whatever_there_is(width: int, runs: int, stages: int, requests: int, height: int, halves: bool) -> None:
    every = [shown(f"run{number}", stages, max(1, requests)) for number in range(runs)]
    for one in every:
        one.run.take(STATS)
        one.run.take({"k": "step", "t": 6, "out": [{"r": 0, "tokens": [], "text": "東京\x1b[2J\n" * 200, "hit": True}]})
    lines = drawn(screen(every, runs - 1, width, height, halves), width)
    assert len(lines) <= height and max(map(cell_len, lines)) <= width
    assert all(f"run{number}" in "\n".join(lines) for number in range(runs))
    assert "\x1b" not in "".join(lines)


def test_two_stages_share_a_line_where_lines_are_short() -> None:
    run = shown(stages=14)
    together, alone = (drawn(panel(run, 60, 16, halves), 60) for halves in (True, False))
    assert any("stage 1-2" in line for line in together) and any("stage 13-14" in line for line in together)
    assert not any("stage 14" in line for line in alone)


def test_no_text_steers_the_terminal() -> None:
    assert printable("a\x1b[31m\nb\tc\x07é東") == "a [31m⏎b c é東"
