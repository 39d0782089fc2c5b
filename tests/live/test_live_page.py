"""The live page in headless Chromium: what it draws is what the feed says, and it is usable by everybody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.browsers import needs_chromium, violations
from support.feeds import FeedServer, Frame, eventful_feed, long_feed, recording, wait_for

pytestmark = needs_chromium
END = "pipedecLive.seek(1e6)"


class Opened:
    """A page that has logged no error."""

    def __init__(self, browser: Any, url: str, width: int = 1280, scheme: str = "light") -> None:
        context = browser.new_context(
            bypass_csp=True, viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page = context.new_page()
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("console", lambda message: message.type == "error" and self.errors.append(message.text))
        self.page.goto(url)
        wait_for(self.page, "typeof pipedecLive === 'object'")

    def ask(self, expression: str) -> Any:
        return self.page.evaluate(expression)

    def close(self) -> None:
        self.page.context.close()


@pytest.fixture(scope="module")
def recorded() -> Iterator[FeedServer]:
    with FeedServer().serving() as server:
        yield server


@pytest.fixture
def played(browser: Any, recorded: FeedServer) -> Iterator[Opened]:
    """The shipped recording, at its end."""
    opened = Opened(browser, f"{recorded.url}/live?recording=/recording.jsonl.gz")
    wait_for(opened.page, "pipedecLive.state().sources.length === 4")
    opened.ask("pipedecLive.pause()")
    opened.ask(END)
    yield opened
    assert opened.errors == []
    opened.close()


def steps_of(run: str) -> list[Frame]:
    return [frame for frame in recording() if frame["k"] == "step" and frame["run"] == run]


def test_answers_rows_and_prunes_are_those_of_the_recording(played: Opened) -> None:
    for source in played.ask("pipedecLive.state().sources"):
        steps = steps_of(source["run"])
        (request,) = source["requests"]
        said = [verdict for step in steps for verdict in step["out"]]
        assert request["text"] == "".join(verdict["text"] for verdict in said)
        assert request["tokens"] == sum(len(verdict["tokens"]) for verdict in said)
        carried = {row for verdict in said for _, _, row in verdict["tokens"]}
        assert not set(request["pruned"]) & carried - {said[-1]["tokens"][-1][2]}, "what became the answer but for its last token"
        assert source["t"] == steps[-1]["t"]


@pytest.mark.slow
def test_in_the_middle_of_a_recording_exactly_what_verdicts_have_voided_is_shown_as_pruned(played: Opened) -> None:
    for seconds in (1.0, 1.6, 2.1):
        played.ask(f"pipedecLive.seek({seconds})")
        for source in played.ask("pipedecLive.state().sources"):
            said = [verdict for step in steps_of(source["run"]) if step["t"] <= source["t"] for verdict in step["out"]]
            if said and said[-1]["end"] is None:
                pruned = {row for verdict in said for row in verdict["pruned"]}
                entered = {row[0] for step in steps_of(source["run"]) if source["t"] - 14 < step["t"] <= source["t"]
                           for one in step["in"] for row in one["rows"]}  # fmt: skip
                (request,) = source["requests"]
                assert entered & set(request["pruned"]) == entered & pruned


@pytest.mark.slow
def test_requests_misses_late_rows_gaps_and_epochs(browser: Any) -> None:
    frames = eventful_feed()
    for count, check in (
        (6, "s.requests.length === 2 && s.requests[0].text === 'A1' && s.requests[1].text === 'B'"),
        (7, "s.requests[0]?.late === 1 && s.requests[0].verdicts >= 2"),
        (10, "s.dropped === 7 && s.requests.find((one) => one.r === 0)?.text === 'A1 and more'"),
        (12, "s.about.epoch === 1 && s.requests.find((one) => one.r === 0)?.rows.length === 0"),
    ):
        with FeedServer([frames[:count]]).serving() as server:
            opened = Opened(browser, f"{server.url}/live")
            wait_for(opened.page, f"(() => {{ const s = pipedecLive.state().sources[0]; return s && ({check}); }})()", 20)
            assert opened.errors == []
            opened.close()


@pytest.mark.slow
@pytest.mark.parametrize("run", ["pp", "pipedec-bestfirst"])
def test_every_cell_has_the_rows_that_entered_as_many_timesteps_before_as_its_stage_is_deep(played: Opened, run: str) -> None:
    entered = {step["t"]: step["in"] for step in steps_of(run)}
    last = max(entered)
    for t in range(max(last - 60, 1), last + 1, 3):
        for group in (0, 1, 6, 13):
            cell = played.ask(f"pipedecLive.cell({json.dumps(run)}, {t}, {group})")
            expected = [one for one in entered.get(t - group, []) if one["chunk"] or one["rows"]]
            drawn = [(part["r"], part["prompt"] + part["live"] + part["pruned"]) for part in cell]
            assert [number for number, count in drawn if count] == [one["r"] for one in expected]
            assert [count for _, count in drawn if count] == [one["chunk"] or len(one["rows"]) for one in expected]


@pytest.mark.slow
def test_a_recording_is_stepped_through_with_keys_saved_and_opened_again(played: Opened, tmp_path: Path) -> None:
    at = "pipedecLive.state().position"
    end = played.ask(at)
    played.page.keyboard.press("ArrowLeft")
    before = played.ask(at)
    assert before < end
    played.page.keyboard.press("ArrowRight")
    assert played.ask(at) > before
    played.page.keyboard.press("Home")
    assert played.ask(at) < before and not played.ask("pipedecLive.state().playing")
    played.page.keyboard.press(" ")
    wait_for(played.page, "pipedecLive.state().playing")
    played.page.keyboard.press(" ")
    wait_for(played.page, "!pipedecLive.state().playing")
    with played.page.expect_download() as saved:
        played.page.keyboard.press("s")
    path = tmp_path / "saved.jsonl"
    saved.value.save_as(path)
    frames = [json.loads(line) for line in path.read_text().splitlines()]
    for run in {frame["run"] for frame in frames}:
        assert [frame for frame in frames if frame["run"] == run] == [frame for frame in recording() if frame["run"] == run]
    played.page.set_input_files("#file", path)
    wait_for(played.page, "pipedecLive.state().sources.length === 4")
    played.ask(END)
    texts = {source["run"]: source["requests"][0]["text"] for source in played.ask("pipedecLive.state().sources")}
    assert len(texts) == 4 and len(set(texts.values())) == 1, "all methods say the same"


@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (1280, "dark"), (2560, "light")])
def test_it_fits_and_is_accessible(browser: Any, recorded: FeedServer, width: int, scheme: str) -> None:
    opened = Opened(browser, f"{recorded.url}/live?recording=/recording.jsonl.gz&at=3", width, scheme)
    wait_for(opened.page, "pipedecLive.state().sources.length === 4")
    opened.ask("pipedecLive.pause()")
    wait_for(opened.page, "pipedecLive.stats().drawn > 0 && [...document.querySelectorAll('h2')].every((one) => one.textContent)")
    assert opened.ask("document.documentElement.scrollWidth") <= width
    assert violations(opened.page) == []
    assert opened.errors == []
    opened.close()


@pytest.mark.slow
def test_a_feed_that_breaks_is_taken_up_again(browser: Any) -> None:
    frames = list(long_feed(120))
    with FeedServer([frames[:60], frames]).serving() as server:
        opened = Opened(browser, f"{server.url}/live")
        wait_for(opened.page, "pipedecLive.state().sources.some((one) => one.t === 120)")
        assert server.connections == 2
        (request,) = opened.ask("pipedecLive.state().sources[0].requests")
        assert request["text"].endswith("119 120 ")
        assert opened.errors == []
        opened.close()


@pytest.mark.slow
def test_ten_thousand_timesteps_take_little_memory(browser: Any) -> None:
    with FeedServer([long_feed(10_000)]).serving() as server:
        opened = Opened(browser, f"{server.url}/live")
        wait_for(opened.page, "pipedecLive.state().sources.some((one) => one.t === 10000)")
        wait_for(opened.page, "pipedecLive.stats().kept <= 5000")  # they are forgotten in portions
        assert opened.ask("pipedecLive.state().sources[0].columns.length") <= 2_000
        session = opened.page.context.new_cdp_session(opened.page)
        session.send("HeapProfiler.collectGarbage")
        session.send("Performance.enable")
        metrics = {one["name"]: one["value"] for one in session.send("Performance.getMetrics")["metrics"]}
        assert metrics["JSHeapUsedSize"] < 64e6
        assert opened.errors == []
        opened.close()
