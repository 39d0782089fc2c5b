"""Finds the rank or link that stalls a pipeline, from the activity that every rank reports. Sends nothing and ends nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from pipedec.messages import ActivityReport
from pipedec.topology import rank_name

_SLOWER = 5.0  # a rank may compute a timestep for so many times as long as its longest one so far
_TIMESTEPS = 2.0  # a rank may wait for so many timesteps, each as long as if the stages computed one after another
_BUSY = ("computing", "warming", "loading", "meeting", "connecting")
LEAST_SECONDS = 4.0  # that a timestep may take, unless the user says otherwise
_PLANNED_TIMESTEPS = 20.0  # a timestep may take so many times as long as planned
_WARMING_SECONDS = 120.0  # that anything may take which is computed for the first time
_TELLS_SECONDS = 2.0  # a live rank reports what it does more often than this
_APART_SECONDS = 3.0  # a host that cannot be reached for longer is cut off


@dataclass(frozen=True)
class Stall:
    """A rank that computes for too long, one to which nothing comes, or one that cannot reach another host."""

    rank: int  # the one that computes, waits or tries
    peer: int | None  # for whom it waits, or whose host it cannot reach; None if it computes
    seconds: float
    is_apart: bool = False  # it cannot reach the host, so that the process of ``peer`` is not to blame
    is_warming: bool = False  # it computes what it has not computed before

    @property
    def suspect(self) -> int:
        """The rank to blame if both are on one machine, where links do not break: the one that is silent."""
        return self.rank if self.peer is None else self.peer

    @property
    def reason(self) -> str:
        """The inactivity of ``suspect``, as the end of a sentence."""
        if self.is_warming:
            return f"took more than {self.seconds:.0f} s to compute something for the first time"
        if self.peer is None:
            return f"computed one timestep for more than {self.seconds:.0f} s (--stall-timeout)"
        if self.is_apart:
            return f"cannot be reached by {rank_name(self.rank)}"
        return f"kept {rank_name(self.rank)} waiting for more than {self.seconds:.0f} s (--stall-timeout)"


def stall_limit(given: float | None, timestep_ms: float = 0.0) -> float:
    """Seconds after which ``find_stall`` should find one: ``given`` by the user, or what the planned ``timestep_ms`` suggests."""
    return max(LEAST_SECONDS, _PLANNED_TIMESTEPS * timestep_ms / 1000) if given is None else given


def find_stall(activities: Mapping[int, ActivityReport], stall_seconds: float) -> Stall | None:
    """The rank or link that holds all others up, if one has done so for longer than ``stall_seconds``.

    Ranks wait for each other, so nearly all stand still when one does: the search follows each waiting rank to the one for which
    it waits, up to one that does not wait itself. Where they wait in a circle, something was lost on the way to the one that has
    waited longest. Ranks that have computed long timesteps before have more time. So has a rank that computes something for
    the first time, and every rank that waits for it: waiting times count from the last time that any rank did so. A rank is not
    blamed on a report that is too early to show whether it is waiting as well, if its next report is due (reports may be a second
    old).
    """
    if apart := [rank for rank, told in activities.items() if told.kind == "connecting" and told.seconds > _APART_SECONDS]:
        rank = max(apart, key=lambda one: activities[one].began)
        return Stall(rank, activities[rank].peer, activities[rank].seconds, is_apart=True)
    overdue = []  # have computed one timestep, or anything for the first time, for too long
    for rank, told in activities.items():
        slowest = _WARMING_SECONDS if told.kind == "warming" else _SLOWER * told.longest_seconds
        if told.kind in ("warming", "computing") and told.seconds > max(stall_seconds, slowest):
            overdue.append(rank)
    if overdue:
        rank = max(overdue, key=lambda one: activities[one].began)
        return Stall(rank, None, activities[rank].seconds, is_warming=activities[rank].kind == "warming")
    warmed = [told.warmed_seconds + told.age_seconds for told in activities.values() if told.warmed_seconds is not None]
    is_usual = min(warmed, default=math.inf)  # how long ago a rank last computed something for the first time
    waited = {rank: min(told.seconds, is_usual) for rank, told in activities.items() if told.kind == "waiting"}
    limit = max(stall_seconds, _TIMESTEPS * sum(told.longest_seconds for told in activities.values()))
    peers = {rank: activities[rank].peer for rank, seconds in waited.items() if seconds > limit / 2}
    excused = set()  # are busy, or may wait as well by now, although the last report could not show it and the next is due
    for rank, told in activities.items():
        if told.kind in _BUSY or (told.seconds <= limit / 2 < told.began and told.age_seconds < _TELLS_SECONDS):
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
