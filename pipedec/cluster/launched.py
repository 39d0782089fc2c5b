"""A resident cluster on the hosts of a cluster.yaml, started over ssh: a node per host, its ranks, and Redis unless there is one.

Until the cluster is up, everything ends with this process, however it ends. From then on the nodes watch and replace the ranks:
the cluster goes on if this process is killed, and ends if it stops or kills it. Loads no torch.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from msgspec import structs

from pipedec.checkpoints import TensorDigests
from pipedec.cluster.listed_weights import ListedWeights, proved_one
from pipedec.cluster.node_rank import LaunchedRun
from pipedec.cluster.nodes import Nodes
from pipedec.cluster.supervisor import TURN_SECONDS, StartProgress, Supervisor
from pipedec.config import NONE, ClusterConfig, cluster_to_json
from pipedec.core import PipedecError, RankLost, SchedulerLost, UserError
from pipedec.gguf import is_named
from pipedec.hardware import MODEL_SHAPES
from pipedec.plan.files import checkpoints_of
from pipedec.plan.placement import rank_places, spare_places
from pipedec.topology import Topology, rank_name

_THIS_MACHINE = (None, "localhost", "127.0.0.1", "::1")  # as hosts of a URL; None for a Unix socket

REPORT_SECONDS = 15.0  # after rank 0 reports that all are ready, for earlier reports of the others to arrive
_END_SECONDS = 10.0


class LaunchedCluster(Supervisor):
    """All ranks of a partition, on the hosts that it names. Use as a context manager, or ``start`` and ``stop``.

    Args:
        partition: its name; None for the one that the file names.
        given: settings by name that take precedence over the file's.
        run_id: name of the run; None for a random one.
        log: gets what the hosts print, one line after another, while the cluster runs; None to drop it.
        spares: how many devices stand by for ranks whose hosts are lost; None for those that the file names.

    Raises:
        UserError: there is no such partition, or too few devices for it.
    """

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
        self._log_path = log
        self._log: IO[str] | None = None
        self._is_watched = False  # by the nodes
        self._listed: ListedWeights | None = None  # if there are several hosts, which may have different ones
        self._digests: dict[int, TensorDigests] = {}  # that ranks have reported
        self._told = 0  # the last epoch of which ``on_recovery`` knows

    @property
    def redis_host(self) -> str | None:
        """The host on which Redis is started: the configured one, else rank 0's; None if one runs already."""
        return None if self.config.redis.url else self.config.redis.host or self.places[0].host

    def _open_redis(self) -> str:
        models = checkpoints_of(self.config)
        self._check_redis()
        hosts = {place.host for place in (*self.places, *self.spares)}
        self._listed, self._digests = ListedWeights(models) if len(hosts) > 1 else None, {}
        self._log = self._log_path.open("w", encoding="utf-8") if self._log_path else None
        self.nodes.connect(self._log)
        if (url := self.config.redis.connection_url) is not None:
            return url
        assert self.redis_host is not None
        wanted = self.config.redis
        return self.nodes.start_redis(self.redis_host, wanted.port, wanted.password or secrets.token_hex(24))

    def _check_redis(self) -> None:
        """Raises UserError for a Redis that is another one on each host."""
        url = self.config.redis.url
        if url is not None and len(self.nodes.hosts) > 1 and urlsplit(url).hostname in _THIS_MACHINE:
            raise UserError(f"redis: {url} is another server on each host: give an address that all hosts reach")

    @property
    def _owns_redis(self) -> bool:
        return self.redis_host is not None

    def _start_ranks(self) -> None:
        run = LaunchedRun(
            config=cluster_to_json(_without_redis(self.config)),  # ranks get only the address
            redis_url=self.address.redis_url,
            run_id=self.run_id,
            redis_host=self.redis_host,
            num_spares=len(self.spares),
        )
        self.nodes.tell(run)
        for rank in self.topology.ranks:
            self.nodes.start_rank(rank)

    def _start(self, progress: StartProgress | None) -> None:
        def note(rank: int, what: str, done: Any, total: int) -> None:
            if what == "digests":
                self._digests[rank] = done
            elif progress is not None:
                progress(rank, what, done, total)

        super()._start(note)
        self.nodes.watch(self._known_weights(note))
        self._is_watched = True

    def _known_weights(self, note: StartProgress) -> dict[str, dict[str, str]]:
        """Digests of all tensors of the run.

        Raises:
            UserError: a host has others than this machine.
            PipedecError: a rank has reported none.
        """
        if self._listed is None:
            return {}

        def turn(done: int, total: int) -> None:
            self.check()
            note(0, "comparing", done, total)

        listed, deadline = self._listed.wait(turn), time.monotonic() + REPORT_SECONDS
        while silent := [rank for rank in self.topology.ranks if rank not in self._digests]:
            if time.monotonic() > deadline:
                raise PipedecError(self.with_hosts(f"{rank_name(silent[0])} has not reported the digests of its weights"))
            self.check()
            for rank, report in self._ranks.read(TURN_SECONDS):
                note(rank, *report)
        return proved_one([(self.nodes.host_of(rank), digests) for rank, digests in self._digests.items()], listed)

    @property
    def outlives_supervisor(self) -> bool:
        return True

    def check(self) -> None:
        """Raise if the cluster has failed. Ranks and hosts that were lost and replaced are no failure.

        Raises:
            RankLost: says what has ended the run.
            SchedulerLost: Redis is gone, and the nodes have ended.
        """
        if not self._is_watched:
            super().check()
            return
        self._take_news(0.0)
        lost = self.nodes.lost
        if not lost or self.scheduler is None:
            return
        try:
            status = self.scheduler.status()
        except SchedulerLost:
            if self.nodes.are_over:
                raise RankLost(self.with_hosts(next(iter(lost.values())))) from None
            return
        if status.failure is not None:
            raise RankLost(self.with_hosts(status.failure))
        if status.state == "up" and self.nodes.are_over:
            raise RankLost(self.with_hosts(next(iter(lost.values()))))

    def wait(self, turn: Callable[[], None] = lambda: None) -> None:
        while not self.nodes.are_over:
            turn()
            self._take_news(TURN_SECONDS)
            self.check()
        self.check()

    def _join_ranks(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while not self.nodes.are_over and (left := deadline - time.monotonic()) > 0:
            self._take_news(min(left, TURN_SECONDS))

    def _take_news(self, seconds: float) -> None:
        """Wait for news of nodes, and tell of recoveries, of each one once."""
        for recovery in self.nodes.recoveries(seconds):
            if recovery.epoch > self._told:
                self._told = recovery.epoch
                self.on_recovery(structs.replace(recovery, reason=self.with_hosts(recovery.reason)))

    def kill(self) -> None:
        self._is_watched = False
        super().kill()

    def with_hosts(self, message: str) -> str:
        return re.sub(r"\brank (\d++)( \((draft|stage \d+)\))?+(?! on )", self._with_host, message)

    def _with_host(self, found: re.Match[str]) -> str:
        rank = int(found[1])
        return f"{found[0]} on {self.nodes.host_of(rank)}" if rank < len(self.places) else found[0]

    def _close(self) -> None:
        if self._listed is not None:
            self._listed.close()
            self._listed = None
        if self._log is not None:
            with suppress(OSError):  # the disk is full: its last lines are lost
                self._log.close()
            self._log = None


def for_hosts(config: ClusterConfig) -> ClusterConfig:
    """With checkpoint directories that do not depend on where a rank runs."""
    models = config.settings.models
    paths = {key: _absolute(model) for key in ("target", "draft", "bita") if (model := getattr(models, key)) is not None}
    return config.for_partition(given=paths)


def _without_redis(config: ClusterConfig) -> ClusterConfig:
    return config.for_partition(given={"redis": {}})


def _absolute(model: str) -> str:
    return model if model == NONE or model in MODEL_SHAPES or is_named(model) else str(Path(model).absolute())
