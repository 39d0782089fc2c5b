"""The doctor on every host of a cluster.yaml at once: a node on each is asked, in two rounds, and has a deadline for each.

Knows what the hosts are asked; what the answers mean is for ``doctor.comparison``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from pipedec import __version__
from pipedec.cluster.doctor.checks import HostReport
from pipedec.cluster.doctor.comparison import Answer
from pipedec.cluster.doctor.facts import Questions
from pipedec.cluster.doctor.findings import Finding, problem
from pipedec.cluster.network import host_of_destination
from pipedec.cluster.node_link import News, NodeLink
from pipedec.config import NONE, ClusterConfig
from pipedec.core import UserError
from pipedec.gguf import is_named
from pipedec.hardware import MODEL_SHAPES
from pipedec.plan.placement import rank_places
from pipedec.validation import validated

ANSWER_SECONDS = 90.0  # torch may be imported from a slow file system
END_SECONDS = 5.0


class Survey:
    """Nodes on all hosts of ``config``. A context manager, which ends them."""

    def __init__(self, config: ClusterConfig, seconds: float = ANSWER_SECONDS) -> None:
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

    def answers(self) -> dict[str, Answer]:
        """The answer of every host, by name; one that does not answer in time has an answer that says so."""
        for host, questions in questions_for(self._config).items():
            environment = {**self._config.launch.environment, **self._config.server(host).environment}
            self._links[host].order("examine", questions=asdict(questions), environment=environment)
        answers = {host: _examined(news) for host, news in self._collect("examined", self._links).items()}
        places = {host: place for host, answer in answers.items() if (place := _place(answer)) is not None}
        able = [host for host, answer in answers.items() if answer.report is not None]
        for host in able:
            self._links[host].order("reach", places={other: place for other, place in places.items() if other != host})
        return answers | {host: _reached(answers[host], news) for host, news in self._collect("reached", able).items()}

    def _collect(self, kind: str, hosts: Iterable[str]) -> dict[str, dict[str, Any] | Finding]:
        """The next news of one kind from each host, with the time at which it came; or why there is none."""
        found: dict[str, dict[str, Any] | Finding] = {}
        deadline = time.monotonic() + self._seconds
        while silent := [host for host in hosts if host not in found]:
            try:
                host, news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                return {host: found.get(host) or self._late(host) for host in hosts}
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

    def _late(self, host: str) -> Finding:
        destination = self._config.server(host).ssh_destination
        return problem("ssh", f"no answer within {self._seconds:.0f} s", f"look at the host: `ssh {destination} uptime`")


def _examined(news: dict[str, Any] | Finding) -> Answer:
    if isinstance(news, Finding):
        return Answer(failure=news)
    try:
        report = validated(HostReport, news["report"])
    except UserError as error:
        return Answer(failure=problem("pipedec", f"an odd report ({error})", f"install pipedec {__version__} there again"))
    return Answer(report, clock_offset_us=report.time_us - news["received_us"])


def _reached(answer: Answer, news: dict[str, Any] | Finding) -> Answer:
    return Answer(failure=news) if isinstance(news, Finding) else replace(answer, unreachable=news["unreachable"])


def _place(answer: Answer) -> tuple[str, int] | None:
    """Where the host listens."""
    network = answer.report.facts.network if answer.report is not None else None
    return (network.address, network.port) if network and network.address and network.port else None


def questions_for(config: ClusterConfig) -> dict[str, Questions]:
    """What each host is asked."""
    starts_redis = None if config.redis.url else _redis_host(config)
    models = tuple(model if is_named(model) else str(Path(model).absolute()) for model in _checkpoints(config))
    names = {server.host: host_of_destination(server.ssh_destination) for server in config.servers}
    return {
        server.host: Questions(
            redis_url=config.redis.connection_url,
            starts_redis=server.host == starts_redis,
            checkpoints=models,
            peers=tuple(name for host, name in names.items() if host != server.host),
            server=server,
        )
        for server in config.servers
    }


def _redis_host(config: ClusterConfig) -> str | None:
    """Where ``pipedec launch`` starts Redis, as far as the file tells."""
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
