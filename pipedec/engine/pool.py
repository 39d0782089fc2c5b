"""The running requests on rank 0: what of each enters at the next timestep, and who gets what has come out.

Knows no row and no method: the company decides which rows enter. Numbers of requests never repeat, so a late result of a request
that has ended is simply void, and nothing has to drain for another request to begin.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from pipedec.core import Envelope, Opening, Request, Step, Update, Verdict
from pipedec.decoding import Company, Method
from pipedec.threads import Sequence


class Reader(Protocol):
    """What becomes of a request's tokens."""

    def entered(self, step: Step) -> None:
        """Rows of the request enter the pipeline."""

    def take(self, result: Update, timestep: int) -> Verdict:
        """Take what the last stage says in ``timestep``; returns its verdict, cut and finished where the answer ends earlier."""

    def ended(self, reason: str, method: Method) -> None:
        """The answer has ended; ``method`` has followed its last verdict. Every stage will have with the next envelope."""

    def closed(self) -> None:
        """Every stage has closed the request's lane."""


class Pool:
    """Requests between their opening and the closing of their lanes.

    Attributes:
        company: the methods of all running requests.
    """

    def __init__(self, company: Company) -> None:
        self.company = company
        self._running: dict[int, tuple[Method, Reader]] = {}
        self._closing: dict[int, Reader] = {}  # ended; the stages have yet to say that they have closed the lane
        self._updates: dict[int, Update] = {}  # openings and verdicts of which the stages have yet to be told

    @property
    def is_busy(self) -> bool:
        """Whether requests are running."""
        return bool(self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def open(self, request: Request, sequence: Sequence, reader: Reader) -> None:
        """Begin a request; its prompt enters from the next timestep on.

        Args:
            sequence: of the answer, just begun. Only the method passes accepted tokens to it.

        Raises:
            UserError: the method cannot run here.
        """
        method = self.company.open(request, sequence)
        self._running[request.number] = method, reader
        prompt_length, tokens_per_mask = len(request.prompt_token_ids), method.masks.named
        opening = Opening(prompt_length, request.sampling, tokens_per_mask, request.threads, request.trace)
        self._updates[request.number] = Update(request.number, opening)

    def cancel(self, number: int) -> None:
        """End a request, whatever it is doing. Nothing happens if it is not running."""
        if number not in self._running:
            return
        known = self._updates.pop(number, Update(number))
        self.company.close(number)
        if known.opening is None:
            accepted = () if known.verdict is None else known.verdict.accepted
            self._updates[number] = Update(number, verdict=Verdict(accepted, "cancelled"))
        self._end(number, "cancelled", lanes_are_open=known.opening is None)

    def entering(self) -> Envelope:
        """What enters at the next timestep."""
        updates, self._updates = self._updates, {}
        for number, step in self.company.propose().items():
            updates[number] = replace(updates.get(number, Update(number)), step=step)
            self._running[number][1].entered(step)
        return Envelope(tuple(updates.values()))

    def take(self, result: Update, timestep: int) -> Verdict | None:
        """Take a result of the last stage. Returns the verdict as far as the answer goes; None if nobody waits for it."""
        number = result.number
        if number not in self._running or result.verdict is None:
            if number in self._closing and result.verdict is not None and not result.verdict.tokens:
                self._closing.pop(number).closed()  # the last stage has closed the lane, and so every stage has
            return None
        verdict = self._running[number][1].take(result, timestep)
        self.company.apply(number, verdict)
        self._updates[number] = Update(number, verdict=verdict)
        if verdict.finished is not None:
            self._end(number, verdict.finished)
        return verdict

    def closed(self) -> None:
        """Every stage has closed all lanes."""
        closing, self._closing = self._closing, {}
        for reader in closing.values():
            reader.closed()

    def _end(self, number: int, reason: str, lanes_are_open: bool = True) -> None:
        method, reader = self._running.pop(number)
        reader.ended(reason, method)
        if lanes_are_open:
            self._closing[number] = reader
        else:
            reader.closed()
