"""Assigns the memory of the stages: which requests open, by how much lanes grow, how many rows enter, and which requests are
paused when memory runs short. It is KV memory and, if the target has recurrent layers, states of requests and stashes of rows.

Certain rows come before candidates, and older requests before younger ones: so the oldest request of the best priority always
makes progress, and no request waits forever. Knows neither methods nor draft models.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from pipedec.decoding.budget import Claim
from pipedec.decoding.request import Phase, Request
from pipedec.families import StateCounts
from pipedec.kv import KVManager, Lease
from pipedec.threads import State

_UNLIMITED = 2**40  # states or stashes


@dataclass(frozen=True)
class LaneSizes:
    """How many slots a lane gets before it needs them."""

    ahead: int = 1024  # maximum slots for tokens of the answer that a lane gets when it opens
    growth: int = 128  # slots by which a lane grows if there is enough memory


class Stashes:
    """The states and stashes in the stages' pools of recurrent layers. Without such layers there is no limit.

    A request has a state for each thread that has not ended, and a stash for each row of its trees. A thread that has ended may
    have one of each for its last token, to which others will attend.

    Attributes:
        states, rows: those that are free at this timestep; the second without rows that are reserved.
    """

    def __init__(self, counts: StateCounts | None = None) -> None:
        self.counts = counts or StateCounts(_UNLIMITED, _UNLIMITED)
        self.is_limited = counts is not None
        self.states = self.rows = _UNLIMITED
        self._reserved: dict[int, int] = {}  # rows by request

    def count(self, lanes: Iterable[Request]) -> None:
        """Begin a timestep with these lanes."""
        self._reserved.clear()
        if self.is_limited:
            lanes = list(lanes)
            self.states = self.counts.states - sum(map(self.states_of, lanes))
            self.rows = self.counts.rows - sum(lane.method.in_flight + _last_tokens(lane) for lane in lanes)

    def states_of(self, request: Request) -> int:
        return sum(thread.state is not State.ENDED for thread in request.sequence.threads) + _last_tokens(request)

    def reserve(self, number: int, rows: int) -> int:
        """Reserve ``rows`` rows for a request, or those that are left, which it returns."""
        self._reserved[number] = found = min(rows, max(self.rows, 0))
        self.rows -= found
        return found

    def take(self, number: int, rows: int) -> int:
        """Return the number of a request's ``rows`` rows that may enter: reserved ones first, then free ones."""
        reserved = min(self._reserved.pop(number, 0), rows)
        more = min(rows - reserved, max(self.rows, 0))
        self.rows -= more
        return reserved + more

    def to_pause(self, lanes: Sequence[Request]) -> list[Request]:
        """The last of the lanes, but never the first, without which there are states for the threads of all others."""
        missing, paused = -self.states, list[Request]()
        for request in reversed(lanes[1:]):
            if missing <= 0:
                break
            paused.append(request)
            missing -= self.states_of(request)
        return paused


def _last_tokens(request: Request) -> int:
    """Last tokens of ended threads to which others will attend."""
    if not (sequence := request.sequence).can_fork:
        return 0
    ended = [
        (thread, count) for thread, count in zip(sequence.threads, sequence.needed(), strict=True) if thread.state is State.ENDED
    ]
    return sum(thread.num_tokens == count > 0 for thread, count in ended)


class Memory:
    """The slots of the stages' KV pools, and their states and stashes of recurrent layers; None for no limit of these. Requests
    are given in the order in which they are served; about ``knee`` rows enter at a timestep.
    """

    def __init__(self, kv: KVManager, knee: int, sizes: LaneSizes = LaneSizes(), states: StateCounts | None = None) -> None:
        self.stashes = Stashes(states)
        self._kv = kv
        self._knee = knee
        self._sizes = sizes
        self._spared = 0  # free slots reserved for certain rows

    def claims(self, requests: Collection[Request]) -> list[Claim]:
        """The claims of requests with a lane, and of waiting requests that fit, as far as there is memory."""
        lanes = [request for request in requests if request.has_lane]
        self._spared = len(lanes) * self._kv.block
        self.stashes.count(lanes)
        claims: list[Claim] = []
        prompt_rows = 0
        opening, is_full = 0, False
        for request in requests:
            if request.has_lane:
                claim = self._fitted(request, request.claim())
            else:
                is_full = is_full or prompt_rows >= self._knee or opening >= self.stashes.states
                cached = None if is_full else self._cached_for(request, lanes)
                if cached is None:
                    is_full = True
                    continue
                claim = request.claim(cached)
                opening += 1
            prompt_rows += claim.prompt
            claims.append(claim)
        return claims

    def open(self, request: Request) -> Lease | None:
        """Give a request its first slots; None if there is no room now."""
        if self.stashes.states <= 0:
            return None
        lease = self._kv.allocate(request.number, request.adopts, request.to_reserve(self._sizes.ahead))
        self.stashes.states -= lease is not None
        return lease

    def room_for(self, request: Request, rows: int) -> int:
        """How many of ``rows`` rows fit into a lane, which grows if there is memory."""
        rows = self.stashes.take(request.number, rows)
        free = request.free_slots
        if free < rows <= free + self._spare:
            free += self._grow(request, rows - free)
        return min(rows, free)

    def to_pause(self, requests: Sequence[Request]) -> list[Request]:
        """The last request with a lane if memory is short. One at a time: pausing it may be enough. If there are too few states
        for threads that have been opened, as many of the last requests as hold these.
        """
        lanes = [request for request in requests if request.has_lane]
        if not lanes:
            return []
        self.stashes.count(lanes)
        if paused := self.stashes.to_pause(lanes):
            return paused
        is_short = len(lanes) > 1 and self._is_short(lanes)
        is_short = is_short or (len(lanes) < len(requests) and self._is_in_the_way(lanes, requests))
        return [lanes[-1]] if is_short else []

    def _cached_for(self, request: Request, lanes: Sequence[Request]) -> int | None:
        """The number of cached tokens that a waiting request could adopt now; None if it cannot open."""
        if request.phase is Phase.PAUSING or self.stashes.states <= 0:
            return None
        growth = (min(max(lane.most - self._kv.slots_of(lane.number), 0), self._sizes.growth) for lane in lanes)
        return self._kv.cached_for(request.adopts, request.to_reserve(self._sizes.ahead) + sum(growth))

    def _fitted(self, request: Request, claim: Claim) -> Claim:
        """``claim``, of a request with a lane, reduced to what memory allows."""
        demand = claim.demand
        if request.phase is Phase.PREFILLING or not (claim.entering or demand.chances):
            return claim
        free = self._kv.slots_of(request.number) - request.past - request.method.in_flight
        needed = request.method.certain_rows(demand)
        if needed > free:
            free += self._grow(request, needed - free)
        request.free_slots = free
        rows = self.stashes.reserve(request.number, claim.entering)
        if (free < needed and (demand.whole or free <= 0)) or (rows < claim.entering and (demand.whole or not rows)):
            return Claim(claim.number, claim.priority, waited=claim.waited)
        if rows < claim.entering:
            claim = replace(claim, demand=replace(demand, certain=rows, most=rows))
            demand = claim.demand
        most = free + self._spare
        if most >= max(self._knee, demand.most or 0):
            return claim
        return replace(claim, demand=replace(demand, certain=min(demand.certain, most), most=min(most, demand.most or most)))

    def _is_short(self, lanes: Sequence[Request]) -> bool:
        """Whether not all certain rows would fit even if no other rows were in flight."""
        free, block = self._kv.free_slots, self._kv.block
        if free >= sum(max(self._knee, request.method.together, len(request.sequence.threads)) + block for request in lanes):
            return False
        for request in lanes:
            slots = self._kv.slots_of(request.number) - request.past
            if request.phase is Phase.PREFILLING or request.is_idle or slots >= max(self._knee, request.method.together):
                continue
            missing = request.method.certain_rows(request.method.demand()) - slots
            free -= -(-max(missing, 0) // block) * block
        return free < 0

    def _is_in_the_way(self, lanes: Sequence[Request], requests: Sequence[Request]) -> bool:
        """Whether the first waiting request could open if the last of ``lanes``, whose priority is worse, gave up its memory."""
        waiting = next((request for request in requests if not request.has_lane), None)
        if waiting is None or waiting.phase is Phase.PAUSING or waiting.priority >= lanes[-1].priority:
            return False
        if self._cached_for(waiting, lanes) is not None:
            return False
        staying = [request for request in lanes if request.priority <= waiting.priority]
        if sum(map(self.stashes.states_of, staying)) >= self.stashes.counts.states:
            return False
        stays = sum(self._kv.slots_of(request.number) for request in staying)
        return self._kv.capacity - stays >= waiting.to_reserve(self._sizes.ahead)

    @property
    def _spare(self) -> int:
        """Free slots for candidates."""
        return max(self._kv.free_slots - self._spared, 0)

    def _grow(self, request: Request, rows: int) -> int:
        """Give a lane slots for ``rows`` more rows. Returns the number given: 0 if there is no memory."""
        slots = self._kv.slots_of(request.number)
        growth = self._sizes.growth
        more = growth if self._spare >= rows + growth else 0
        new = self._kv.grow(request.number, slots + rows + more)
        if not new:
            return 0
        request.new_slots += new
        return self._kv.slots_of(request.number) - slots
