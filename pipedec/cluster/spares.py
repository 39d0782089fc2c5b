"""Which hosts take over the ranks of another one: a pure function of the plan, the spare devices and where ranks are now."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipedec.cluster.stalls import Stall
from pipedec.core.errors import RankLost
from pipedec.plan.placement import Placement
from pipedec.scheduler import Supervision
from pipedec.topology import rank_name


@dataclass(frozen=True)
class Spares:
    """The devices of a run: those of ranks 0..n, and those that stand by."""

    planned: tuple[Placement, ...]  # by rank; ranks that share a device share one on any host that takes them over
    standing_by: tuple[Placement, ...]
    redis_host: str | None = None  # where the run's Redis was started; None if it runs elsewhere

    @property
    def hosts(self) -> list[str]:
        """Hosts with spares first, then those whose devices are free only after they have lost a rank."""
        return list(dict.fromkeys(place.host for place in (*self.standing_by, *self.planned)))

    def devices(self, host: str) -> list[Placement]:
        return [place for place in dict.fromkeys((*self.planned, *self.standing_by)) if place.host == host]

    def device_for(self, rank: int, host: str, others: Mapping[int, Placement]) -> Placement:
        """The device of a rank on ``host``, where ``others`` are in use. Raises RankLost if no device is free."""
        for other, place in others.items():
            if self.planned[other] == self.planned[rank]:
                return place
        free = [place for place in self.devices(host) if place not in others.values()]
        if self.planned[rank] in free:
            return self.planned[rank]
        if not free:
            raise RankLost(f"{rank_name(rank)} was given to {host}, which has no free device")
        return free[-1]

    def reassigned(self, ranks: Sequence[int], look: Supervision) -> Mapping[int, str]:
        """For each of ``ranks`` another host, which takes it over. Raises RankLost if too few devices are free."""
        places = {rank: look.places.get(rank, place.host) for rank, place in enumerate(self.planned)}
        left = {places[rank] for rank in ranks}.union(look.lost_nodes)
        taken = Counter(host for _, host in {(self.planned[rank], host) for rank, host in places.items()})
        free = [host for host in self.hosts if host not in left for _ in range(len(self.devices(host)) - taken[host])]
        moving = dict.fromkeys(self.planned[rank] for rank in ranks)
        if len(free) < len(moving):
            missing = f"no spare is left for {', '.join(map(rank_name, ranks))}"
            raise RankLost(f"{missing}: start with --spares {len(self.standing_by) + len(moving) - len(free)}")
        hosts = dict(zip(moving, free, strict=False))
        return {rank: hosts[self.planned[rank]] for rank in ranks}

    def host_to_leave(self, stall: Stall, look: Supervision) -> str | None:
        """The host to give up of the two between which nothing arrives; None if it is one host, or neither can be replaced.

        The host of Redis or rank 0 comes last; otherwise the one with fewer ranks is given up.
        """
        ends = {stall.rank, stall.suspect}
        hosts = {place for rank, place in look.places.items() if rank in ends.difference(look.expired)}
        if len(hosts) < 2:
            return None
        held = Counter(look.places.values())
        for host in sorted(hosts, key=lambda host: (host == self.redis_host, look.places.get(0) == host, held[host])):
            try:
                self.reassigned([rank for rank, place in look.places.items() if place == host], look)
            except RankLost:
                continue
            return host
        return None
