"""Finds the rank or link that stalls a pipeline, from the activities that ranks report. A pure function of these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipedec.core.limits import SLOW_SECONDS
from pipedec.messages.stats import ActivityReport
from pipedec.topology import rank_name

_SLOWER = 5.0  # how many times its longest timestep so far a rank may compute
_TIMESTEPS = 2.0  # how many timesteps a rank may wait, each as long as all stages one after another
_RINGS = 5.0  # how many times the latency of all links a rank may wait besides
_AWAY_SECONDS = 6.0  # that a link may be silent: TCP repeats what was lost in 3 s when up to twice as many have passed
_BUSY = ("computing", "warming", "loading", "meeting", "connecting")
LEAST_SECONDS = 4.0  # a timestep may take so long by default
_PLANNED_TIMESTEPS = 20.0  # how many times its planned duration a timestep may take
_WARMING_SECONDS = 120.0  # a computation may take so long for the first time
_REPORT_SECONDS = 2.0  # a live rank reports its activity more often than this
_APART_SECONDS = 3.0  # a host that cannot be reached for longer is cut off


@dataclass(frozen=True)
class Stall:
    """A rank that computes for too long, one that waits for too long, or one that cannot reach another host."""

    rank: int  # the one that computes, waits or tries to connect
    peer: int | None  # the rank for which it waits, or whose host it cannot reach; None if it computes
    seconds: float
    is_apart: bool = False  # it cannot reach the host, so that the process of ``peer`` is not to blame
    is_warming: bool = False  # it computes something for the first time

    @property
    def suspect(self) -> int:
        """The rank to blame where the link works: the one that computes, or for which ``rank`` waits."""
        return self.rank if self.peer is None else self.peer

    @property
    def reason(self) -> str:
        """Why ``suspect`` is to blame, as the end of a sentence."""
        if self.is_warming:
            return f"took more than {self.seconds:.0f} s to compute something for the first time"
        if self.peer is None:
            return f"computed one timestep for more than {self.seconds:.0f} s (--stall-timeout)"
        if self.is_apart:
            return f"cannot be reached by {rank_name(self.rank)}"
        return f"kept {rank_name(self.rank)} waiting for more than {self.seconds:.0f} s (--stall-timeout)"


def stall_limit(given: float | None, timestep_ms: float = 0.0) -> float:
    """The limit for ``find_stall`` in seconds: as ``given`` by the user, else by the planned ``timestep_ms``."""
    return max(LEAST_SECONDS, _PLANNED_TIMESTEPS * timestep_ms / 1000) if given is None else given


def find_stall(activities: Mapping[int, ActivityReport], stall_seconds: float) -> Stall | None:
    """The rank or link that holds all others up, if one has done so for longer than ``stall_seconds``.

    Ranks wait for each other, so nearly all stand still when one does: the search follows each waiting rank to the one for which
    it waits, up to one that does not wait itself. Where they wait in a circle, a message to the one that has waited longest was
    lost. Ranks that have computed long timesteps before have more time. So has a rank that computes something for the first
    time, and every rank that waits for it: waiting times count from the last time that any rank did so. On slow
    links ranks wait longer, by what these take. A rank whose last report is too old to show that it waits, too, is not blamed
    before its next one (reports may be a second old).
    """
    reports = activities.items()
    if apart := [rank for rank, report in reports if report.kind == "connecting" and report.seconds > _APART_SECONDS]:
        rank = max(apart, key=lambda one: activities[one].began)
        return Stall(rank, activities[rank].peer, activities[rank].seconds, is_apart=True)
    overdue = []  # have computed one timestep, or anything for the first time, for too long
    for rank, report in reports:
        slowest = _WARMING_SECONDS if report.kind == "warming" else _SLOWER * report.longest_seconds
        if report.kind in ("warming", "computing") and report.seconds > max(stall_seconds, slowest):
            overdue.append(rank)
    if overdue:
        rank = max(overdue, key=lambda one: activities[one].began)
        return Stall(rank, None, activities[rank].seconds, is_warming=activities[rank].kind == "warming")
    warmed = [report.warmed_seconds + report.age_seconds for _, report in reports if report.warmed_seconds is not None]
    since_warming = min(warmed, default=math.inf)  # how long ago a rank last computed something for the first time
    waited = {rank: min(report.seconds, since_warming) for rank, report in reports if report.kind == "waiting"}
    limit = max(stall_seconds, _TIMESTEPS * sum(report.longest_seconds for _, report in reports))
    if (latency := sum(report.link_seconds for _, report in reports)) > SLOW_SECONDS:
        limit += _AWAY_SECONDS + _RINGS * latency
    peers = {rank: activities[rank].peer for rank, seconds in waited.items() if seconds > limit / 2}
    warming_told = max((report.age_seconds for _, report in reports if report.kind == "warming"), default=0.0)
    excused = set()  # are busy, may wait by now, which the last report could not show, or have waited for what is over since then
    for rank, report in reports:
        may_wait = report.seconds <= limit / 2 < report.began and report.age_seconds < _REPORT_SECONDS
        if report.kind in _BUSY or may_wait or report.began < warming_told:
            excused.add(rank)
    starved = [rank for rank in peers if waited[rank] > limit]
    for rank in sorted(starved, key=lambda one: -activities[one].began):
        last = _last_to_wait(rank, peers, activities)
        if (peer := peers[last]) is not None and peer not in excused:
            return Stall(last, peer, activities[last].seconds)
    return None


def _last_to_wait(rank: int, peers: Mapping[int, int | None], activities: Mapping[int, ActivityReport]) -> int:
    """Follows who waits for whom from ``rank`` to one whose peer does not wait, or to the longest waiting of a circle."""
    path = [rank]
    while (peer := peers[path[-1]]) is not None and peer in peers:
        if peer in path:
            return max(path[path.index(peer) :], key=lambda one: activities[one].began)
        path.append(peer)
    return path[-1]
