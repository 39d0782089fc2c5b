"""Shares the rows of a timestep among the running requests.

A timestep has room for as many rows as the stages compute in about the time of one. Rows of accepted tokens come first, since
they are certain to be needed. Chunks of prompts and candidates share the rest; of the candidates' part, half is shared evenly and
half goes to the most probable ones. So speculation fades out as requests fill the pipeline, without a threshold. Rows that must
enter together wait their turn. Knows neither methods nor tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import ceil
from operator import attrgetter

RESERVED = 8  # one row in 8 is left for prompts, however many certain rows there are

# Whether one more row is worth its time, given the number of rows before it and the tokens it may yield per running request.
Pays = Callable[[int, float], bool]


@dataclass(frozen=True)
class Demand:
    """The rows that a method wants to enter at the next timestep."""

    certain: int = 0  # rows of accepted tokens; some may enter while others wait
    whole: int = 0  # rows that enter together or not at all
    chances: Iterable[float] = ()  # acceptance probabilities of further rows, best first. Read only as far as these may enter.
    most: int | None = None  # maximum rows set by the request, which gets them all if it is alone; None: the budget decides


@dataclass
class Claim:
    """One request's demand."""

    number: int  # of the request
    priority: int = 0  # lower ones are served first
    demand: Demand = Demand()
    prompt: int = 0  # rows of its prompt that have yet to enter, some now and the others later
    tail: int = 1  # the last of these rows, which enter together
    waited: int = 0  # timesteps in which rows that must enter have waited; ``Budget.share`` counts on

    @property
    def entering(self) -> int:
        """Rows that must not wait forever."""
        return self.demand.whole or self.demand.certain


class Budget:
    """Shares the rows of one timestep at a time. ``knee`` is how many rows the stages compute in about the time of one."""

    def __init__(self, knee: int) -> None:
        self.knee = knee
        self.refused = 0.0  # the chance of the best candidate that had to wait in the last timestep; 0 if all entered

    def share(self, claims: Sequence[Claim], pays: Pays) -> dict[int, int]:
        """The number of rows of each request that may enter at the next timestep, without requests that get none.

        Claims are in order of arrival. The sum never exceeds the available room, except for rows of a single request that must
        enter together: they enter alone.
        """
        self.refused = 0.0
        room, most = self.knee, claims[0].demand.most if len(claims) == 1 else None
        if most is not None:  # a request alone may set more rows than the shared room has, and they need not pay
            room = max(room, most)
        prompts = [claim for claim in claims if claim.prompt]
        prompt_rows = sum([claim.prompt for claim in prompts])
        granted = self._share_certain(claims, room - min(prompt_rows, room // RESERVED))
        rows = sum(granted.values())
        if rows < room:
            # Half of the free rows are reserved for prompts, or more if most requests have yet to be prefilled.
            reserved = min(prompt_rows, ceil((room - rows) * max(len(prompts) / len(claims), 0.5))) if prompts else 0
            queues = [_Queue(claim, granted.get(claim.number, 0)) for claim in claims if claim.demand.chances]
            if queues:
                running = len(claims) - len(prompts)
                self._share_candidates(queues, granted, None if most is not None else pays, running, rows + reserved, room)
            left = room - sum(granted.values())
            for claim in sorted(prompts, key=attrgetter("priority")):
                count = claim.prompt if claim.prompt <= left else min(left, claim.prompt - claim.tail)
                if count:
                    granted[claim.number] = granted.get(claim.number, 0) + count
                    left -= count
        for claim in claims:
            is_served = granted.get(claim.number, 0) >= max(claim.entering, min(claim.prompt, 1))
            claim.waited = 0 if is_served else claim.waited + 1
        return granted

    def _share_certain(self, claims: Sequence[Claim], left: int) -> dict[int, int]:
        """Share ``left`` rows. The request that has waited longest comes first, so none waits forever."""
        longest = max([claim.waited for claim in claims if claim.prompt], default=0)
        turns = [
            (claim.priority, -claim.waited, claim.demand.whole > 0, place) for place, claim in enumerate(claims) if claim.entering
        ]
        granted: dict[int, int] = {}
        for _, _, _, place in sorted(turns):
            number, demand = claims[place].number, claims[place].demand
            if demand.whole > left and not granted and claims[place].waited >= longest:
                return {number: demand.whole}
            count = demand.whole or min(demand.certain, left)
            if 0 < count <= left:
                granted[number] = count
                left -= count
        return granted

    def _share_candidates(
        self, queues: Sequence[_Queue], granted: dict[int, int], pays: Pays | None, running: int, rows: int, room: int
    ) -> None:
        """Add candidates to ``granted``: half of the room evenly, the rest by chance, if they pay for ``running`` requests."""
        queues = [queue for queue in queues if queue.chance is not None]
        for most in ((room - rows) // (2 * max(len(queues), 1)), room):  # candidates of each request
            heap = [(queue.priority, -queue.chance, queue) for queue in queues if queue.chance is not None and queue.taken < most]
            heapify(heap)
            while heap and rows < room:
                queue = heap[0][-1]
                assert queue.chance is not None
                if pays is not None and not pays(rows, queue.chance / running):
                    self.refused = max(self.refused, queue.chance)
                    heappop(heap)
                    continue
                rows += 1
                granted[queue.number] = granted.get(queue.number, 0) + 1
                queue.pop()
                if queue.chance is None or queue.taken >= most:
                    heappop(heap)
                else:
                    heapreplace(heap, (queue.priority, -queue.chance, queue))
        if rows >= room:
            self.refused = max([self.refused, *(queue.chance for queue in queues if queue.chance is not None)])


class _Queue:
    """The candidates of one request, best first, after its ``certain`` rows that enter."""

    def __init__(self, claim: Claim, certain: int) -> None:
        demand = claim.demand
        if certain < demand.certain:
            room: int | None = 0
        else:
            room = None if demand.most is None else max(demand.most - certain, 0)
        self.number = claim.number
        self.priority = claim.priority
        self.taken = -1  # before the first candidate, to which ``take`` advances
        self._chances = islice(demand.chances, room)
        self.pop()

    def pop(self) -> None:
        """Let the next candidate enter, and move to the one after it, whose ``chance`` is None if no more rows may enter."""
        self.taken += 1
        self.chance: float | None = next(self._chances, None)

    def __lt__(self, other: _Queue) -> bool:
        """Queues are compared only where priority and chance are equal: then they have no order."""
        return False
