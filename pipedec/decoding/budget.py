"""How the rows of a timestep are shared by the running requests.

A timestep has room for as many rows as the stages compute in about the time of one. Rows of accepted tokens come first, since
each of them is certain to be needed; then chunks of prompts, and candidates in order of the chance that they are accepted, part
of the room evenly and part by chance. So speculation glides to zero as requests fill the pipeline, without a threshold. Rows that
must enter together wait their turn. Knows neither methods nor tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from math import ceil

RESERVED = 8  # one row in so many is left for prompts, however many certain rows there are

# Whether, after so many rows, one more is worth its time, of which each running request may expect so many tokens.
Pays = Callable[[int, float], bool]


@dataclass(frozen=True)
class Demand:
    """The rows that a method would let enter at the next timestep.

    Attributes:
        certain: rows of accepted tokens, of which some may enter and others wait.
        whole: rows that enter together or not at all.
        chances: of further rows, best first. Only as many are asked for as have a chance to enter.
        most: maximum rows that the request itself has set; None if it leaves them to the budget. Alone, it gets all of them,
            whether they pay or not.
    """

    certain: int = 0
    whole: int = 0
    chances: Iterable[float] = ()
    most: int | None = None


@dataclass(frozen=True)
class Claim:
    """One request's demand.

    Attributes:
        number: of the request.
        priority: lower ones are served first.
        prompt: rows of its prompt that have yet to enter, some now and the others later.
        tail: the last of these rows, which enter together.
    """

    number: int
    priority: int = 0
    demand: Demand = Demand()
    prompt: int = 0
    tail: int = 1

    @property
    def entering(self) -> int:
        """Rows that must not wait for good."""
        return self.demand.whole or self.demand.certain


class Budget:
    """Shares the rows of one timestep after the other. Claims are given in order of arrival.

    Args:
        knee: rows that the stages compute in about the time of one.

    Attributes:
        refused: the chance of the best candidate that had to wait in the last timestep; 0 if all entered.
    """

    def __init__(self, knee: int) -> None:
        self.knee = knee
        self.refused = 0.0
        self._timestep = 0
        self._waiting_since: dict[int, int] = {}  # by request: the timestep at which it was first refused what must enter

    def forget(self, number: int) -> None:
        """A request has ended."""
        self._waiting_since.pop(number, None)

    def share(self, claims: Sequence[Claim], pays: Pays) -> dict[int, int]:
        """By request, the rows that it may let enter at the next timestep; those that get none are left out.

        Never more than the room there is, unless the rows of a single request that must enter together are more than that: then
        they enter alone.
        """
        self._timestep += 1
        self.refused = 0.0
        room = self._room(claims)
        granted = self._share_certain(claims, room)
        if sum(granted.values()) < room:
            rows = sum(granted.values()) + _for_prompts(claims, room - sum(granted.values()))
            self.refused = _Candidates(claims, granted, pays, rows, room).share()
            _share_prompts(claims, granted, room - sum(granted.values()))
        for claim in claims:
            self._note(claim, granted.get(claim.number, 0))
        return granted

    def _room(self, claims: Sequence[Claim]) -> int:
        """Rows of the timestep. A request alone may set more than there is room for in company."""
        if len(claims) == 1 and claims[0].demand.most is not None:
            return max(self.knee, claims[0].demand.most)
        return self.knee

    def _share_certain(self, claims: Sequence[Claim], room: int) -> dict[int, int]:
        """Who has waited longest comes first, so nobody waits for good."""
        left = room - min(sum(claim.prompt for claim in claims), room // RESERVED)
        waiting_prompt = min((self._since(claim) for claim in claims if claim.prompt), default=self._timestep)
        granted: dict[int, int] = {}
        for claim in sorted((claim for claim in claims if claim.entering), key=self._turn):
            demand = claim.demand
            if demand.whole > left and not granted and self._since(claim) <= waiting_prompt:
                return {claim.number: demand.whole}
            count = min(demand.certain, left) if not demand.whole else demand.whole * (demand.whole <= left)
            if count:
                granted[claim.number] = count
                left -= count
        return granted

    def _turn(self, claim: Claim) -> tuple[int, int, bool]:
        return claim.priority, self._since(claim), claim.demand.whole > 0

    def _since(self, claim: Claim) -> int:
        """The timestep since which it has waited."""
        return self._waiting_since.get(claim.number, self._timestep)

    def _note(self, claim: Claim, granted: int) -> None:
        """Remember since when a request waits."""
        if granted >= max(claim.entering, min(claim.prompt, 1)):
            self._waiting_since.pop(claim.number, None)
        else:
            self._waiting_since.setdefault(claim.number, self._timestep)


class _Candidates:
    """The candidates of all requests.

    Args:
        granted: by request, rows that enter; those of candidates are added.
        rows: that enter besides candidates.
        room: for both.
    """

    def __init__(self, claims: Sequence[Claim], granted: dict[int, int], pays: Pays, rows: int, room: int) -> None:
        self._running = sum(not claim.prompt for claim in claims)
        self._queues = [queue for claim in claims if (queue := _Queue(claim, granted.get(claim.number, 0))).chance is not None]
        self._granted = granted
        self._pays: Pays = _always if len(claims) == 1 and claims[0].demand.most is not None else pays
        self._rows = rows
        self._room = room
        self._refused = 0.0

    def share(self) -> float:
        """Half of the room evenly, the rest by chance. Returns the chance of the best candidate that has to wait, or 0."""
        if self._queues:
            self._take_best((self._room - self._rows) // (2 * len(self._queues)))
            self._take_best(self._room)
        if self._rows < self._room:
            return self._refused
        return max([self._refused, *(queue.chance for queue in self._queues if queue.chance is not None)])

    def _take_best(self, most: int) -> None:
        """Let the most probable candidates enter as long as they pay, but of each request at most so many in all."""
        heap = [queue for queue in self._queues if queue.chance is not None and queue.taken < most]
        heapify(heap)
        while heap and self._rows < self._room:
            queue = heap[0]
            assert queue.chance is not None
            if not self._pays(self._rows, queue.chance / self._running):
                self._refused = max(self._refused, queue.chance)
                heappop(heap)
                continue
            queue.take()
            self._rows += 1
            self._granted[queue.number] = self._granted.get(queue.number, 0) + 1
            if queue.chance is None or queue.taken >= most:
                heappop(heap)
            else:
                heapreplace(heap, queue)


class _Queue:
    """The candidates of one request, best first.

    Attributes:
        chance: of the next one; None if there are no more, or the request may not let more rows enter.
        key: orders the queues; lower ones come first.
        taken: number of those that enter.
    """

    def __init__(self, claim: Claim, certain: int) -> None:
        self.number = claim.number
        self.taken = 0
        self._priority = claim.priority
        demand = claim.demand
        self._left = 0 if certain < demand.certain else demand.most - certain if demand.most is not None else -1
        self._chances = iter(demand.chances)
        self._advance()

    def take(self) -> None:
        """The next candidate enters."""
        self.taken += 1
        self._left -= 1
        self._advance()

    def _advance(self) -> None:
        self.chance: float | None = next(self._chances, None) if self._left else None
        self.key = self._priority, -(self.chance or 0.0)

    def __lt__(self, other: _Queue) -> bool:
        return self.key < other.key


def _always(rows: int, tokens: float) -> bool:
    return True


def _for_prompts(claims: Sequence[Claim], free: int) -> int:
    """Rows that prompts get before candidates: half of those that are free, or more if most requests are yet to be prefilled."""
    prefilling = sum(claim.prompt > 0 for claim in claims)
    share = max(prefilling / max(len(claims), 1), 0.5)
    return min(sum(claim.prompt for claim in claims), ceil(free * share))


def _share_prompts(claims: Sequence[Claim], granted: dict[int, int], room: int) -> None:
    """Add rows of prompts to ``granted``, those of the first request first."""
    for claim in sorted(claims, key=lambda claim: claim.priority):
        count = claim.prompt if claim.prompt <= room else min(room, claim.prompt - claim.tail)
        if count:
            granted[claim.number] = granted.get(claim.number, 0) + count
            room -= count
