"""The doctor on every host of a cluster.yaml at once: nodes answer questions in rounds, each with a deadline. In the last round
the links are measured and pairs of GPUs tried, one after the other, so that none disturbs another.

Does not know what the answers mean (``doctor.comparison``).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from queue import Empty, SimpleQueue
from typing import Any

from msgspec import convert

from pipedec import __version__
from pipedec.checkpoints.download import pinned
from pipedec.cluster.doctor.comparison import HostAnswer
from pipedec.cluster.doctor.findings import Finding, note, problem
from pipedec.cluster.doctor.host import HostReport, Questions
from pipedec.cluster.doctor.links import MEASURE_SECONDS, Measured
from pipedec.cluster.doctor.needs import HostNeeds, checkpoint_path, host_needs
from pipedec.cluster.doctor.pairs import FAR_SECONDS, START_SECONDS, GpuPair
from pipedec.cluster.network import host_of_destination
from pipedec.cluster.node_link import News, NodeLink, end_links
from pipedec.config import NONE, ClusterConfig
from pipedec.core.errors import PipedecError, UserError
from pipedec.families import is_known
from pipedec.plan.partition import plan
from pipedec.plan.placement import rank_places
from pipedec.validation import validated

ANSWER_SECONDS = 90.0  # torch may be imported from a slow file system
ANSWER_OF_LINKS_SECONDS = 2 * MEASURE_SECONDS
ANSWER_OF_PAIRS_SECONDS = START_SECONDS + FAR_SECONDS + 10.0
END_SECONDS = 5.0


class Survey:
    """Nodes on all hosts of ``config``, which end with the ``with`` block. The hosts are examined for ``partition``: None for the
    file's default, if it has one. Raises UserError if there is no such partition.

    Attributes:
        unplanned: why it is unknown what the hosts need, or what is wrong with the plan; None if nothing is.
    """

    def __init__(self, config: ClusterConfig, partition: str | None = None) -> None:
        self._needs, self.unplanned = planned_needs(config, partition)
        with suppress(UserError):  # the file names no partition
            config = config.for_partition(partition)
        self._config = config
        self._news: SimpleQueue[News] = SimpleQueue()
        self._links: dict[str, NodeLink] = {}
        self._measurements = 0

    def __enter__(self) -> Survey:
        for server in self._config.servers:
            self._links[server.host] = NodeLink(server, self._config.launch, self._news)
        return self

    def __exit__(self, *error: object) -> None:
        end_links(self._links.values(), END_SECONDS)

    def answers(self) -> dict[str, HostAnswer | Finding]:
        """The answer of every host, by name; for a host that does not answer in time, the problem."""
        for host, questions in questions_for(self._config, self._needs).items():
            environment = {**self._config.launch.environment, **self._config.server(host).environment}
            self._links[host].order("examine", questions=asdict(questions), environment=environment)
        found = self._collect("examined", self._links, ANSWER_SECONDS)
        answers = {host: news if isinstance(news, Finding) else _examined(news) for host, news in found.items()}
        answered = {host: answer for host, answer in answers.items() if isinstance(answer, HostAnswer)}
        reports = {host: answer.report for host, answer in answered.items()}
        places = {host: (one.address, one.port) for host, one in reports.items() if one.address and one.port}
        for host in reports:
            self._links[host].order("reach", places={other: place for other, place in places.items() if other != host})
        for host, news in self._collect("reached", reports, ANSWER_SECONDS).items():
            if isinstance(news, Finding):
                answers[host] = news
            else:
                answers[host] = self._measured(host, replace(answered[host], unreachable=news["unreachable"]), places)
        return answers

    def _measured(self, host: str, answer: HostAnswer, places: Mapping[str, tuple[str, int]]) -> HostAnswer:
        """Add the links from this host to those to which its ranks send."""
        if (needs := self._needs.get(host)) is None or not needs.ranks:
            return answer
        lost = {target: "no answer from it" for target in needs.targets if target not in places} | dict(answer.unreachable)
        links: dict[str, Measured] = {}
        for target in needs.targets:
            if target in lost or host not in places:
                links[target] = lost.get(target, "no port could be opened")
                continue
            self._measurements += 1
            for rank, end in enumerate((host, target)):
                address, port = places[host]
                self._links[end].order("measure", rank=rank, address=address, port=port, number=self._measurements)
            news = self._collect("measured", [host, target], ANSWER_OF_LINKS_SECONDS)[host]
            links[target] = news.value if isinstance(news, Finding) else convert(news["link"], Measured)
        tried = [pair for pair in needs.pairs if answer.report.gpus and pair.host not in lost]
        pairs = {pair: self._tried(host, pair, places) for pair in tried}
        return replace(answer, links=links, pairs=pairs)

    def _tried(self, host: str, pair: GpuPair, places: Mapping[str, tuple[str, int]]) -> str | None:
        """Why the GPUs of two stages, the first of which is on ``host``, do not exchange messages; None if they do."""
        address, port = places.get(host, ("", 0))
        first, second = f"cuda:{pair.index}", f"cuda:{pair.other_index}"
        ends = {host: [first, second]} if pair.host is None else {host: [first], pair.host: [second]}
        self._measurements += 1
        for rank, (end, devices) in enumerate(ends.items()):
            self._links[end].order("try pair", devices=devices, rank=rank, address=address, port=port, number=self._measurements)
        found = self._collect("tried", ends, ANSWER_OF_PAIRS_SECONDS)
        reasons = [news.value if isinstance(news, Finding) else news["reason"] for news in found.values()]
        return next((reason for reason in reasons if reason is not None), None)

    def _collect(self, kind: str, hosts: Iterable[str], seconds: float) -> dict[str, dict[str, Any] | Finding]:
        """The next news of one kind from each host, with the time at which it came; or why there is none."""
        found: dict[str, dict[str, Any] | Finding] = {}
        deadline = time.monotonic() + seconds
        while silent := [host for host in hosts if host not in found]:
            try:
                host, news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                for host in silent:
                    look = f"look at the host: `ssh {self._config.server(host).ssh_destination} uptime`"
                    found[host] = problem("ssh", f"no answer within {seconds:.0f} s", look)
                break
            if host not in silent:
                continue
            match news:
                case None:
                    reason, mend = self._links[host].reason_and_mend()
                    found[host] = problem("ssh", reason, mend or f"run `pipedec doctor` on {host}")
                case {"news": "failed", "message": message}:
                    found[host] = problem("ssh", message, f"run `pipedec doctor` on {host}")
                case {"news": "hello", "pipedec": version} if version != __version__:
                    found[host] = problem("pipedec", f"{version}, but {__version__} here", f"install pipedec {__version__} there")
                case {"news": found_kind} if found_kind == kind:
                    found[host] = news | {"received_us": time.time_ns() // 1000}
        return {host: found[host] for host in hosts}


def _examined(news: Mapping[str, Any]) -> HostAnswer | Finding:
    try:
        report = validated(HostReport, news["report"])
    except UserError as error:
        return problem("pipedec", f"an odd report ({error})", f"install pipedec {__version__} there again")
    return HostAnswer(report, clock_offset_us=report.time_us - news["received_us"])


def planned_needs(config: ClusterConfig, partition: str | None) -> tuple[dict[str, HostNeeds], Finding | None]:
    """The needs of each host for a partition as far as it can be planned here, and the fault of the plan. Raises UserError
    if there is no such partition.
    """
    if partition is not None:
        config.find_partition(partition)
    try:
        config = config.for_partition(partition)
        config = config.for_partition(given=pinned(config.settings.models, sizes_only=True))
        planned = plan(config)
        needs = host_needs(config, planned)
    except PipedecError as error:  # the hub does not answer, too
        mend = "see `pipedec plan`: without a plan, free memory, links and parts of checkpoints are not examined"
        return {}, note("plan", str(error), mend)
    if planned.problems:
        return needs, problem("plan", "; ".join(planned.problems), f"see `pipedec plan --partition {planned.partition}`")
    return needs, None


def questions_for(config: ClusterConfig, needs: Mapping[str, HostNeeds]) -> dict[str, Questions]:
    """The questions for each host. Without ``needs``, as without a plan, every host must have all checkpoints."""
    redis_host = config.redis.host  # on which ``pipedec launch`` starts Redis, as far as the file determines it
    if redis_host is None and config.redis.url is None:
        with suppress(UserError):
            redis_host = rank_places(config)[0].host
    models: dict[str, None] = {}  # all that the file and its partitions name
    for settings in () if needs else (config.settings, *(partition.settings for partition in config.partitions.values())):
        for model in (settings.models.target, settings.models.draft, settings.models.bita):
            if model and model != NONE and not is_known(model):
                models[checkpoint_path(model)] = None
    names = {server.host: host_of_destination(server.ssh_destination) for server in config.servers}
    return {
        server.host: Questions(
            redis_url=config.redis.connection_url,
            starts_redis=server.host == redis_host and config.redis.url is None,
            checkpoints=tuple(models),
            peers=tuple(name for host, name in names.items() if host != server.host),
            server=server,
            needs=needs.get(server.host),
        )
        for server in config.servers
    }
