"""The requests and answers of one client: what is asked of a run, and how replies are understood, blocking or with asyncio.

Has no connection: it asks one that waits in its own way.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from typing import Protocol, TypeVar

from pipedec.client.reply import OnDelta, Reply, TokenArrivals
from pipedec.core.errors import OutOfDescriptors, PipedecError, QueueFull, RankLost, SchedulerBusy, SchedulerLost
from pipedec.live.reading import READ_SECONDS, STATS_SECONDS, Frame, LiveReading
from pipedec.messages.events import AbortEvent
from pipedec.messages.request import PromptRequest
from pipedec.scheduler import RunStatus, calls
from pipedec.scheduler.calls import Call
from pipedec.scheduler.keys import Keys
from pipedec.topology import Topology, rank_name

LOOK_SECONDS = 2.0  # between two checks of the state of the run
_QUIET_LOOK_SECONDS = 0.5  # the same while no event arrives
SILENCE_SECONDS = 600.0  # how long to wait for the next event of an answer before the cluster counts as lost
OUTAGE_SECONDS = 10.0  # how long Redis may be away
_RETRY_SECONDS = 0.1  # between two attempts to reach Redis

_T = TypeVar("_T")


class Connection(Protocol):
    """Executes calls. One that blocks never suspends its coroutines, which so end when they are first resumed."""

    async def ask(self, call: Call[_T]) -> _T: ...

    async def pause(self, seconds: float) -> None: ...


class Session:
    """The requests of one client and their answers. While the run recovers, or Redis is away, it waits.

    Args:
        check: called now and then; raises if the cluster is known to be in trouble (``LocalCluster.check``).
        silence_seconds: how long to wait for the next event of an answer before the cluster counts as lost.
        owner: of the requests; empty for none.

    Attributes:
        open: the answers that have not ended, by the numbers of their requests.
        status: the latest state of the run; None before the first.
    """

    def __init__(
        self, connection: Connection, keys: Keys, topology: Topology, check: Callable[[], None],
        silence_seconds: float = SILENCE_SECONDS, owner: str = "",
    ) -> None:  # fmt: skip
        self.open: dict[int, Reply] = {}
        self.status: RunStatus | None = None
        self._ask, self._pause = connection.ask, connection.pause
        self._keys, self._topology, self._owner = keys, topology, owner
        self._check = check
        self._silence_seconds = silence_seconds
        self._recovers = False  # whether lost ranks are replaced, as far as is known
        self._away_since: float | None = None  # since when Redis is away; monotonic
        self._look_at = 0.0  # when to look at the state of the run next
        self._woken = "0"  # position of the last wake-up

    async def submit(self, request: PromptRequest, on_delta: OnDelta) -> Reply:
        """Submit a request, again if it may not have arrived; ``turn`` then follows its answer. Raises as ``calls.submit``."""
        arrivals = TokenArrivals()  # the clock starts before the request is sent
        request, operation = request.seeded(), secrets.token_hex(8)
        call = calls.submit(self._keys, request.to_json(), request.priority, operation, self._owner)
        while True:
            try:
                number = await self._ask(call)
                break
            except (QueueFull, SchedulerBusy):
                raise
            except SchedulerLost as error:
                await self._bear(error)
        reply = self.open[number] = Reply(number, on_delta, operation=operation, arrivals=arrivals)
        return reply

    async def turn(self, seconds: float, looks: bool = False) -> list[Reply]:
        """Look at the run if that is due, or ``looks``, and wait at most ``seconds`` for events of open answers or a wake-up.
        Returns the replies that have ended, which are not open any more; their answers are yet to be closed.

        Raises:
            RankLost, SchedulerLost: the run has failed or ended, or stopped answering.
        """
        heard = calls.Heard([], self._woken)
        try:
            if looks or time.monotonic() > self._look_at:
                await self._look()
            last = {number: reply.position for number, reply in self.open.items()}
            heard = await self._ask(calls.read_answers(self._keys, last, seconds, self._owner, self._woken))
        except SchedulerLost as error:
            await self._bear(error)
        self._woken = heard.woken
        for number, position, event in heard.events:
            if isinstance(event, AbortEvent):
                self._check()  # the supervisor knows better than other ranks how a process ended
            if (reply := self.open.get(number)) is not None:
                reply.take(position, event)
        if not heard.events:
            self._check()
            self._look_at = min(self._look_at, time.monotonic() + _QUIET_LOOK_SECONDS)
        ended = [reply for reply in self.open.values() if reply.has_ended]
        for reply in ended:
            del self.open[reply.number]
        return ended

    async def close(self, reply: Reply) -> None:
        """Delete the answer, which has ended or is no longer wanted."""
        await self._ask(calls.close_answer(self._keys, reply.number, reply.operation))

    async def cancel(self, reply: Reply) -> None:
        """End a request; its answer continues until the cluster has ended it."""
        await self._ask(calls.cancel(self._keys, reply.number))

    async def give_up(self, *replies: Reply) -> None:
        """End requests whose answers are no longer wanted."""
        for reply in replies:
            await self.cancel(reply)
            await self.close(reply)

    async def read_status(self) -> RunStatus:
        """The state of the run. Raises RankLost if it has failed or ended."""
        status = self.status = await self._ask(calls.status(self._keys, self._topology))
        self._away_since = None
        if status.failure is not None:
            raise RankLost(status.failure)
        if status.expired and not status.recovers:
            raise RankLost(f"{', '.join(map(rank_name, status.expired))} stopped answering")
        if status.state == "gone":
            raise RankLost("the cluster was stopped before it answered, or its Redis lost its data (set appendonly yes there)")
        self._recovers = status.recovers and status.state == "up"
        return status

    async def live(self, feed: LiveReading) -> list[Frame]:
        """The next batch of the live feed (docs/live.md); figures once a second in any case. None while Redis is away.

        Raises:
            RankLost, SchedulerLost: the run has failed or ended, or stopped answering.
        """
        try:
            if not feed.position:
                feed.position = await self._ask(calls.live_position(self._keys))
                await self._ask(calls.begin_watching(self._keys))
            if time.monotonic() > feed.renewed + STATS_SECONDS:
                feed.renewed = time.monotonic()
                if not await self._ask(calls.go_on_watching(self._keys)):
                    await self._ask(calls.begin_watching(self._keys))
                return [feed.stats(await self.read_status())]
            frames = list[Frame]()
            for shown in await self._ask(calls.read_live(self._keys, feed.position, READ_SECONDS)):
                feed.position = shown.position
                if (gap := feed.missed(shown)) is not None:
                    await self._ask(calls.begin_watching(self._keys))
                    frames.append(gap)
                frames += feed.on_batch(shown)
            return frames
        except SchedulerLost as error:
            feed.position = ""
            await self._bear(error)
            return []

    async def _look(self) -> None:
        """Raises as ``read_status``, and RankLost if an answer has been silent for too long without waiting."""
        self._check()
        status = await self.read_status()
        for reply in self.open.values():
            reply.run_recovers(status.is_recovering)
        _check_silence(status, self.open.values(), self._silence_seconds)
        self._look_at = time.monotonic() + LOOK_SECONDS

    async def _bear(self, error: PipedecError) -> None:
        """Redis is away: wait before the next attempt. Raises ``error`` if that has lasted for too long, or if lost ranks are not
        replaced.
        """
        self._check()
        now = time.monotonic()
        if not isinstance(error, OutOfDescriptors):
            self._away_since = self._away_since or now
            if not self._recovers or now > self._away_since + OUTAGE_SECONDS:
                raise error
        for reply in self.open.values():
            reply.run_recovers(True)
        await self._pause(_RETRY_SECONDS)


def _check_silence(status: RunStatus, replies: Iterable[Reply], seconds: float) -> None:
    """Raises RankLost if an answer has been silent for ``seconds`` without waiting for others."""
    now = time.monotonic()
    for reply in replies:
        if reply.waits or (status.running and reply.number not in status.running):
            reply.heard = now  # it waits while others are answered
        elif now > reply.heard + seconds and not reply.has_ended:
            raise RankLost(f"no event has arrived for {seconds:.0f} s; see pipedec status")
