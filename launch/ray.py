"""Starts a pipedec run on a Ray cluster, one actor per rank, and watches and replaces the ranks until the run is stopped.

Run it as ``python launch/ray.py`` on a node of the cluster; without a cluster Ray starts a local one. An actor is what Ray places
and counts: the rank itself is a child process of the actor's, and ends with it. All of them end with this program.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Annotated, Any, Literal

if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:
    del sys.path[0]  # this directory, in which Ray itself would be this file

import click
import ray
from msgspec import Meta
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from pipedec.cli.cluster import serve_cluster
from pipedec.cli.options import ClusterFlags, cluster_options
from pipedec.cluster.launched import models_for_hosts
from pipedec.cluster.network import interface_of
from pipedec.cluster.place import RankPlace
from pipedec.cluster.processes import RankProcesses, describe_exit
from pipedec.cluster.state import DEFAULT_RUN, check_unused
from pipedec.cluster.watched import WatchedCluster, resolve_and_serve
from pipedec.config import AUTO, RedisConfig, Settings, settings_options
from pipedec.config.environment import common_environment
from pipedec.config.redis import redis_config
from pipedec.core.errors import UserError
from pipedec.flags import Help, options_of, run_command
from pipedec.topology import Topology, rank_name

CONNECT_SECONDS = 60.0
START_SECONDS = 120.0  # for Ray to start an actor, and for that to load torch and start its rank
END_SECONDS = 10.0


@dataclass(frozen=True)
class RayFlags:
    """Where in Ray the ranks run."""

    ray_address: Annotated[
        str | None,
        Help("Ray cluster (default: $RAY_ADDRESS, else the last one on this machine, else a new one).", "HOST:PORT|local"),
    ] = None
    strategy: Annotated[
        Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"], Help("Strategy by which Ray places the ranks on nodes.")
    ] = "PACK"
    cpus_per_rank: Annotated[float, Meta(gt=0), Help("CPUs of each rank; its threads are as many, and at least one.")] = 1.0
    placement_timeout: Annotated[float, Meta(gt=0), Help("Time for Ray to find a place for every rank.", "SECONDS")] = 60.0


class RankActor:
    """Starts a rank as a child process. Ray runs one call after another."""

    def __init__(self, variables: dict[str, str]) -> None:
        os.environ.update(variables)  # not by Ray's runtime_env, which Ray writes into its logs
        self._ranks = RankProcesses()

    def start(self, rank: int, body: Callable[..., int], *arguments: Any) -> tuple[str, int]:
        """Start the rank's process, or its next one. Returns the name of the host, and the process id."""
        self._ranks.start(rank, body, *arguments)
        return socket.gethostname(), self._ranks.pids[rank]

    def news(self) -> tuple[list[Any], int | None]:
        """Wait up to a second for news: reports of the rank, and its exit status if it has ended."""
        self._ranks.wait(1.0)
        reports = [report for _, report in self._ranks.read(0.0) if report is not None]
        return reports, next(iter(self._ranks.exit_statuses.values()), None)


@dataclass
class RayRank:
    """A rank as this process knows it: lost if it has no ``actor``, still starting if it has no ``pid``."""

    actor: Any
    since: float = field(default_factory=time.monotonic)
    host: str = "an unknown host"
    pid: int = 0
    status: int | None = None
    loss: str = ""


class RayRanks:
    """The ranks of a run, each with an actor in its own bundle of a placement group; for a watch as ``RankProcesses``."""

    def __init__(self, flags: RayFlags, run_id: str, num_ranks: int, num_gpus: int) -> None:
        self._flags, self._run_id, self._num_ranks, self._num_gpus = flags, run_id, num_ranks, num_gpus
        self._group: PlacementGroup | None = None
        self._ranks: dict[int, RayRank] = {}
        self._calls: dict[Any, int] = {}  # the call that each actor is in, and its rank
        self._reports: list[tuple[int, Any]] = []
        self._numbers = count(1)  # of actors
        self.digests: dict[str, dict[str, str]] = {}  # of all tensors that ranks have read, by model and name

    def find_places(self) -> list[str]:
        """Reserve a bundle for every rank. Returns the addresses of all nodes. Raises UserError if Ray has too little in time."""
        bundle = {"CPU": self._flags.cpus_per_rank} | ({"GPU": self._num_gpus} if self._num_gpus else {})
        self._group = placement_group([bundle] * self._num_ranks, strategy=self._flags.strategy)
        if not self._group.wait(self._flags.placement_timeout):
            needs = " and ".join(f"{amount:g} {kind}" for kind, amount in bundle.items())
            has, free = ray.cluster_resources(), ray.available_resources()
            known = ", ".join(f"{has.get(kind, 0):g} {kind}s, {free.get(kind, 0):g} of them free" for kind in bundle)
            raise UserError(
                f"Ray found no place for {self._num_ranks} ranks of {needs} each ({self._flags.strategy}) within "
                f"{self._flags.placement_timeout:g} s: the cluster has {known}: add nodes, or lower --stages"
            )
        return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]

    def start(self, rank: int, body: Callable[..., int], *arguments: Any) -> None:
        """Start the process of ``rank``, or its next one, as soon as its actor runs; see ``RankProcesses.start``."""
        actor = self._ranks[rank].actor if rank in self._ranks else None
        if actor is None:
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank)
            kind = ray.remote(RankActor).options(
                num_cpus=self._flags.cpus_per_rank, num_gpus=self._num_gpus, scheduling_strategy=place,
                name=f"{self._run_id} {rank_name(rank)} #{next(self._numbers)}",
            )  # fmt: skip
            actor = kind.remote(common_environment())
        self._ranks[rank] = RayRank(actor)
        self._calls[actor.start.remote(rank, body, *arguments)] = rank

    def wait(self, seconds: float) -> None:
        """Wait up to ``seconds`` for news of any rank."""
        if not self._calls:
            time.sleep(seconds)
        while self._calls and (done := ray.wait(list(self._calls), timeout=seconds)[0]):
            self._take(done[0], self._calls.pop(done[0]))
            seconds = 0.0
        for rank in self.alive:
            if not self._ranks[rank].pid and time.monotonic() > self._ranks[rank].since + START_SECONDS:
                self._lose(rank, f"it did not start within {START_SECONDS:.0f} s")

    def _take(self, call: Any, rank: int) -> None:
        one = self._ranks[rank]
        try:
            match ray.get(call):
                case str(host), int(pid):
                    one.host, one.pid = host, pid
                case list(reports), status:
                    one.status = status
                    for what, done, total in reports:
                        if what == "digests":
                            self.digests.update({model: self.digests.get(model, {}) | found for model, found in done.items()})
                        else:
                            self._reports.append((rank, (what, done, total)))
            if one.status is None:
                self._calls[one.actor.news.remote()] = rank
        except ActorUnavailableError:
            self._lose(rank, "Ray cannot reach it")
        except RayError as error:
            found = re.search(r"^The actor (?:is dead|died) because (.+?)\.\s", f"{error}\n", re.MULTILINE)
            self._lose(rank, found[1] if found else str(error).strip().splitlines()[-1])

    def _lose(self, rank: int, why: str) -> None:
        """Note that a rank has ended with its actor, and kill that if it is not dead yet."""
        one = self._ranks[rank]
        self._calls = {call: other for call, other in self._calls.items() if other != rank}
        ray.kill(one.actor)
        one.actor, one.status, one.loss = None, -signal.SIGHUP, why

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank, 0 until it is known."""
        return {rank: one.pid for rank, one in list(self._ranks.items())}

    @property
    def alive(self) -> list[int]:
        return [rank for rank, one in self._ranks.items() if one.status is None]

    @property
    def exit_statuses(self) -> dict[int, int]:
        self.wait(0.0)
        return {rank: one.status for rank, one in self._ranks.items() if one.status is not None}

    def read(self, seconds: float) -> list[tuple[int, Any]]:
        self.wait(seconds)
        reports, self._reports = self._reports, []
        return reports

    def describe_end(self, rank: int) -> str:
        one = self._ranks[rank]
        if one.actor is None:
            return f"was lost with its actor on {one.host}: {one.loss}"
        return f"{describe_exit(one.status or 0)} on {one.host}"

    def end(self, rank: int) -> None:
        if self._ranks[rank].actor is not None:
            self._lose(rank, "it was killed")

    def forget(self, rank: int) -> None:
        del self._ranks[rank]

    def kill(self) -> None:
        """Kill all actors, wait up to ten seconds for their ends, and give their places back."""
        for one in self._ranks.values():
            if one.actor is not None:
                ray.kill(one.actor)
        if self._calls:
            ray.wait(list(self._calls), num_returns=len(self._calls), timeout=END_SECONDS)
        self._ranks, self._calls = {}, {}
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


class RayCluster(WatchedCluster):
    """All ranks of a pipeline in actors of a Ray cluster to which this process is connected."""

    def __init__(self, settings: Settings, run_id: str, flags: RayFlags) -> None:
        topology, device = Topology.even(settings.cut.stages, settings.cut.num_groups), settings.cut.device
        uses_gpus = device == "cuda" or (device == AUTO and ray.cluster_resources().get("GPU", 0) > 0)
        self._actors = RayRanks(flags, run_id, len(topology.ranks), num_gpus=int(uses_gpus))
        super().__init__(topology, settings, run_id, self._actors)

    def _find_hosts(self) -> list[str]:
        return [address for address in self._actors.find_places() if interface_of(address) is None]

    def _start_rank(self, rank: int) -> None:
        """An actor sees only what Ray gives it, so its rank is the only one of its host."""
        recovers = self.settings.cluster.recovers
        place = RankPlace(rank, len(self.topology.ranks), 0, 1, recovers=recovers, digests=self._actors.digests, lists=rank == 0)
        self._actors.start(rank, resolve_and_serve, place, self.settings.replaced(redis=RedisConfig()), self.address)


def connect(address: str | None) -> None:
    """Connect this process to a Ray cluster, or start a local one; ends the process if there is no answer in time."""
    where = f"--ray-address {address}" if address else "$RAY_ADDRESS or the last address on this machine"

    def leave() -> None:  # ray.init itself would go on for a quarter of an hour
        print(f"pipedec: no Ray cluster answers within {CONNECT_SECONDS:.0f} s: correct {where}", file=sys.stderr, flush=True)
        os._exit(2)

    timer = threading.Timer(CONNECT_SECONDS, leave)
    timer.start()
    try:
        ray.init(address, namespace="pipedec", log_to_driver=False, logging_level="error")
    except (ConnectionError, ValueError) as error:
        raise UserError(f"there is no Ray cluster, correct {where}: {error}") from None
    finally:
        timer.cancel()


@click.command(help=__doc__)
@settings_options
@cluster_options
@options_of(RayFlags, "flags")
def main(settings: Settings, place: ClusterFlags, flags: RayFlags) -> None:
    server = redis_config(place.redis)
    run_id = place.run or (DEFAULT_RUN if server.url else f"ray-{secrets.token_hex(4)}")
    check_unused(run_id)
    connect(flags.ray_address)
    try:
        cluster = RayCluster(settings.replaced(redis=server, **models_for_hosts(settings.models)), run_id, flags)
        serve_cluster(cluster, {f"{len(cluster.topology.ranks)} ranks": cluster.topology.ranks})
    finally:
        ray.shutdown()


if __name__ == "__main__":
    run_command(main)
