"""The decode loop (propose, advance, accept, apply) and its pool of running requests. The only place that decodes.

A driver of the loop is a ``Pipeline``: ``local`` (one process, no Redis) or ``rank_zero`` (a cluster). The pool collects what
enters at the next timestep, and distributes the results that come out. It knows no row, no method and no memory: the batch
decides which rows enter, and which requests must wait. Numbers of requests never repeat, so a late result of a request that
has ended is ignored, and the pipeline need not drain before another one begins. A paused request opens new lanes under the same
number, but only once every stage has closed the old ones.

Loop and pool emit records of events to listeners: counters, traces, the publisher of answers, the live feed. Other ranks keep
records of their own timesteps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from msgspec import Struct
from msgspec.structs import replace

from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import EMPTY, NewRequest, RequestUpdate, StageMessage, TokenLogprobs
from pipedec.core.verdict import Verdict
from pipedec.decoding import Batch, RequestState, TimestepTiming
from pipedec.engine.recorder import TimedSpan, TimestepLoad
from pipedec.threads import NewSequence


class Pipeline(Protocol):
    """The stages as rank 0 sees them."""

    def advance(self, number: int, entering: StageMessage, passage: int, meanwhile: Callable[[], None]) -> Timestep:
        """Move every stage on by one timestep, the ``number``-th; ``meanwhile`` is rank 0's own work while the stages
        compute.

        ``entering`` has for each request concerned its opening, the verdict that the stages have yet to replay, and the rows
        that then enter the first stage: a chunk of the prompt, later rows of trees. The verdicts on them are among the results
        of the ``passage``-th timestep, counted from this one. So a timestep returns the results of one other, but of none or of
        several when the passage has changed: of several if none of them has results of the same request, since stages replay
        verdicts one by one. The passage is at least the number of groups.
        """

    def close(self, last: StageMessage) -> None:
        """Send the stages the verdicts that end the last answers. Rows in flight are not needed any more."""


def go_together(results: Iterable[RequestUpdate], more: Iterable[RequestUpdate]) -> bool:
    """Whether a timestep may return both: no request has results in either."""
    return not {one.number for one in results} & {one.number for one in more}


def decode(pool: RequestPool, pipeline: Pipeline, admit: Callable[[], None] = lambda: None) -> Iterator[tuple[int, Verdict]]:
    """Decode until no request is left; yields (request number, verdict) once its method has followed it. ``admit``, called before
    every timestep, opens and cancels requests.
    """
    for number in count(1):
        admit()
        if not pool.running:
            pipeline.close(pool.entering())
            pool.closed()
            return
        timestep = pipeline.advance(number, pool.entering(), pool.batch.passage, pool.batch.draft)
        if timestep.timing is not None:
            pool.batch.observe(timestep.timing)
        pool.emit(timestep)
        for result in timestep.results:
            verdict = None
            with pool.batch.faults.of(result.number):
                verdict = pool.take(result, number)
            if verdict is not None:
                yield result.number, verdict
        pool.end_failed()


@dataclass(slots=True)
class RunningRequest:
    """A request between its arrival and its end."""

    request: TokenizedRequest
    new_sequence: NewSequence
    opening: NewRequest | None = None  # of its lane; None without one
    is_prefilling: bool = True  # no verdict since the lane was opened
    is_known: bool = False  # the stages know of the request
    is_closing: bool = False  # it was paused, and some stages have yet to close the lane
    num_scored: int = 0  # tokens of the prompt whose log-probabilities were emitted; after a pause they come again
    num_come: int = 0  # tokens of the prompt whose log-probabilities have arrived since the lane was opened


class RequestPool:
    """Requests between their arrival and the closing of their lanes.

    Args:
        take: called with each result that has a verdict; returns the verdict, cut at a stop string if the answer ends there. None
            if no answer does.
    """

    def __init__(
        self, batch: Batch, take: Callable[[RequestUpdate], Verdict] | None = None, listeners: Iterable[Listener] = ()
    ) -> None:
        self.batch = batch  # the methods of all running requests, and their memory
        self.listeners = list(listeners)  # called with each record, in order
        self._take = take
        self.running: dict[int, RunningRequest] = {}  # by number, including those that wait for memory; read only
        self._new: list[int] = []  # arrived since the last timestep
        self._closing: list[int] = []  # ended; some stages have yet to close the lane
        self._updates: dict[int, RequestUpdate] = {}  # verdicts that the stages have yet to replay

    def emit(self, record: Record) -> None:
        for listen in self.listeners:
            listen(record)

    def open(self, request: TokenizedRequest, new_sequence: NewSequence) -> None:
        """Begin a request; its prompt enters as soon as there is memory. Raises UserError if its method cannot run here."""
        self.batch.open(request, new_sequence)
        self.running[request.number] = RunningRequest(request, new_sequence)
        self._new.append(request.number)

    def opened(self) -> list[RequestOpened]:
        """The running requests that have lanes, for a listener that joins late."""
        return [
            RequestOpened(number, one.request, one.new_sequence, one.opening, one.is_prefilling)
            for number, one in self.running.items()
            if one.opening is not None
        ]

    def entering(self) -> StageMessage:
        """The envelope of the next timestep: everything that enters."""
        for number in self.batch.to_pause():
            self.batch.pause(number)
            self._close_lanes(number, "paused")
            self.running[number].opening, self.running[number].is_closing = None, True
            self.emit(Waits(number))
        updates, self._updates = self._updates, {}
        proposed = self.batch.propose()
        self.end_failed()
        for number, update in proposed.items():
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
        """Take a result of the last stage. Returns the verdict as far as the answer goes; None without one, or if it is late."""
        number, verdict, one = result.number, result.verdict, self.running.get(result.number)
        if one is None or one.is_closing:
            if verdict is not None and verdict.finished is not None and not verdict.tokens and verdict.failure is None:
                self._note_closed(number, one, verdict.finished)
            return None
        if result.prompt_logprobs:
            first = max(one.num_scored - one.num_come, 0)
            one.num_come += len(result.prompt_logprobs)
            one.num_scored = max(one.num_scored, one.num_come)
            if new := result.prompt_logprobs[first:]:
                self.emit(PromptScored(number, new))
        if verdict is None:
            return None
        if verdict.failure is not None:
            self.batch.tally.corrupted += verdict.finished == "corrupted"
            self._fail(number, verdict.finished or "failed", verdict.failure)
            return verdict
        verdict = verdict if self._take is None else self._take(result)
        one.is_prefilling = False
        self.emit(Advanced(number, verdict, result.logprobs, timestep))
        state = self.batch.requests[number]
        self.batch.apply(number, verdict)
        self._updates[number] = RequestUpdate(number, verdict=verdict)
        if verdict.finished is not None:
            self._end(number, verdict.finished, state)
        return verdict

    def end_failed(self) -> None:
        """End the requests for which something has raised on this rank."""
        for number, failure in self.batch.faults.take().items():
            self._fail(number, "failed", failure)

    def _fail(self, number: int, reason: str, failure: str) -> None:
        self.cancel(number, reason, failure)
        self.batch.kv.forget_kept()  # its rows must not serve as a prefix

    def cancel(self, number: int, reason: str = "cancelled", failure: str | None = None) -> None:
        """End a request in any state, without a verdict for its method. No effect if it is not running."""
        if number not in self.running:
            return
        state = self.batch.requests[number]
        self.batch.close(number)
        if self.running[number].is_known:
            self._close_lanes(number, reason)
        self._end(number, reason, state, failure)

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

    def closed(self) -> None:
        """Note that every stage has closed all lanes."""
        closing, self._closing = self._closing, []
        for number in closing:
            self.emit(RequestClosed(number))
        self.emit(Drained())

    def _note_closed(self, number: int, one: RunningRequest | None, reason: str) -> None:
        """Note that the last stage, and so every stage, has closed the lane."""
        if reason == "paused" and one is not None and one.is_closing:
            one.is_closing = False
            self.batch.closed(number)
        elif reason != "paused" and number in self._closing:
            self._closing.remove(number)
            self.emit(RequestClosed(number))

    def _close_lanes(self, number: int, reason: str) -> None:
        """Close the request's lanes on all stages, with the tokens accepted since the last update."""
        known = self._updates.get(number, RequestUpdate(number)).verdict or Verdict()
        self._updates[number] = RequestUpdate(number, verdict=Verdict(known.accepted, reason))

    def _end(self, number: int, reason: str, state: RequestState, failure: str | None = None) -> None:
        one = self.running.pop(number)
        self.emit(RequestEnded(number, reason, state.hits, state.misses, failure))
        if one.is_known:
            self._closing.append(number)
        else:
            self.emit(RequestClosed(number))


# Records of events: a Timestep for the whole pipeline, the others for one request each. Listeners do not influence decoding.


@dataclass(frozen=True)
class Timestep:
    """One timestep of one rank. Its verdicts follow as ``Advanced`` records."""

    number: int  # counted from 1; in task dispatch 0 and less in prefill
    entered: StageMessage = EMPTY  # rank 0: the envelope that entered the pipeline
    results: tuple[RequestUpdate, ...] = ()  # rank 0: the last stage's results for the rows of the oldest timesteps in flight
    timing: TimestepTiming | None = None  # rank 0: how long the timestep took; None while the pipeline fills
    load: TimestepLoad | None = None  # the rows of every rank, if all are in this process
    spans: tuple[TimedSpan, ...] = ()  # the pieces of the rank's work
    overran: bool = False  # work took longer than on the emulated device


class Waits(Struct, frozen=True):
    """No KV memory is free for the request now: it begins later or, if it has begun, it is paused."""

    number: int


class Interrupted(Struct, frozen=True):
    """The request's lanes are lost: it waits, and continues when it is opened again."""

    number: int


class RequestOpened(Struct, frozen=True):
    """The request begins, or continues after a pause. An answer in threads is decoded again from its first token."""

    number: int
    request: TokenizedRequest
    new_sequence: NewSequence  # makes the sequence of the answer
    opening: NewRequest
    is_prefilling: bool = True  # no verdict yet. False only for a listener that joins later.


class Advanced(Struct, frozen=True):
    """Tokens were accepted; the method follows the verdict after this."""

    number: int
    verdict: Verdict  # as far as the answer goes
    logprobs: TokenLogprobs  # of the tokens that the last stage has accepted, if requested
    timestep: int  # its number


class PromptScored(Struct, frozen=True):
    """The log-probabilities of the next tokens of the prompt, from the second one on; each once."""

    number: int
    logprobs: TokenLogprobs


class RequestEnded(Struct, frozen=True):
    """The answer has ended, and the method has followed its last verdict. The next envelope informs the stages."""

    number: int
    reason: str
    hits: int
    misses: int
    failure: str | None = None  # what has gone wrong in a rank and has ended the answer


class RequestClosed(Struct, frozen=True):
    """No stage has a lane of the ended request."""

    number: int


class Drained(Struct, frozen=True):
    """No stage has a lane of any request."""


Record = Timestep | Waits | Interrupted | RequestOpened | Advanced | PromptScored | RequestEnded | RequestClosed | Drained
Listener = Callable[[Record], None]
