"""The part *processes*: what real processes say, count and send to each other, in clusters of the shipped pair in four stages.

In each kind of cluster every method answers one request after the other, greedy and drawn; then eight requests come at once, and
then, in two kinds, a rank is killed in the middle of an answer, at a message that is counted beforehand. Left out is what depends
on who comes first (limits are fixed, so nothing depends on measured times):

- all but the tokens of requests in company: at which timestep one arrives is a race;
- counters of answers that were interrupted: what was in flight on other ranks is lost with the epoch.

Calls of Redis are a report: ranks renew their leases as time goes by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from support.prepared_ranks import PreparedRanks
from support.processes import wait_until

from golden.counted_links import count, kill_after, sent
from golden.record import PROCESSOR, ROUNDED
from golden.schedule import processor
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.config import Settings
from pipedec.core.completion import Completion
from pipedec.core.sampling import SamplingParams
from pipedec.directories import reference_pair
from pipedec.engine.build import resolve
from pipedec.messages.request import PromptRequest
from pipedec.plan.spec import PipelineSpec

STAGES = 4
KINDS: dict[str, Callable[[PipelineSpec], PipelineSpec]] = {
    "full duplex": lambda spec: spec,
    "half duplex": lambda spec: replace(spec, duplex="half"),
    "tasks": lambda spec: spec.replaced(dispatch="tasks"),
}
KILLED_IN = ("full duplex", "tasks")
LENGTH = 20
# Each greedy token leads by 0.04 or more, so that no processor's rounding changes it.
PROMPTS = (
    "A baker makes 24 rolls every morning and sells each for $2. How much does he earn in 5 days?",
    "Natalia sold 12 clips in April and twice as many in May. How many clips did she sell altogether?",
)
SAMPLING = {"greedy": SamplingParams(max_tokens=LENGTH), "drawn": SamplingParams(0.8, seed=7, max_tokens=LENGTH)}
OPTIONS: dict[str, dict[str, Any]] = {
    "pp": {},
    "stpp": {"width": 4, "children": 4, "depth": 3},
    "pipedec": {"width": 8, "children": 4},
    "bita": {},
    "pipedec-bestfirst": {"width": 6, "children": 4, "forwards": 2},
}
DRAFTED = tuple(method for method in OPTIONS if method != "pp")  # what they propose is rounded, so it is of a kind of processor
COMPANY = list(product(OPTIONS, SAMPLING))[:8]
KILLED = {"stage 2": (2, "pipedec", "greedy"), "rank 0": (0, "pipedec-bestfirst", "drawn")}
MESSAGES_BEFORE_DEATH = 16  # of about 30 that a rank sends for such an answer


class Recorded:
    """A running cluster whose ranks count what they send."""

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        assert cluster.scheduler is not None
        self._scheduler, self._folder = cluster.scheduler, folder
        self._client = Client(cluster.scheduler, cluster.check, silence_seconds=60)
        self._timesteps = 0
        self._calls = self._calls_so_far()

    def alone(self, method: str, sampling: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """Answer one request. Returns its tokens and finish reason, and its counters and messages."""
        before = sent(self._folder)
        completion = self._client.ask(_request(method, sampling))
        self._await_end()
        self._timesteps += completion.metrics.timesteps
        links = sent(self._folder)
        links.subtract(before)
        return _said(completion), _counted(completion) | {"links": _by_link(links)}

    def in_company(self) -> list[dict[str, Any]]:
        replies = [
            self._client.submit(_request(method, sampling, PROMPTS[index % len(PROMPTS)]))
            for index, (method, sampling) in enumerate(COMPANY)
        ]
        while not all(reply.has_ended for reply in replies):
            self._client.read()
        self._await_end()
        return [_said(reply.completed()) for reply in replies]

    def killed(self, rank: int, method: str, sampling: str) -> dict[str, Any]:
        kill_after(self._folder, rank, MESSAGES_BEFORE_DEATH)
        completion = self._client.ask(_request(method, sampling))
        assert wait_until(lambda: not self._scheduler.status().is_recovering, 60)
        recovery = self._scheduler.status().recoveries[-1]
        told = {"recoveries": completion.metrics.recoveries, "lost": list(recovery.lost), "reason": recovery.reason}
        return _said(completion) | told | {"epoch": self._scheduler.status().epoch}

    def calls_per_timestep(self) -> dict[str, float]:
        """Commands that Redis carried out while requests were answered alone, those within scripts included."""
        calls = self._calls_so_far() - self._calls
        return {name: round(count / self._timesteps, 2) for name, count in sorted(calls.items()) if count > self._timesteps / 20}

    def _calls_so_far(self) -> Counter[str]:
        stats: Any = self._scheduler.client.info("commandstats")
        return Counter({name.removeprefix("cmdstat_"): values["calls"] for name, values in stats.items()})

    def _await_end(self) -> None:
        """Every rank has reported the end of the task graph, so that the next request begins a graph of its own."""
        client, graph = self._scheduler.client, self._scheduler.keys.workflow
        assert wait_until(lambda: client.hget(graph, "running") == b"0", 60)


def make(scratch: Path, kinds: Iterable[str] = KINDS) -> dict[str, Any]:
    cases: dict[str, Any] = {PROCESSOR: processor()}
    for kind in kinds:
        folder = scratch / kind.replace(" ", "-")
        folder.mkdir()
        with _running(kind, folder) as recorded:
            for method, sampling in product(OPTIONS, SAMPLING):
                said, counted = recorded.alone(method, sampling)
                cases[name := f"{kind}, {method}, {sampling}"] = said
                cases[ROUNDED + name if method in DRAFTED else f"{name}, counted"] = counted
            cases[f"report: {kind}, calls of Redis per timestep"] = recorded.calls_per_timestep()
            cases[f"{kind}, eight in company"] = recorded.in_company()
            for victim, (rank, method, sampling) in KILLED.items() if kind in KILLED_IN else ():
                cases[f"{kind}, {victim} is killed"] = recorded.killed(rank, method, sampling)
    return cases


@contextmanager
def _running(kind: str, folder: Path) -> Iterator[Recorded]:
    pair = reference_pair()
    models = {"target": pair / "target", "draft": pair / "draft", "bita": pair / "bita"}
    settings = Settings.of(**models, draft_dtype="float32", dtype="float32", device="cpu", priors=False)
    spec = KINDS[kind](resolve(settings)).replaced(transport=PreparedRanks("gloo", count, folder))
    with LocalCluster(spec) as cluster:
        yield Recorded(cluster, folder)


def _request(method: str, sampling: str, prompt: str = PROMPTS[0]) -> PromptRequest:
    return PromptRequest(prompt, False, method, SAMPLING[sampling], OPTIONS[method])


def _said(completion: Completion) -> dict[str, Any]:
    return {"tokens": completion.token_ids, "finish": completion.finish_reason}


def _counted(completion: Completion) -> dict[str, Any]:
    metrics = completion.metrics
    names = ("timesteps", "hits", "misses", "draft_tokens", "cached_tokens", "pauses")
    return {name: getattr(metrics, name) for name in names}


def _by_link(counts: Counter[tuple[str, str]]) -> dict[str, Any]:
    """For each link, messages and bytes."""
    links = sorted({link for (link, _), count in counts.items() if count})
    return {link: [counts[link, "messages"], counts[link, "bytes"]] for link in links}
