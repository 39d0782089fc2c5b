"""Who gets KV memory: which requests open, by how much lanes grow, and who is paused when memory runs short.

Certain rows come before candidates, and older requests before younger ones: so the oldest request of the best priority always
goes on, and nobody waits for good. Knows neither methods nor draft models.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pipedec.core import SlotRuns, UserError
from pipedec.decoding.budget import Claim
from pipedec.decoding.request_state import RequestState
from pipedec.kv import KVManager, Lease


@dataclass(frozen=True)
class LaneSizes:
    """How many slots lanes get before they need them.

    Attributes:
        ahead: most slots for tokens of the answer that a lane gets when it opens.
        growth: slots by which a lane grows if there is enough memory.
    """

    ahead: int = 1024
    growth: int = 128


class Memory:
    """The slots of the stages' KV pools.

    Args:
        knee: rows that usually enter at one timestep, at most.
    """

    def __init__(self, kv: KVManager, knee: int, sizes: LaneSizes = LaneSizes()) -> None:
        self._kv = kv
        self._knee = knee
        self._sizes = sizes
        self._grown: dict[int, SlotRuns] = {}  # by request: slots of which the stages have yet to be told
        self._lanes: list[RequestState] = []  # those that are open in this timestep
        self._spared = 0  # free slots that are kept for certain rows

    def clear(self) -> None:
        """The stages have lost what is in their pools, and no request has slots."""
        self._kv.clear()
        self._grown.clear()

    def check(self, one: RequestState) -> None:
        """Raises UserError if an answer can never fit."""
        capacity = self._kv.capacity
        if one.most > capacity:
            prompt, answer = len(one.request.prompt_token_ids), one.request.sampling.max_tokens
            raise UserError(
                f"the request needs {one.most:,} slots of KV cache ({prompt:,} for the prompt, {answer:,} for max_tokens, "
                f"{one.together:,} for rows that enter together), but there are {capacity:,}: shorten the prompt, lower "
                "max_tokens, or raise --kv-cache-memory"
            )

    def begin(self, requests: Iterable[RequestState]) -> None:
        """A timestep begins."""
        self._lanes = [one for one in requests if one.has_lane]
        self._spared = len(self._lanes) * self._kv.block

    def cached_for(self, one: RequestState) -> int | None:
        """How many tokens a waiting request would find cached if it opened now; None if it cannot."""
        if one.is_closing:
            return None
        growth = (min(max(lane.most - self._kv.slots_of(lane.number), 0), self._sizes.growth) for lane in self._lanes)
        return self._kv.cached_for(_adoptable(one), one.to_reserve(self._sizes.ahead) + sum(growth))

    def open(self, one: RequestState) -> Lease | None:
        """Give a request its first slots; None if there is no room now."""
        return self._kv.open(one.number, _adoptable(one), one.to_reserve(self._sizes.ahead))

    def fitted(self, one: RequestState, claim: Claim) -> Claim:
        """The claim of a request as far as there is memory for it."""
        if not one.has_lane or one.is_prefilling or not (claim.entering or claim.demand.chances):
            return claim
        demand, free = claim.demand, self._free_slots(one)
        needed = one.certain_rows(demand)
        if needed > free and self._grow(one, needed - free):
            free = self._free_slots(one)
        if free < needed and (demand.whole or free <= 0):
            return Claim(claim.number, claim.priority)
        most = free + self._spare
        if most >= max(self._knee, demand.most or 0):
            return claim
        return replace(claim, demand=replace(demand, certain=min(demand.certain, most), most=min(most, demand.most or most)))

    def room_for(self, one: RequestState, rows: int) -> int:
        """How many of ``rows`` rows may enter: all if there is memory, else those that fit."""
        free = self._free_slots(one)
        if rows > free and rows - free <= self._spare and self._grow(one, rows - free):
            return rows
        return min(rows, free)

    def take_grown(self) -> dict[int, SlotRuns]:
        """By request, slots that were given to its lane since the last call."""
        grown, self._grown = self._grown, {}
        return grown

    def to_pause(self, requests: Sequence[RequestState]) -> list[int]:
        """The youngest request of the lowest priority if memory is short; one at a time.

        Args:
            requests: in order of age.
        """
        lanes = [one for one in requests if one.has_lane]
        if not lanes:
            return []
        is_short = len(lanes) > 1 and self._is_short(lanes)
        is_short = is_short or (len(lanes) < len(requests) and self._is_in_the_way(lanes, requests))
        return [lanes[-1].number] if is_short else []

    def _is_short(self, lanes: Sequence[RequestState]) -> bool:
        """Whether there is not even room for all certain rows, with no other ones in flight."""
        free, block = self._kv.free_slots, self._kv.block
        if free >= sum(max(self._knee, one.together, len(one.sequence.threads)) + block for one in lanes):
            return False
        for one in lanes:
            slots = self._kv.slots_of(one.number) - one.past
            if one.is_prefilling or one.is_idle or slots >= max(self._knee, one.together):
                continue
            missing = one.certain_rows(one.demand()) - slots
            free -= -(-max(missing, 0) // block) * block
        return free < 0

    def _is_in_the_way(self, lanes: Sequence[RequestState], requests: Sequence[RequestState]) -> bool:
        """Whether the last of ``lanes`` has memory that a waiting request of a better priority lacks, and could have."""
        waiting = next((one for one in requests if not one.has_lane), None)
        if waiting is None or waiting.is_closing or waiting.request.priority >= lanes[-1].request.priority:
            return False
        self.begin(requests)
        if self.cached_for(waiting) is not None:
            return False
        stays = sum(self._kv.slots_of(one.number) for one in lanes if one.request.priority <= waiting.request.priority)
        return self._kv.capacity - stays >= waiting.to_reserve(self._sizes.ahead)

    def _free_slots(self, one: RequestState) -> int:
        """Slots of a lane in which there are no rows."""
        return self._kv.slots_of(one.number) - one.past - one.in_flight

    @property
    def _spare(self) -> int:
        """Free slots that candidates may have."""
        return max(self._kv.free_slots - self._spared, 0)

    def _grow(self, one: RequestState, rows: int) -> bool:
        """Give a lane slots for ``rows`` more rows. Returns whether there was memory."""
        slots = self._kv.slots_of(one.number) + rows
        growth = self._sizes.growth
        more = growth if self._spare >= rows + growth else 0
        new = self._kv.grow(one.number, slots + more)
        if new is None:
            return False
        self._grown[one.number] = self._grown.get(one.number, ()) + new
        return True


def _adoptable(one: RequestState) -> Sequence[int]:
    """The tokens of a request of which it may adopt those that are cached: none if their log-probabilities are requested."""
    return () if one.request.sampling.prompt_logprobs is not None else one.text
