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
    """A rank that computes for too long, one to which nothing comes, or one that cannot reach another host.

    Attributes:
        rank: the one that computes, waits or tries.
        peer: for whom it waits, or whose host it cannot reach; None if it computes.
        is_apart: it cannot reach the host, so that the process of ``peer`` is not to blame.
        is_warming: it computes what it has not computed before.
    """

    rank: int
    peer: int | None
    seconds: float
    is_apart: bool = False
    is_warming: bool = False

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
    """Seconds after which ``find_stall`` should find one.

    Args:
        given: by the user, who is followed; None for what the plan suggests.
        timestep_ms: the planned one; 0 without a plan.
    """
    return max(LEAST_SECONDS, _PLANNED_TIMESTEPS * timestep_ms / 1000) if given is None else given


def find_stall(activities: Mapping[int, ActivityReport], stall_seconds: float) -> Stall | None:
    """The rank or link that holds all others up, if one has done so for longer than ``stall_seconds``.

    Ranks wait for each other, so nearly all stand still when one does: the search follows each waiting rank to the one for which
    it waits, up to one that does not wait itself. Where they wait in a circle, something was lost on the way to the one that has
    waited longest. Ranks that have computed long timesteps before have more time. So has a rank that computes something for
    the first time, and every rank that waits for it: waiting times count from the last time that any rank did so. A rank is not
    blamed on a report that is too early to show whether it is waiting as well, if its next report is due.

    Args:
        activities: of every rank that has reported one; each may be a second old.
    """
    if apart := [rank for rank, told in activities.items() if told.kind == "connecting" and told.seconds > _APART_SECONDS]:
        rank = max(apart, key=lambda one: activities[one].began)
        return Stall(rank, activities[rank].peer, activities[rank].seconds, is_apart=True)
    if overdue := [rank for rank, told in activities.items() if _is_overdue(told, stall_seconds)]:
        rank = max(overdue, key=lambda one: activities[one].began)
        return Stall(rank, None, activities[rank].seconds, is_warming=activities[rank].kind == "warming")
    warmed = [told.warmed_seconds + told.age_seconds for told in activities.values() if told.warmed_seconds is not None]
    is_usual = min(warmed, default=math.inf)  # how long ago a rank last computed something for the first time
    waited = {rank: min(told.seconds, is_usual) for rank, told in activities.items() if told.kind == "waiting"}
    limit = max(stall_seconds, _TIMESTEPS * sum(told.longest_seconds for told in activities.values()))
    peers = {rank: activities[rank].peer for rank, seconds in waited.items() if seconds > limit / 2}
    excused = {rank for rank, told in activities.items() if told.kind in _BUSY or _may_wait_as_well(told, limit / 2)}
    starved = [rank for rank in peers if waited[rank] > limit]
    for rank in sorted(starved, key=lambda one: -activities[one].began):
        last = _last_to_wait(rank, peers, activities)
        if (peer := peers[last]) is not None and peer not in excused:
            return Stall(last, peer, activities[last].seconds)
    return None


def _is_overdue(told: ActivityReport, stall_seconds: float) -> bool:
    """Whether a rank has computed one timestep, or anything for the first time, for too long."""
    if told.kind == "warming":
        return told.seconds > max(stall_seconds, _WARMING_SECONDS)
    return told.kind == "computing" and told.seconds > max(stall_seconds, _SLOWER * told.longest_seconds)


def _may_wait_as_well(told: ActivityReport, seconds: float) -> bool:
    """Whether a rank may by now have waited for ``seconds``, although its last report could not show it and the next is due."""
    return told.seconds <= seconds < told.began and told.age_seconds < _TELLS_SECONDS


def _last_to_wait(rank: int, peers: Mapping[int, int | None], activities: Mapping[int, ActivityReport]) -> int:
    """Follows who waits for whom from ``rank`` to one whose peer does not wait, or to the longest waiting of a circle."""
    path = [rank]
    while (peer := peers[path[-1]]) is not None and peer in peers:
        if peer in path:
            return max(path[path.index(peer) :], key=lambda one: activities[one].began)
        path.append(peer)
    return path[-1]
