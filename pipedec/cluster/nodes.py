"""The launcher's side of a cluster's nodes, and through them of its ranks: connecting, orders, reports, ends.

Knows which host each rank is on. Loads no torch.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from queue import Empty, SimpleQueue
from typing import IO, Any

from pipedec import __version__
from pipedec.cluster.network import host_of_destination
from pipedec.cluster.node import PROTOCOL
from pipedec.cluster.node_link import News, NodeLink, end_links, is_local
from pipedec.cluster.node_run import LaunchedRun
from pipedec.cluster.processes import describe_exit
from pipedec.config import ClusterConfig, RedisConfig
from pipedec.config.environment import RANK_ENVIRONMENT, common_environment
from pipedec.core.errors import PipedecError, UserError
from pipedec.messages.stats import Recovery
from pipedec.plan.placement import Placement
from pipedec.validation import validated

CONNECT_SECONDS = 15.0
REDIS_SECONDS = 15.0
FETCH_SECONDS = 120.0  # without news of a download
JOIN_SECONDS = 60.0  # nodes read the headers of checkpoints, perhaps over a network
WATCH_SECONDS = 15.0
END_SECONDS = 6.0
ShowHost = Callable[[str, int, int], None]
_LOST = -signal.SIGHUP  # exit status of a rank that was lost with its host


class Nodes:
    """One node per host of a partition, and its ranks, which a supervisor handles as those of ``RankProcesses``.

    Attributes:
        host_of: the host of each rank: as its node has last reported it, else as planned.
    """

    def __init__(self, config: ClusterConfig, places: Sequence[Placement], spares: Sequence[Placement] = ()) -> None:
        self._config = config
        self._spare_hosts = [place.host for place in spares]
        self.host_of = {rank: place.host for rank, place in enumerate(places)}
        self._links: dict[str, NodeLink] = {}
        self._news: SimpleQueue[News] = SimpleQueue()
        self._pids: dict[int, int] = {}
        self._statuses: dict[int, int] = {}
        self._lost: dict[str, str] = {}  # hosts whose node has ended, and why
        self._reports: list[tuple[int, Any]] = []
        self._recoveries: list[Recovery] = []
        self._over: set[str] = set()  # hosts whose part in the run has ended in order

    @property
    def hosts(self) -> list[str]:
        """Hosts with a rank, a spare or Redis, in the order of their first ranks."""
        more = [self._config.redis.host] if self._config.redis.host else []
        return list(dict.fromkeys([*self.host_of.values(), *self._spare_hosts, *more]))

    def ranks_on(self, host: str) -> list[int]:
        return [rank for rank, its_host in self.host_of.items() if its_host == host]

    def environment(self, host: str) -> dict[str, str]:
        """The variables of a host's ranks; GPUs are numbered as by ``nvidia-smi`` unless the file sets another order."""
        server, passed_on = self._config.server(host), common_environment()
        if server.interface is not None:  # the file knows the host better than the launching shell does
            passed_on = {name: value for name, value in passed_on.items() if not name.endswith("_SOCKET_IFNAME")}
        usual = {"CUDA_DEVICE_ORDER": RANK_ENVIRONMENT["CUDA_DEVICE_ORDER"]}
        return {**usual, **passed_on, **self._config.launch.environment, **server.environment}

    def connect(self, log: IO[str] | None, seconds: float = CONNECT_SECONDS) -> None:
        """Start all nodes at once, let them begin to import torch, and compare their versions with this one's. Raises
        PipedecError if a host cannot be used or does not answer within ``seconds``; it names the host, the reason and a remedy.
        """
        for host in self.hosts:
            self._links[host] = NodeLink(self._config.server(host), self._config.launch, self._news, log)
            self._links[host].order("prepare", environment=self.environment(host))
        for host, hello in self._await("hello", self.hosts, seconds).items():
            python = self._links[host].python
            if hello["pipedec"] != __version__ or hello["protocol"] != PROTOCOL:
                raise UserError(
                    f"{host}: {python} has pipedec {hello['pipedec']} (protocol {hello['protocol']}), but here it is "
                    f"{__version__} (protocol {PROTOCOL}): install the same version on every host"
                )
            if hello["torch"] is None:
                raise UserError(f"{host}: {python} has no torch: install pipedec there with pip")

    def start_redis(self, host: str, port: int | None, password: str) -> str:
        """Start Redis on a host; its URL, with the password, as others reach it. Raises PipedecError, which names the host."""
        own, others = self._config.server(host), [self._config.server(other) for other in self.hosts if other != host]
        names = [(host_of_destination(other.ssh_destination), other.host, other.hostname) for other in others]
        towards = [name for alternatives in names for name in alternatives if name is not None]
        interface = own.interface if towards or not is_local(own) else None
        self._links[host].order("redis", port=port, password=password, towards=towards, interface=interface)
        started = self._await("redis", [host], REDIS_SECONDS)[host]
        address = f"[{started['address']}]" if ":" in started["address"] else started["address"]
        url = RedisConfig(f"redis://{address}:{started['port']}/0", password).connection_url
        assert url is not None
        return url

    def start(self, run: LaunchedRun, show: ShowHost = lambda host, done, total: None) -> None:
        """Send the run to all nodes, and start its ranks. Every host first downloads what it reads of models on the hub; ``show``
        receives the host, and the bytes that are there and in all. Raises UserError if a host lacks a part of the checkpoints.
        """
        for order, news, seconds in (("fetch", "fetched", FETCH_SECONDS), ("join", "joined", JOIN_SECONDS)):
            for host, link in self._links.items():
                link.order(order, run=asdict(run), host=host)
            self._await(news, self._links, seconds, show)
        for rank, host in list(self.host_of.items()):
            self._links[host].order("start", rank=rank)

    def watch(self, digests: Mapping[str, Mapping[str, str]]) -> None:
        """Let every node watch its ranks; they no longer need this process. Ranks that are started later must have the same
        ``digests`` of tensors, by model and name. Raises PipedecError, which names a host that could not begin.
        """
        for link in self._links.values():
            link.order("watch", digests=digests)
        self._await("watching", self._links, WATCH_SECONDS)

    @property
    def lost(self) -> dict[str, str]:
        """Hosts whose node has ended before the run, and why."""
        return {host: reason for host, reason in self._lost.items() if host not in self._over}

    @property
    def are_over(self) -> bool:
        """Whether the run has ended on all hosts with ranks; a spare may not have noticed yet."""
        return set(self.host_of.values()) <= self._over | self._lost.keys()

    def recoveries(self, seconds: float) -> list[Recovery]:
        """Wait up to ``seconds`` for news; returns the recoveries that nodes have reported since the last call."""
        self._take(seconds)
        found, self._recoveries = self._recoveries, []
        return found

    @property
    def pids(self) -> dict[int, int]:
        self._take(0.0)
        return dict(self._pids)

    @property
    def exit_statuses(self) -> dict[int, int]:
        self._take(0.0)
        return dict(self._statuses)

    def describe_end(self, rank: int) -> str:
        host = self.host_of[rank]
        if self._statuses[rank] == _LOST and host in self._lost:
            return f"was lost with its host: {self._lost[host]}"
        end = f"{describe_exit(self._statuses[rank])} on {host}"
        printed = self._links[host].complaint() if self._statuses[rank] > 0 else ""
        return f"{end}: {printed.removeprefix('pipedec: ').removeprefix(f'rank {rank}: ')}" if printed else end

    def read(self, seconds: float) -> list[tuple[int, Any]]:
        self._take(seconds)
        reports, self._reports = self._reports, []
        return reports

    def kill(self) -> None:
        """End all nodes, and with them their ranks and Redis, and forget them."""
        for link in self._links.values():
            link.order("end")
        end_links(self._links.values(), END_SECONDS)
        self._links, self._news = {}, SimpleQueue()
        for known in (self._pids, self._statuses, self._lost):
            known.clear()
        self._over.clear()
        self._reports, self._recoveries = [], []

    def _await(
        self, kind: str, hosts: Iterable[str], seconds: float, show: ShowHost = lambda host, done, total: None
    ) -> dict[str, dict[str, Any]]:
        """The next news of one kind from each of ``hosts``. Raises PipedecError if one fails or does not answer in time, which
        begins anew with every news of a download.
        """
        found: dict[str, dict[str, Any]] = {}
        deadline = time.monotonic() + seconds
        while silent := [host for host in hosts if host not in found]:
            try:
                host, news = self._news.get(timeout=max(0.0, deadline - time.monotonic()))
            except Empty:
                raise PipedecError(f"{', '.join(silent)} did not answer within {seconds:.0f} s: see `pipedec doctor`") from None
            if news is None:
                raise UserError(self._links[host].why_it_ended())
            if news["news"] == "failed":
                raise (UserError if news.get("is_mistake") else PipedecError)(f"{host}: {news['message']}")
            if news["news"] == kind:
                found[host] = news
            elif news["news"] == "fetching":
                show(host, news["done"], news["total"])
                deadline = time.monotonic() + seconds
            else:
                self._note(host, news)
        return found

    def _take(self, seconds: float) -> None:
        """Handle all news that have arrived, after waiting up to ``seconds`` for the first."""
        try:
            while True:
                self._note(*self._news.get(timeout=seconds))
                seconds = 0.0
        except Empty:
            return

    def _note(self, host: str, news: dict[str, Any] | None) -> None:
        match news:
            case {"news": "started", "rank": rank, "pid": pid}:
                self._pids[rank], self.host_of[rank] = pid, host
                self._statuses.pop(rank, None)
            case {"news": "recovery", "recovery": recovery}:
                self._recoveries.append(validated(Recovery, recovery))
            case {"news": "over"}:
                self._over.add(host)
            case {"news": "report", "rank": rank, "report": report}:
                self._reports.append((rank, report))
            case {"news": "ended", "rank": rank, "status": status}:
                self._statuses[rank] = status
            case {"news": "failed", "message": message}:
                self._lose(host, f"{host}: {message}")
            case None:
                self._lose(host, self._links[host].why_it_ended())

    def _lose(self, host: str, reason: str) -> None:
        self._lost.setdefault(host, reason)
        for rank in self.ranks_on(host):
            self._pids.setdefault(rank, 0)
            self._statuses.setdefault(rank, _LOST)
