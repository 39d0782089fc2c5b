"""Frames of the live feed, and what there is to see of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipedec.core.errors import UserError
from pipedec.live.reading import RecordedFrames
from pipedec.live.view import RunView, Share

ABOUT = {"k": "run", "v": 1, "run": "a", "epoch": 0, "stages": 3, "groups": 3, "target": "t", "draft": None, "us": 0}


def opened(number: int = 0, **more: Any) -> dict[str, Any]:
    return {"k": "open", "run": "a", "t": 0, "r": number, "method": "pipedec", "prompt": "p", "said": ""} | more


def step(
    t: int, rows: dict[int, list[list[Any]]] | None = None, out: list[dict[str, Any]] | None = None, chunk: int = 0
) -> dict[str, Any]:
    entered = [{"r": number, "chunk": chunk, "rows": some} for number, some in (rows or {}).items()]
    return {"k": "step", "run": "a", "t": t, "us": t, "in": entered, "out": out or []}


def verdict(
    *tokens: list[Any], hit: bool, pruned: tuple[int, ...] = (), end: str | None = None, number: int = 0
) -> dict[str, Any]:
    text = "".join(token[1] for token in tokens)
    return {"r": number, "tokens": list(tokens), "text": text, "hit": hit, "late": 0, "pruned": list(pruned), "end": end}


def view_of(*frames: dict[str, Any]) -> RunView:
    view = RunView("a")
    for frame in (ABOUT, *frames):
        view.take(frame)
    return view


def speculating(*more: dict[str, Any]) -> RunView:
    """A root, then two guesses at what follows it, then one below the likelier."""
    return view_of(
        opened(),
        step(1, {0: [[0, -1, 5, "One", 1.0]]}),
        step(2, {0: [[1, 0, 6, " two", 0.7], [2, 0, 7, " too", 0.2]]}),
        step(3, {0: [[3, 1, 8, " three", 0.5]]}),
        *more,
    )


def test_what_entered_is_one_group_further_at_every_timestep() -> None:
    run = speculating(step(4), step(5))
    assert [run.cell(t, t - 2) for t in (2, 3, 4)] == [{0: Share(0, 2, 0)}] * 3
    assert run.cell(3, 0) == {0: Share(0, 1, 0)} and run.cell(1, 1) == {} and run.cell(5, 0) == {}
    assert run.timestep == 5


def test_rows_of_a_prompt_are_told_apart() -> None:
    run = view_of(opened(), step(1, {0: [], 4: [[0, -1, 5, "x", None]]}, chunk=32))
    assert run.cell(1, 0) == {0: Share(32, 0, 0), 4: Share(32, 1, 0)}
    assert list(run.requests) == [0, 4], "one that nobody has opened is there, too"


def test_a_verdict_prunes_rows_from_the_next_timestep_on() -> None:
    run = speculating(step(4, out=[verdict([6, " two", 1], hit=True, pruned=(2,))]), step(5))
    assert run.cell(4, 2) == {0: Share(0, 2, 0)}
    assert run.cell(3, 1) == {0: Share(0, 2, 0)}
    late = speculating(step(4, out=[verdict([7, " too", 2], hit=True, pruned=(1, 3))]), step(5))
    assert late.cell(4, 1) == {0: Share(0, 1, 0)} and late.cell(5, 2) == {0: Share(0, 0, 1)}


def test_the_likely_path_begins_behind_the_last_accepted_token() -> None:
    run = speculating()
    assert [row.text for row in run.requests[0].likely()] == [" two", " three"]
    run = speculating(step(4, out=[verdict([6, " two", 1], hit=True, pruned=(2,))]))
    assert [row.text for row in run.requests[0].likely()] == [" three"]
    run = speculating(step(4, out=[verdict([9, " four", None], hit=False, pruned=(1, 2, 3))]))
    assert run.requests[0].likely() == []
    run.take(step(5, {0: [[4, -1, 9, " four", 1.0], [5, 4, 10, " five", 0.4]]}))
    assert [row.text for row in run.requests[0].likely()] == [" five"]


def test_an_answer_says_which_of_its_tokens_were_in_flight() -> None:
    told = [verdict([5, "One", None], hit=False), verdict([6, " two", 1], hit=True), verdict([8, " three", 3], hit=True)]
    run = view_of(opened(), *(step(t, out=[one]) for t, one in enumerate(told)))
    request = run.requests[0]
    assert request.spans == [("One", False), (" two three", True)]
    assert (request.text, request.tokens, request.hits, request.judged) == ("One two three", 3, 2, 2)
    assert [run.columns[t].hits for t in range(3)] == [{}, {0: True}, {0: True}], "the first token is neither hit nor miss"


def test_of_several_tokens_of_a_verdict_each_is_marked_for_itself() -> None:
    out = [verdict([5, "One", None], hit=False), verdict([6, " two", 1], [8, " three", None], hit=False)]
    request = view_of(opened(), *(step(t, out=[one]) for t, one in enumerate(out))).requests[0]
    assert request.spans == [("One", False), (" two", True), (" three", False)] and (request.hits, request.judged) == (1, 2)


def test_who_does_not_know_the_rows_in_flight_counts_no_hit() -> None:
    out = [verdict([5, "One", None], hit=False), verdict([6, " two", None], hit=True)]
    run = view_of(opened(), *(step(t, out=[one]) for t, one in enumerate(out)))
    assert (run.requests[0].hits, run.requests[0].judged) == (0, 0) and run.columns[1].hits == {}


def test_a_request_that_has_ended_leaves_no_live_row_and_is_remembered_for_a_while() -> None:
    run = speculating(step(4, out=[verdict([9, ".", None], hit=False, end="stop")]), step(5))
    assert run.cell(5, 2) == {0: Share(0, 0, 1)}
    run.take({"k": "close", "run": "a", "r": 0, "reason": "stop", "metrics": {"tokens": 1}})
    assert run.running() == [] and run.requests[0].reason == "stop" and run.requests[0].metrics == {"tokens": 1}
    for number in range(1, 30):
        run.take(opened(number))
        run.take({"k": "close", "run": "a", "r": number, "reason": "stop", "metrics": None})
    assert list(run.requests) == list(range(22, 30))


def test_after_a_gap_the_rows_are_unknown_and_answers_go_on() -> None:
    run = speculating(step(4, out=[verdict([6, " two", 1], hit=True)]), {"k": "gap", "run": "a", "dropped": 7})
    assert run.dropped == 7 and run.cell(4, 2) == {} and run.running() == []
    run.take(opened(said="One two, and more"))
    assert run.requests[0].text == "One two, and more" and run.requests[0].likely() == []


def test_a_new_epoch_voids_what_is_in_flight_and_keeps_the_answer() -> None:
    run = speculating(step(4, out=[verdict([6, " two", 1], hit=True)]), ABOUT | {"epoch": 1})
    assert run.about["epoch"] == 1 and run.columns == {} and run.requests[0].likely() == []
    run.take(opened(said=" two"))
    assert run.requests[0].spans == [(" two", True)], "what it said already is marked as it was"


def test_figures_are_those_of_the_last_frame() -> None:
    figures = {"running": 2, "waiting": 1, "kv": 0.5, "tokens_per_s": 68.5, "acceptance": [0.8, 0.5], "hit_rate": None}
    run = view_of({"k": "stats", "run": "a", "us": 1, **figures, "something": "new"})
    assert run.stats is not None and run.stats.acceptance == (0.8, 0.5) and run.stats.kv == 0.5 and run.stats.ttft_ms is None


def test_memory_is_bounded() -> None:
    run = view_of(opened())
    for t in range(3000):
        row = [t, t - 1, 5, "a word of the answer ", 0.5]
        run.take(step(t, {0: [row]}, [verdict([5, "a word of the answer ", t], hit=t % 2 == 0)]))
    assert len(run.columns) == len(run.requests[0].rows) == 403
    assert len(run.requests[0].text) == 50_000 and run.requests[0].text.endswith("a word of the answer ")
    assert run.requests[0].tokens == 3000


def test_several_sources_and_frames_of_other_kinds(tmp_path: Path) -> None:
    frames = [
        *(ABOUT | {"run": name} for name in ("b", "a")),
        opened(3) | {"run": "b"},
        {"k": "weather", "run": "a", "sun": True},
    ]
    (tmp_path / "recording").write_text("\n".join(map(json.dumps, frames)))
    recorded = RecordedFrames(tmp_path / "recording", at_once=True)
    assert recorded.take() == frames
    b, a = (shown.run for shown in recorded.runs)
    assert (b.name, a.name) == ("b", "a") and list(b.requests) == [3] and a.requests == {}


def test_frames_of_another_version_are_refused() -> None:
    with pytest.raises(UserError, match="version 2"):
        RunView("a").take(ABOUT | {"v": 2})
