"""The running requests on rank 0: collects what enters at the next timestep, and distributes the results that come out.

Knows no row, no method and no memory: the batch decides which rows enter, and which requests must wait. Numbers of requests never
repeat, so a late result of a request that has ended is ignored, and the pipeline need not drain before another one begins. A
request that is paused opens its lanes anew under the same number, but only once every stage has closed the old ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from pipedec.core import NewRequest, Request, RequestUpdate, StageMessage, TokenLogprobs, Verdict
from pipedec.decoding import Batch, RequestState
from pipedec.engine.records import (
    Advanced,
    Drained,
    Interrupted,
    Listener,
    PromptScored,
    Record,
    RequestClosed,
    RequestEnded,
    RequestOpened,
    Waits,
)
from pipedec.threads import NewSequence


@dataclass(slots=True)
class RunningRequest:
    """A request between its arrival and its end.

    Attributes:
        opening: of its lane; None without one.
        is_prefilling: no verdict since the lane was opened.
        is_known: the stages know of the request.
        is_closing: it was paused, and some stages have yet to close the lane.
        num_scored: tokens of the prompt whose log-probabilities were emitted; after a pause they come again.
        num_come: tokens of the prompt whose log-probabilities have arrived since the lane was opened.
    """

    request: Request
    new_sequence: NewSequence
    opening: NewRequest | None = None
    is_prefilling: bool = True
    is_known: bool = False
    is_closing: bool = False
    num_scored: int = 0
    num_come: int = 0


class RequestPool:
    """Requests between their arrival and the closing of their lanes.

    Args:
        take: cuts answers: called with each result that has a verdict, returns the verdict, cut and finished where the answer
            ends earlier. None if no answer does.

    Attributes:
        batch: the methods of all running requests, and their memory.
        running: requests by number, including those that wait for memory. Nothing else changes it.
        listeners: called with each record, in order.
    """

    def __init__(
        self, batch: Batch, take: Callable[[RequestUpdate], Verdict] | None = None, listeners: Iterable[Listener] = ()
    ) -> None:
        self.batch = batch
        self.listeners = list(listeners)
        self._take = take
        self.running: dict[int, RunningRequest] = {}
        self._new: list[int] = []  # arrived since the last timestep
        self._closing: list[int] = []  # ended; some stages have yet to close the lane
        self._updates: dict[int, RequestUpdate] = {}  # verdicts that the stages have yet to replay

    def opened(self) -> list[RequestOpened]:
        """The running requests that have lanes, for a listener that joins late."""
        return [
            RequestOpened(number, one.request, one.new_sequence, one.opening, one.is_prefilling)
            for number, one in self.running.items()
            if one.opening is not None
        ]

    def emit(self, record: Record) -> None:
        for listen in self.listeners:
            listen(record)

    def open(self, request: Request, new_sequence: NewSequence) -> None:
        """Begin a request; its prompt enters as soon as there is memory for it.

        Args:
            new_sequence: makes the sequence of the answer for its method; called again if an answer in threads is decoded again.

        Raises:
            UserError: the method cannot run here.
        """
        self.batch.open(request, new_sequence)
        self.running[request.number] = RunningRequest(request, new_sequence)
        self._new.append(request.number)

    def interrupt(self) -> None:
        """Discard all lanes, and every result on its way: running requests continue after their last accepted token."""
        self.batch.interrupt()
        self.closed()
        self._updates.clear()
        for number, one in self.running.items():
            one.opening, one.is_known, one.is_closing = None, False, False
            self.emit(Interrupted(number))

    def drop(self, number: int) -> None:
        """Forget a running request that has no lane."""
        self.batch.close(number)
        del self.running[number]
        self.emit(RequestClosed(number))

    def cancel(self, number: int) -> None:
        """End a request in any state. No effect if it is not running."""
        if number in self.running:
            self._leave(number, "cancelled")

    def _leave(self, number: int, reason: str, bad_stage: int | None = None) -> None:
        """End a request without a verdict for its method."""
        state = self.batch.requests[number]
        self.batch.close(number)
        if self.running[number].is_known:
            self._close_lanes(number, reason)
        self._end(number, reason, state, bad_stage)

    def entering(self) -> StageMessage:
        """The envelope of the next timestep: everything that enters."""
        for number in self.batch.to_pause():
            self._pause(number)
        updates, self._updates = self._updates, {}
        for number, update in self.batch.propose().items():
            known = updates.get(number)
            updates[number] = update if known is None else replace(update, verdict=known.verdict)
            if update.opening is not None:
                one = self.running[number]
                one.opening, one.is_known, one.is_prefilling, one.num_come = update.opening, True, True, 0
                self.emit(RequestOpened(number, one.request, one.new_sequence, update.opening))
        new, self._new = self._new, []
        for number in new:
            if number in self.running and not self.running[number].is_known:
                self.emit(Waits(number))
        return StageMessage(tuple(updates.values()))

    def take(self, result: RequestUpdate, timestep: int) -> Verdict | None:
        """Take a result of the last stage. Returns the verdict as far as the answer goes; None if the result is void."""
        number, verdict, one = result.number, result.verdict, self.running.get(result.number)
        if one is None or one.is_closing:
            if verdict is not None and verdict.finished is not None and not verdict.tokens:
                self._lanes_closed(number, verdict.finished)
            return None
        if result.prompt_logprobs:
            self._score(one, result.prompt_logprobs)
        if verdict is None:
            return None
        if verdict.bad_stage is not None:
            self.batch.tally.corrupted += 1
            self._leave(number, "corrupted", verdict.bad_stage)
            self.batch.kv.forget_kept()  # its rows must not serve as a prefix
            return verdict
        verdict = verdict if self._take is None else self._take(result)
        one.is_prefilling = False
        self.emit(Advanced(number, verdict, result.logprobs, timestep))
        state = None if verdict.finished is None else self.batch.requests[number]
        self.batch.apply(number, verdict)
        self._updates[number] = RequestUpdate(number, verdict=verdict)
        if verdict.finished is not None and state is not None:
            self._end(number, verdict.finished, state)
        return verdict

    def closed(self) -> None:
        """Note that every stage has closed all lanes."""
        closing, self._closing = self._closing, []
        for number in closing:
            self.emit(RequestClosed(number))
        self.emit(Drained())

    def _pause(self, number: int) -> None:
        self.batch.pause(number)
        self._close_lanes(number, "paused")
        one = self.running[number]
        one.opening, one.is_closing = None, True
        self.emit(Waits(number))

    def _score(self, one: RunningRequest, logprobs: TokenLogprobs) -> None:
        known = max(one.num_scored - one.num_come, 0)
        one.num_come += len(logprobs)
        one.num_scored = max(one.num_scored, one.num_come)
        if new := logprobs[known:]:
            self.emit(PromptScored(one.request.number, new))

    def _close_lanes(self, number: int, reason: str) -> None:
        """Close the request's lanes on all stages, with the tokens accepted since the last update."""
        known = self._updates.get(number, RequestUpdate(number)).verdict or Verdict()
        self._updates[number] = RequestUpdate(number, verdict=Verdict(known.accepted, reason))

    def _lanes_closed(self, number: int, reason: str) -> None:
        """Note that the last stage, and so every stage, has closed the lane."""
        one = self.running.get(number)
        if reason == "paused" and one is not None and one.is_closing:
            one.is_closing = False
            self.batch.closed(number)
        elif reason != "paused" and number in self._closing:
            self._closing.remove(number)
            self.emit(RequestClosed(number))

    def _end(self, number: int, reason: str, state: RequestState, bad_stage: int | None = None) -> None:
        one = self.running.pop(number)
        self.emit(RequestEnded(number, reason, state.hits, state.misses, bad_stage))
        if one.is_known:
            self._closing.append(number)
        else:
            self.emit(RequestClosed(number))
