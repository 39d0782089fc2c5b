"""A resident cluster on the hosts of a cluster.yaml, started over ssh: a node per host, its ranks, and Redis unless one is given.

Until the cluster is up, everything ends with this process, however it ends. From then on the nodes watch and replace the ranks,
so that the cluster goes on if this process is killed; ``stop`` and ``kill`` end it. Loads no torch.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from msgspec import structs

from pipedec.checkpoints import (
    COPY_AGAIN,
    CheckpointPart,
    TensorDigests,
    check_trained_for,
    first_difference,
    has_weights,
    part_digests,
)
from pipedec.checkpoints.download import pinned
from pipedec.cluster.node_run import LaunchedRun
from pipedec.cluster.nodes import Nodes
from pipedec.cluster.supervisor import StartProgress, Supervisor
from pipedec.cluster.watched import check_reachable
from pipedec.config import NONE, ClusterConfig
from pipedec.config.cluster import cluster_to_json
from pipedec.config.settings import Models
from pipedec.core.errors import PipedecError, RankLost, SchedulerLost, UserError
from pipedec.families import is_known
from pipedec.gguf import is_named, located, model_files
from pipedec.plan.files import checkpoints_of
from pipedec.plan.placement import rank_places, spare_places
from pipedec.topology import Topology, rank_name

TURN_SECONDS = 1.0  # the longest wait without a check
REPORT_SECONDS = 15.0  # after rank 0 reports that all are ready, for earlier reports of the others to arrive
_END_SECONDS = 10.0


class LaunchedCluster(Supervisor):
    """All ranks of a partition, on the hosts that it names. Raises UserError if there is no such partition, or there are too few
    devices for it.

    Args:
        partition: its name; None for the one that the file names.
        run_id: name of the run; None for a random one.
        log: file for the output of the hosts while the cluster runs; None to drop it.
        spares: how many devices stand by for ranks whose hosts are lost; None for those that the file names.
        given: settings by name that take precedence over the file's.

    Attributes:
        redis_host: the host on which Redis is started: the configured one, else rank 0's; None if one runs already.
    """

    outlives_supervisor = True

    def __init__(
        self, config: ClusterConfig, partition: str | None = None, run_id: str | None = None, log: Path | None = None,
        spares: int | None = None, given: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.config = for_hosts(config.for_partition(partition, given))
        self.partition, _ = self.config.find_partition()
        self.places = rank_places(self.config)
        self.spares = spare_places(self.config, count=spares)
        self.nodes = Nodes(self.config, self.places, self.spares)
        cut = self.config.settings.cut
        super().__init__(Topology.even(cut.stages, cut.num_groups), run_id or f"launch-{secrets.token_hex(4)}", self.nodes)
        self.redis_host = None if self.config.redis.url else self.config.redis.host or self.places[0].host
        self._owns_redis = self.redis_host is not None
        self._log_path = log
        self._log: IO[str] | None = None
        self._is_watched = False  # whether nodes watch the run
        self._listed: TensorDigests | None = None  # here, if there are several hosts, which may have different weights
        self._digests: dict[int, TensorDigests] = {}  # digests that ranks have reported
        self._announced = 0  # the last epoch that was passed to ``on_recovery``
        self._progress: StartProgress = lambda rank, what, done, total: None

    def _open_redis(self) -> str:
        models, wanted = checkpoints_of(self.config), self.config.redis
        check_reachable(wanted, self.nodes.hosts[1:])
        hosts = {place.host for place in (*self.places, *self.spares)}
        self._listed, self._digests = listed_weights(models) if len(hosts) > 1 else None, {}
        if self._log_path is not None:
            self._log_path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._log = self._log_path.open("w", encoding="utf-8")
        self.nodes.connect(self._log)
        if (url := wanted.connection_url) is not None:
            return url
        assert self.redis_host is not None
        return self.nodes.start_redis(self.redis_host, wanted.port, wanted.password or secrets.token_hex(24))

    def _start_ranks(self) -> None:
        run = LaunchedRun(
            config=cluster_to_json(self.config.for_partition(given={"redis": {}})),  # ranks get only the address
            redis_url=self.address.redis_url,
            run_id=self.run_id,
            redis_host=self.redis_host,
            num_spares=len(self.spares),
        )
        self.nodes.start(run, self._show_download)

    def _show_download(self, host: str, done: int, total: int) -> None:
        if ranks := self.nodes.ranks_on(host):
            self._progress(ranks[0], "downloading", done, total)

    def _start(self, progress: StartProgress | None) -> None:
        def note(rank: int, what: str, done: Any, total: int) -> None:
            if what == "digests":
                self._digests[rank] = done
            elif progress is not None:
                progress(rank, what, done, total)

        self._progress = note
        super()._start(note)
        known: dict[str, dict[str, str]] = {}
        if self._listed is not None:
            deadline = time.monotonic() + REPORT_SECONDS
            while silent := [rank for rank in self.topology.ranks if rank not in self._digests]:
                if time.monotonic() > deadline:
                    raise PipedecError(self.with_hosts(f"{rank_name(silent[0])} has not reported the digests of its weights"))
                self.check()
                for rank, report in self._ranks.read(TURN_SECONDS):
                    note(rank, *report)
            known = proved_one([(self.nodes.host_of[rank], digests) for rank, digests in self._digests.items()], self._listed)
        self.nodes.watch(known)
        self._is_watched = True

    def check(self) -> None:
        """Raise RankLost, with the reason, if the run has failed. Ranks and hosts that were lost and replaced are no failure."""
        if not self._is_watched:
            return super().check()
        self._take_news(0.0)
        lost = self.nodes.lost
        if not lost or self.scheduler is None:
            return
        failure, is_up = None, True
        with suppress(SchedulerLost):
            status = self.scheduler.status()
            failure, is_up = status.failure, status.state == "up"
        if failure is None and is_up and self.nodes.are_over:
            failure = next(iter(lost.values()))
        if failure is not None:
            raise RankLost(self.with_hosts(failure))

    def wait(self, turn: Callable[[], None] = lambda: None) -> None:
        while not self.nodes.are_over:
            turn()
            self._take_news(TURN_SECONDS)
            self.check()
        self.check()

    def _wait_for_ends(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while not self.nodes.are_over and (left := deadline - time.monotonic()) > 0:
            self._take_news(min(left, TURN_SECONDS))

    def _take_news(self, seconds: float) -> None:
        """Wait up to ``seconds`` for news of nodes, and pass on each recovery once, though every node reports it."""
        for recovery in self.nodes.recoveries(seconds):
            if recovery.epoch > self._announced:
                self._announced = recovery.epoch
                self.on_recovery(structs.replace(recovery, reason=self.with_hosts(recovery.reason)))

    def with_hosts(self, message: str) -> str:
        def with_host(found: re.Match[str]) -> str:
            rank = int(found[1])
            return f"{found[0]} on {self.nodes.host_of[rank]}" if rank < len(self.places) else found[0]

        return re.sub(r"\brank (\d++)( \((draft|stage \d+)\))?+(?! on )", with_host, message)

    def _close(self) -> None:
        self._is_watched = False
        if self._log is not None:
            with suppress(OSError):  # the disk is full: its last lines are lost
                self._log.close()
            self._log = None


def listed_weights(models: Mapping[str, str]) -> TensorDigests:
    """The digests by model and name of all tensors of a run's checkpoints on this machine, for comparison with those of every
    host. ``models`` are directories or GGUF files by key, and need not be here. Raises UserError if a file is damaged or cannot
    be read, or the BiTA was trained for another target.
    """
    here = {}
    for key, model in models.items():
        with suppress(UserError):
            if located(model).exists() and has_weights(model_files(model)):
                here[key] = model
    if {"target", "bita"} <= here.keys():
        check_trained_for(Path(here["bita"]), Path(here["target"]))  # the hosts cannot tell from their parts
    return part_digests((CheckpointPart(key, model) for key, model in here.items()), whatever_is_here=True)


def proved_one(reported: Iterable[tuple[str, TensorDigests]], listed: TensorDigests) -> dict[str, dict[str, str]]:
    """All known digests, by model and name: those that ranks have ``reported``, each with its host, and those ``listed`` on this
    machine. Raises UserError if a tensor differs between a host and this machine.
    """
    known = {model: dict(tensors) for model, tensors in listed.items()}
    for host, digests in reported:
        if difference := first_difference(digests, listed):
            model, tensor = difference
            raise UserError(f"{host} has other weights of the {model} than this machine ({tensor}): {COPY_AGAIN}")
        for model, tensors in digests.items():
            known.setdefault(model, {}).update(tensors)
    return known


def for_hosts(config: ClusterConfig) -> ClusterConfig:
    """With the models as all hosts find them; what describes those on the hub is downloaded, for the plan. Raises as that."""
    return config.for_partition(given=models_for_hosts(config.settings.models))


def models_for_hosts(models: Models) -> dict[str, str]:
    """Files and directories by their absolute paths, as ranks do not run in this process's directory, and models on the hub with
    their commits, the same on all hosts; by key. Raises as ``pinned``.
    """
    named = {key: getattr(models, key) for key in ("target", "draft", "bita")}
    files = {key: model for key, model in named.items() if model not in (None, NONE) and not (is_known(model) or is_named(model))}
    return {key: str(Path(model).absolute()) for key, model in files.items()} | pinned(models)
