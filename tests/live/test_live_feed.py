"""What a live feed tells of requests: rows, verdicts and prunes as the stages have them, text as the answer has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from support.tiny_pair import SENTENCES, Pair

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import Request
from pipedec.engine.local import LocalPipeline
from pipedec.live.feed import LiveFeed
from pipedec.live.reading import Frame
from pipedec.methods import METHOD_NAMES
from pipedec.text.prompt import Prompter

STAGES = 3


class Followed:
    """What a viewer knows of one request from its frames, with everything checked that frames promise."""

    def __init__(self) -> None:
        self.text = ""
        self.tokens: list[int] = []
        self.in_flight: dict[int, list[Any]] = {}  # rows by id
        self.root: int | None = None
        self.carried = 0  # tokens by rows in flight
        self._next_id = 0

    def enter(self, entered: Frame) -> None:
        for row in entered["rows"]:
            id, parent, _, _, chance = row[:5]
            assert id == self._next_id
            self._next_id += 1
            assert parent == -1 or parent in self.in_flight
            assert chance is None or 0 <= chance <= 1
            if parent == -1:
                self.in_flight.clear()
                self.root = id
            self.in_flight[id] = row

    def accept(self, verdict: Frame) -> None:
        above, carried = self.root, set[int]()
        for token, _, row in verdict["tokens"]:
            if row is not None:
                assert self.in_flight[row][1] == above and self.in_flight[row][2] == token
                carried.add(row)
            above = row
        gone = set(verdict["pruned"])
        assert gone <= self.in_flight.keys() and not gone & carried
        path = {self.root, *carried} - {above}
        self.in_flight = {id: row for id, row in self.in_flight.items() if id not in gone and id not in path}
        if above is not None:
            self.in_flight[above][1] = -1
        assert (above is None) == (not self.in_flight), "after a miss nothing is in flight, after a hit the subtree is"
        assert verdict["end"] is None or len(self.in_flight) <= 1
        self.root = above
        self.tokens += [token for token, _, _ in verdict["tokens"]]
        self.text += verdict["text"]
        self.carried += len(carried) - (verdict["end"] is not None and above is not None)  # nothing follows the last token
        assert verdict["hit"] == (above is not None)


def follow(frames: Sequence[Frame]) -> dict[int, Followed]:
    followed: dict[int, Followed] = {}
    timestep = 0
    for frame in frames:
        if frame["k"] == "open":
            followed[frame["r"]] = Followed()
        if frame["k"] == "step":
            assert frame["t"] > timestep
            timestep = frame["t"]
            for entered in frame["in"]:
                followed[entered["r"]].enter(entered)
            for verdict in frame["out"]:
                followed[verdict["r"]].accept(verdict)
    return followed


class Watched:
    """A pipeline with a feed."""

    def __init__(self, pair: Pair, is_watched: bool = True, **changes: Any) -> None:
        spec = replace(pair.spec(STAGES), **changes)
        self.pipeline, self.frames = LocalPipeline.load(spec), list[Frame]()
        self.prompter = Prompter(pair.target, 2048)
        about = {"run": "here", "epoch": 0, "stages": STAGES, "groups": STAGES, "target": "t", "draft": "d"}
        self.feed = LiveFeed(about, self.prompter.text, self._said, self.frames.extend)
        if is_watched:
            self.watch()

    def watch(self, watcher: str = "somebody") -> None:
        self.feed.follow(watcher, self.pipeline.scheduler, len(self.pipeline.fill))

    def _said(self, request: Request) -> str:
        return self.text(self.pipeline.answers[request.number].token_ids)

    def ask(self, *requests: TokenizedRequest) -> dict[int, Followed]:
        for _ in self.pipeline.run_all({1 + 3 * place: [request] for place, request in enumerate(requests)}):
            continue
        return follow(self.frames)

    def text(self, token_ids: Sequence[int]) -> str:
        return self.prompter.text(token_ids).rstrip("\ufffd")

    def request(self, number: int, method: str, **sampling: Any) -> TokenizedRequest:
        prompt = self.prompter.token_ids(SENTENCES[number % len(SENTENCES)], True, 24)
        return TokenizedRequest(number, prompt, SamplingParams(max_tokens=24, ignore_eos=True, **sampling), method)


@pytest.fixture(scope="module")
def watched(pair: Pair) -> Watched:
    return Watched(pair)


@pytest.mark.fast_cases("pipedec-bestfirst")
@pytest.mark.parametrize("method", METHOD_NAMES)
def test_rows_verdicts_and_text_are_those_of_the_answer(pair: Pair, method: str) -> None:
    watched = Watched(pair)
    followed = watched.ask(watched.request(0, method))[0]
    answer = watched.pipeline.last
    assert followed.tokens == answer.token_ids and followed.text == watched.text(answer.token_ids)
    assert [frame["k"] for frame in watched.frames[:2]] == ["run", "open"] and watched.frames[-1]["k"] == "close"
    assert watched.frames[-1]["metrics"] == {"hits": answer.metrics.hits, "misses": answer.metrics.misses}
    assert followed.carried == answer.metrics.hits


def test_requests_in_company_are_told_apart(pair: Pair) -> None:
    watched = Watched(pair)
    followed = watched.ask(*(watched.request(number, "pipedec-bestfirst") for number in range(3)))
    answers = watched.pipeline.answers
    assert {number: one.tokens for number, one in followed.items()} == {n: one.token_ids for n, one in answers.items()}


def test_who_begins_to_watch_is_told_what_runs_and_knows_all_rows_from_the_next_miss_on(pair: Pair) -> None:
    watched = Watched(pair, is_watched=False)
    request = watched.request(0, "pipedec")
    for place, _ in enumerate(watched.pipeline.run_all({1: [request]})):
        assert place > 5 or not watched.frames
        if place == 5:
            watched.watch()
    run, opened, *rest = watched.frames
    answer = watched.pipeline.last
    assert (run["k"], opened["k"], opened["said"]) == ("run", "open", watched.text(answer.token_ids[:6]))
    texts = [verdict["text"] for frame in rest if frame["k"] == "step" for verdict in frame["out"]]
    assert opened["said"] + "".join(texts) == watched.text(answer.token_ids)
    roots = [row for frame in rest if frame["k"] == "step" for one in frame["in"] for row in one["rows"] if row[1] == -1]
    assert roots


def test_who_begins_to_watch_beside_others_is_told_what_runs_and_no_row_has_two_numbers(pair: Pair) -> None:
    watched = Watched(pair)
    for place, _ in enumerate(watched.pipeline.run_all({1: [watched.request(0, "pipedec")]})):
        if place == 5:
            watched.watch("somebody else")
    assert [frame["k"] for frame in watched.frames if frame["k"] != "step"] == ["run", "open", "run", "open", "close"]
    steps = [frame for frame in watched.frames if frame["k"] == "step"]
    assert [frame["t"] for frame in steps] == list(range(1, len(watched.pipeline.fill) + 1))
    numbers = [row[0] for frame in steps for one in frame["in"] for row in one["rows"]]
    assert numbers == list(range(len(numbers)))


def test_nobody_watches_and_nothing_is_built(pair: Pair) -> None:
    watched = Watched(pair, is_watched=False)
    asked = len(watched.pipeline.scheduler.listeners)
    watched.ask(watched.request(0, "pipedec-bestfirst"))
    assert watched.frames == []
    watched.watch()
    assert [frame["k"] for frame in watched.frames] == ["run"] and len(watched.pipeline.scheduler.listeners) == asked + 1
    watched.watch("")
    assert len(watched.pipeline.scheduler.listeners) == asked, "it costs nothing any more"
