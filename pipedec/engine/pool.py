"""The running requests on rank 0: what of each enters at the next timestep, and who gets what has come out.

Knows no row, no method and no memory: the company decides which rows enter, and which requests must wait. Numbers of requests
never repeat, so a late result of a request that has ended is simply void, and nothing has to drain for another one to begin. A
request that is paused opens its lanes anew under the same number, but only once every stage has closed the old ones.
"""

from __future__ import annotations

from typing import Protocol

from msgspec.structs import replace

from pipedec.core import Envelope, Opening, Request, Step, TokenLogprobs, Update, Verdict
from pipedec.decoding import Company, RequestState
from pipedec.threads import NewSequence


class Reader(Protocol):
    """What becomes of a request's tokens."""

    def waits(self) -> None:
        """There is no KV memory for the request now: it begins later, or, if it has begun, it is paused."""

    def interrupted(self) -> None:
        """Its lanes are lost: it waits, and goes on when it is opened again."""

    def opened(self, opening: Opening) -> None:
        """The request begins, or goes on after a pause. An answer in threads is said again from its first token on."""

    def entered(self, step: Step) -> None:
        """Rows of the request enter the pipeline."""

    def take(self, result: Update, timestep: int) -> Verdict:
        """Take what the last stage says in ``timestep``; returns its verdict, cut and finished where the answer ends earlier."""

    def scored(self, logprobs: TokenLogprobs) -> None:
        """The log-probabilities of the next tokens of the prompt, from the second one on; each once."""

    def corrupted(self, stage: int) -> None:
        """The answer ends, because this stage was the first to compute NaN or infinity for it."""

    def ended(self, reason: str, method: RequestState) -> None:
        """The answer has ended; ``method`` has followed its last verdict. Every stage will have with the next envelope."""

    def closed(self) -> None:
        """Every stage has closed the request's lane."""


class _Scored:
    """How many tokens of a prompt have log-probabilities that its reader knows; after a pause they come again."""

    def __init__(self) -> None:
        self._told = 0
        self._come = 0  # since the lane was opened

    def begin(self) -> None:
        """A lane is opened."""
        self._come = 0

    def new(self, logprobs: TokenLogprobs) -> TokenLogprobs:
        """Those that the reader does not know."""
        known = max(self._told - self._come, 0)
        self._come += len(logprobs)
        self._told = max(self._told, self._come)
        return logprobs[known:]


class Pool:
    """Requests between their arrival and the closing of their lanes.

    Attributes:
        company: the methods of all running requests, and their memory.
    """

    def __init__(self, company: Company) -> None:
        self.company = company
        self._running: dict[int, Reader] = {}  # those that wait for memory among them
        self._new: set[int] = set()  # those that have arrived since the last timestep
        self._begun: set[int] = set()  # those of which the stages know
        self._pausing: set[int] = set()  # those whose lanes the stages have yet to close
        self._closing: dict[int, Reader] = {}  # ended; the stages have yet to say that they have closed the lane
        self._updates: dict[int, Update] = {}  # verdicts of which the stages have yet to be told
        self._scored: dict[int, _Scored] = {}

    @property
    def is_busy(self) -> bool:
        """Whether requests are running."""
        return bool(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def open(self, request: Request, new_sequence: NewSequence, reader: Reader) -> None:
        """Begin a request; its prompt enters as soon as there is memory for it.

        Args:
            new_sequence: makes the sequence of the answer for its method, again if an answer in threads is said again.

        Raises:
            UserError: the method cannot run here.
        """
        self.company.open(request, new_sequence)
        self._running[request.number] = reader
        self._new.add(request.number)

    @property
    def numbers(self) -> frozenset[int]:
        """Of the running requests."""
        return frozenset(self._running)

    def interrupt(self) -> None:
        """All lanes are lost, and every result that is under way: running requests go on behind what they have said."""
        self.company.interrupt()
        self.closed()
        self._updates.clear()
        self._pausing.clear()
        self._begun.clear()
        for reader in self._running.values():
            reader.interrupted()

    def drop(self, number: int) -> None:
        """Forget a running request that has no lane; its reader hears nothing of it."""
        self.company.close(number)
        del self._running[number]
        self._scored.pop(number, None)
        self._new.discard(number)

    def cancel(self, number: int) -> None:
        """End a request, whatever it is doing. Nothing happens if it is not running."""
        if number not in self._running:
            return
        self._leave(number, "cancelled")

    def _leave(self, number: int, reason: str) -> None:
        method = self.company.state(number)
        self.company.close(number)
        if number in self._begun:
            self._close_lanes(number, reason)
        self._end(number, reason, method)

    def entering(self) -> Envelope:
        """What enters at the next timestep."""
        for number in self.company.to_pause():
            self._pause(number)
        updates, self._updates = self._updates, {}
        for number, update in self.company.propose().items():
            told = updates.get(number)
            updates[number] = update if told is None else replace(update, verdict=told.verdict)
            self._enter(number, update)
        for number in self._new - self._begun:
            self._running[number].waits()
        self._new.clear()
        return Envelope(tuple(updates.values()))

    def take(self, result: Update, timestep: int) -> Verdict | None:
        """Take a result of the last stage. Returns the verdict as far as the answer goes; None if nobody waits for it."""
        number = result.number
        if result.prompt_logprobs and number in self._running and number not in self._pausing:
            self._running[number].scored(self._scored[number].new(result.prompt_logprobs))
        if number not in self._running or number in self._pausing or result.verdict is None:
            if result.verdict is not None and result.verdict.finished is not None and not result.verdict.tokens:
                self._lanes_closed(number, result.verdict.finished)
            return None
        if result.verdict.bad_stage is not None:
            self.company.tally.corrupted += 1
            self._running[number].corrupted(result.verdict.bad_stage)
            self._leave(number, "corrupted")
            self.company.kv.forget_kept()  # its rows are no prefix for others
            return result.verdict
        method = self.company.state(number)
        verdict = self._running[number].take(result, timestep)
        self.company.apply(number, verdict)
        self._updates[number] = Update(number, verdict=verdict)
        if verdict.finished is not None:
            self._end(number, verdict.finished, method)
        return verdict

    def closed(self) -> None:
        """Every stage has closed all lanes."""
        closing, self._closing = self._closing, {}
        for reader in closing.values():
            reader.closed()

    def _enter(self, number: int, update: Update) -> None:
        reader = self._running[number]
        if update.opening is not None:
            self._begun.add(number)
            self._scored.setdefault(number, _Scored()).begin()
            reader.opened(update.opening)
        if update.step is not None:
            reader.entered(update.step)

    def _pause(self, number: int) -> None:
        self.company.pause(number)
        self._close_lanes(number, "paused")
        self._pausing.add(number)
        self._running[number].waits()

    def _close_lanes(self, number: int, reason: str) -> None:
        """Tell the stages, with what the request has accepted since they were told last."""
        known = self._updates.get(number, Update(number)).verdict or Verdict()
        self._updates[number] = Update(number, verdict=Verdict(known.accepted, reason))

    def _lanes_closed(self, number: int, reason: str) -> None:
        """The last stage has closed the lane, and so every stage has."""
        if reason == "paused" and number in self._pausing:
            self._pausing.discard(number)
            self.company.closed(number)
        elif reason != "paused" and number in self._closing:
            self._closing.pop(number).closed()

    def _end(self, number: int, reason: str, method: RequestState) -> None:
        reader = self._running.pop(number)
        self._scored.pop(number, None)
        self._new.discard(number)
        self._pausing.discard(number)
        reader.ended(reason, method)
        if number in self._begun:
            self._begun.discard(number)
            self._closing[number] = reader
        else:
            reader.closed()
