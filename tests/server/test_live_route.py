"""The live feed over HTTP: one reader for all viewers, slow ones lose frames and are told, and nobody reads for nobody."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

from support.http_server import COMPLETIONS, Site, ask
from support.processes import wait_until

from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.live.page import Viewer
from pipedec.live.reading import GoingOn
from pipedec.scheduler import calls

FEED = "/live/feed"
PROMPT = "The pipeline is kept full"


class Viewing:
    """A viewer in a thread, from its first frame on."""

    def __init__(self, site: Site) -> None:
        self.frames: list[dict[str, Any]] = []
        self._site = site
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert wait_until(lambda: self.frames, 60)

    def _read(self) -> None:
        with self._site.client.stream("GET", FEED) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            for line in response.iter_lines():
                if line.startswith("data: "):
                    self.frames += json.loads(line[6:])
                if self._ends.is_set():
                    return

    def has(self, kind: str) -> bool:
        return any(frame["k"] == kind for frame in list(self.frames))

    def end(self) -> None:
        self._ends.set()  # a frame of figures comes every second
        self._thread.join(60)


def said_in(frame: dict[str, Any]) -> str:
    """What a frame says of the only answer: rank 0 may have learned of its viewers after the first tokens."""
    return frame.get("said", "") + "".join(verdict["text"] for verdict in frame.get("out", ()))


def is_silent_in_the_end(site: Site, cluster: LocalCluster) -> bool:
    """Whether rank 0 hears, as it does about once a second, that nobody watches any more, and then publishes nothing."""
    scheduler = cluster.scheduler
    assert scheduler is not None
    assert wait_until(lambda: not scheduler.client.exists(scheduler.keys.watchers), 60)

    def is_silent() -> bool:
        position = scheduler.ask(calls.live_position(scheduler.keys))
        ask(site, COMPLETIONS, prompt=PROMPT, max_tokens=8)
        return scheduler.ask(calls.live_position(scheduler.keys)) == position

    return wait_until(is_silent, 60)


def test_two_viewers_see_an_answer_as_it_is_said(cluster_site: Site, resident: LocalCluster) -> None:
    assert is_silent_in_the_end(cluster_site, resident), "of those who watched it in other tests"
    first = Viewing(cluster_site)
    second = Viewing(cluster_site)
    said = ask(cluster_site, COMPLETIONS, prompt=PROMPT, max_tokens=40, temperature=0, ignore_eos=True)["choices"][0]["text"]
    for viewing in (first, second):
        assert wait_until(lambda viewing=viewing: viewing.has("close"), 60)
        viewing.end()
        assert "".join(map(said_in, viewing.frames)).rstrip("\ufffd") == said
        assert {frame["run"] for frame in viewing.frames} == {resident.run_id}
        kinds = [frame["k"] for frame in viewing.frames]
        assert kinds.index("run") < kinds.index("open") < kinds.index("step")
    (figures, *_) = [frame for frame in first.frames if frame["k"] == "stats"]
    assert figures["epoch"] == 0 and 0 <= figures["kv"] <= 1


def test_nothing_is_published_when_nobody_watches(cluster_site: Site, resident: LocalCluster) -> None:
    viewing = Viewing(cluster_site)
    viewing.end()
    assert is_silent_in_the_end(cluster_site, resident)


def test_who_watches_by_the_client_sees_the_same(cluster_site: Site, resident: LocalCluster) -> None:
    assert resident.scheduler is not None
    frames = Client(resident.scheduler, resident.check).live()
    assert next(frames)["k"] == "stats"
    said = ask(cluster_site, COMPLETIONS, prompt=PROMPT, max_tokens=30, temperature=0, ignore_eos=True)["choices"][0]["text"]
    text = ""
    for frame in frames:
        text += said_in(frame)
        if frame["k"] == "close":
            break
    assert text.rstrip("\ufffd") == said


def test_the_feed_needs_a_key_and_the_pages_do_not(cluster_site: Site) -> None:
    assert cluster_site.client.get(FEED, headers={"Authorization": "Bearer other"}).status_code == 401
    for path, title in (("/", "pipedec chat"), ("/live", "pipedec live")):
        page = cluster_site.client.get(path, headers={"Authorization": ""})
        assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
        assert f"<title>{title}</title>" in page.text
        policy = page.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "frame-src 'self'", "frame-ancestors 'self'"} <= set(policy)


def test_a_slow_viewer_loses_frames_and_is_told_how_many() -> None:
    async def lag() -> tuple[list[Any], int]:
        viewer = Viewer(GoingOn())
        for number in range(130):
            viewer.put([{"k": "step", "number": number}, {"k": "stats"}])
        return await viewer.pop_frames()

    frames, dropped = asyncio.run(lag())
    assert dropped == 256 and [frame.get("number") for frame in frames] == [128, None, 129, None]


def test_who_has_lost_frames_or_comes_late_is_told_what_is_going_on_and_nobody_else() -> None:
    async def lag() -> None:
        going_on = GoingOn()
        slow, quick = Viewer(going_on), Viewer(going_on)

        def come(*frames: dict[str, Any]) -> None:
            slow.put(frames)
            quick.put(frames)
            going_on.on_frames(frames)

        come({"k": "run"}, {"k": "open", "r": 1, "said": "it says "}, {"k": "open", "r": 2, "said": ""})
        for number in range(100):
            come({"k": "step", "out": [{"r": 1, "text": f"{number} "}]})
            assert number or (await quick.pop_frames())[1] == 0
            await quick.pop_frames()
        come({"k": "close", "r": 2})
        whole = "it says " + "".join(f"{number} " for number in range(100))
        frames, dropped = await slow.pop_frames()
        assert dropped > 64 and [frame["k"] for frame in frames[:3]] == ["run", "open", "open"]
        assert frames[1]["said"] + "".join(map(said_in, frames[2:])) == whole
        assert (await Viewer(going_on).pop_frames())[0] == [{"k": "run"}, {"k": "open", "r": 1, "said": whole}]
        assert [frame["k"] for frame in (await quick.pop_frames())[0]] == ["close"]

    asyncio.run(lag())
