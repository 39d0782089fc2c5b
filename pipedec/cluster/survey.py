"""The doctor on every host of a cluster.yaml at once: a node on each is asked, in rounds, and has a deadline for each.

In the last round one link after the other is measured, so that none disturbs another.

Knows what the hosts are asked; what the answers mean is for ``doctor.comparison``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any

from pipedec import __version__
from pipedec.cluster.doctor.checks import HostReport
from pipedec.cluster.doctor.comparison import HostAnswer
from pipedec.cluster.doctor.facts import Questions
from pipedec.cluster.doctor.findings import Finding, note, problem
from pipedec.cluster.doctor.links import SESSION_SECONDS, MeasuredLink
from pipedec.cluster.doctor.needs import HostNeeds, checkpoint_path, host_needs
from pipedec.cluster.network import host_of_destination
from pipedec.cluster.node_link import News, NodeLink
from pipedec.config import NONE, ClusterConfig
from pipedec.core import UserError
from pipedec.hardware import MODEL_SHAPES
from pipedec.plan.partition import plan
from pipedec.plan.placement import rank_places
from pipedec.validation import validated

ANSWER_SECONDS = 90.0  # torch may be imported from a slow file system
MEASURE_SECONDS = SESSION_SECONDS + 5.0
END_SECONDS = 5.0


class Survey:
    """Nodes on all hosts of ``config``. A context manager, which ends them.

    Args:
        partition: that the hosts are to suit; None for the file's default, or none if it has none.

    Attributes:
        unplanned: why it is not known what the hosts need, or what is wrong with the plan.

    Raises:
        UserError: there is no such partition.
    """

    def __init__(self, config: ClusterConfig, partition: str | None = None, seconds: float = ANSWER_SECONDS) -> None:
        self._needs, self.unplanned = planned_needs(config, partition)
        with suppress(UserError):  # the file names no partition
            config = config.for_partition(partition)
        self._config = config
        self._seconds = seconds
        self._news: SimpleQueue[News] = SimpleQueue()
        self._links: dict[str, NodeLink] = {}

    def __enter__(self) -> Survey:
        launch = self._config.launch
        for server in self._config.servers:
            python = server.python or launch.python or sys.executable
            self._links[server.host] = NodeLink(server, python, launch.directory, self._news, None)
        return self

    def __exit__(self, *error: object) -> None:
        for link in self._links.values():
            link.end()
        deadline = time.monotonic() + END_SECONDS
        for link in self._links.values():
            link.wait(deadline)

    def answers(self) -> dict[str, HostAnswer]:
        """The answer of every host, by name; one that does not answer in time has an answer that says so."""
        for host, questions in questions_for(self._config, self._needs).items():
            environment = {**self._config.launch.environment, **self._config.server(host).environment}
            self._links[host].order("examine", questions=asdict(questions), environment=environment)
        answers = {host: _examined(news) for host, news in self._collect("examined", self._links).items()}
        places = {host: place for host, answer in answers.items() if (place := _place(answer)) is not None}
        able = [host for host, answer in answers.items() if answer.report is not None]
        for host in able:
            self._links[host].order("reach", places={other: place for other, place in places.items() if other != host})
        answers |= {host: _reached(answers[host], news) for host, news in self._collect("reached", able).items()}
        return {host: self._measured(host, answer, places) for host, answer in answers.items()}

    def _measured(self, host: str, answer: HostAnswer, places: Mapping[str, tuple[str, int]]) -> HostAnswer:
        """With the links from this host to those to which its ranks send."""
        if answer.report is None or (needs := self._needs.get(host)) is None or not needs.ranks:
            return answer
        lost = {target: "no answer from it" for target in needs.targets if target not in places} | dict(answer.unreachable)
        links = {
            target: MeasuredLink(error=lost[target]) if target in lost else self._measure(host, places[target])
            for target in needs.targets
        }
        return replace(answer, links=links)

    def _measure(self, host: str, place: tuple[str, int]) -> MeasuredLink:
        self._links[host].order("measure", address=place[0], port=place[1])
        news = self._collect("measured", [host], MEASURE_SECONDS)[host]
        return MeasuredLink(error=news.value) if isinstance(news, Finding) else validated(MeasuredLink, news["link"])

    def _collect(self, kind: str, hosts: Iterable[str], seconds: float | None = None) -> dict[str, dict[str, Any] | Finding]:
        """The next news of one kind from each host, with the time at which it came; or why there is none."""
        found: dict[str, dict[str, Any] | Finding] = {}
        seconds = self._seconds if seconds is None else seconds
        deadline = time.monotonic() + seconds
        while silent := [host for host in hosts if host not in found]:
            try:
                host, news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return {host: found.get(host) or self._late(host, seconds) for host in hosts}
            if host in silent and (heard := self._hear(host, news, kind)) is not None:
                found[host] = heard
        return {host: found[host] for host in hosts}

    def _hear(self, host: str, news: dict[str, Any] | None, kind: str) -> dict[str, Any] | Finding | None:
        """The news if it is of that kind, a finding if there will be none, else None."""
        match news:
            case None:
                reason, mend = self._links[host].reason_and_mend()
                return problem("ssh", reason, mend or f"run `pipedec doctor` on {host}")
            case {"news": "failed", "message": message}:
                return problem("ssh", message, f"run `pipedec doctor` on {host}")
            case {"news": "hello", "pipedec": version} if version != __version__:
                return problem("pipedec", f"{version}, but {__version__} here", f"install pipedec {__version__} there")
            case {"news": told} if told == kind:
                return news | {"received_us": time.time_ns() // 1000}
        return None

    def _late(self, host: str, seconds: float) -> Finding:
        destination = self._config.server(host).ssh_destination
        return problem("ssh", f"no answer within {seconds:.0f} s", f"look at the host: `ssh {destination} uptime`")


def _examined(news: dict[str, Any] | Finding) -> HostAnswer:
    if isinstance(news, Finding):
        return HostAnswer(failure=news)
    try:
        report = validated(HostReport, news["report"])
    except UserError as error:
        return HostAnswer(failure=problem("pipedec", f"an odd report ({error})", f"install pipedec {__version__} there again"))
    return HostAnswer(report, clock_offset_us=report.time_us - news["received_us"])


def _reached(answer: HostAnswer, news: dict[str, Any] | Finding) -> HostAnswer:
    return HostAnswer(failure=news) if isinstance(news, Finding) else replace(answer, unreachable=news["unreachable"])


def _place(answer: HostAnswer) -> tuple[str, int] | None:
    """Where the host listens."""
    network = answer.report.facts.network if answer.report is not None else None
    return (network.address, network.port) if network and network.address and network.port else None


def planned_needs(config: ClusterConfig, partition: str | None) -> tuple[dict[str, HostNeeds], Finding | None]:
    """The needs of each host for a partition, as far as the plan can be made here, and the fault of the plan.

    Raises:
        UserError: there is no partition of that name.
    """
    if partition is not None:
        config.find_partition(partition)
    try:
        planned = plan(config, partition)
        needs = host_needs(config, planned)
    except UserError as error:
        mend = "see `pipedec plan`: without a plan, free memory, links and parts of checkpoints are not examined"
        return {}, note("plan", str(error), mend)
    if planned.problems:
        return needs, problem("plan", "; ".join(planned.problems), f"see `pipedec plan --partition {planned.partition}`")
    return needs, None


def questions_for(config: ClusterConfig, needs: Mapping[str, HostNeeds]) -> dict[str, Questions]:
    """The questions for each host.

    Args:
        needs: of the hosts with ranks or spares; empty without a plan, when every host must have all checkpoints.
    """
    starts_redis = None if config.redis.url else _redis_host(config)
    models = tuple(map(checkpoint_path, _checkpoints(config))) if not needs else ()
    names = {server.host: host_of_destination(server.ssh_destination) for server in config.servers}
    return {
        server.host: Questions(
            redis_url=config.redis.connection_url,
            starts_redis=server.host == starts_redis,
            checkpoints=models,
            peers=tuple(name for host, name in names.items() if host != server.host),
            server=server,
            needs=needs.get(server.host),
        )
        for server in config.servers
    }


def _redis_host(config: ClusterConfig) -> str | None:
    """The host on which ``pipedec launch`` starts Redis, as far as the file determines it."""
    if config.redis.host is not None:
        return config.redis.host
    with suppress(UserError):
        return rank_places(config)[0].host
    return None


def _checkpoints(config: ClusterConfig) -> list[str]:
    """The checkpoints that the file and its partitions name."""
    every = [config.settings, *(partition.settings for partition in config.partitions.values())]
    models = [model for settings in every for model in (settings.models.target, settings.models.draft, settings.models.bita)]
    return list(dict.fromkeys(model for model in models if model and model not in (NONE, *MODEL_SHAPES)))
