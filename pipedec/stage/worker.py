"""The workers of the pipeline's stages: contiguous layers, and a lane for each running request.

A worker receives rows and verdicts of any number of requests. It computes all rows in one forward, holds its output until the
verdicts of the timestep have pruned it (PipeDec §3.4.3), and passes it on. Requests come and go at any timestep.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from pipedec.core import Envelope, Load, Opening, Step, Update, Verdict
from pipedec.model import KVCache, StageModel
from pipedec.stage.lane import Lane
from pipedec.threads import NewSequence

MOST_RESERVED = 1024  # slots that a lane gets for its answer when it opens; it grows if the answer is longer


class Span(Protocol):
    """Returns the context in which a part of a timestep's work is done."""

    def __call__(self, name: str, load: Load, /) -> AbstractContextManager[None]: ...


def _unrecorded(name: str, load: Load) -> AbstractContextManager[None]:
    return nullcontext()


class StageWorker:
    """One stage L_i (PipeDec §3.1).

    Whatever concerns a number without a lane is void: the request's last verdict has overtaken it.

    Args:
        new_sequence: makes, for the opening of a request, the function that makes sequences of its answer.
    """

    def __init__(
        self, model: StageModel, new_sequence: Callable[[Opening], NewSequence], device: torch.device | str = "cpu"
    ) -> None:
        self._model = model
        self._new_sequence = new_sequence
        self._device = device
        self._pool = model.make_pool()
        self._lanes: dict[int, Lane] = {}

    @property
    def num_lanes(self) -> int:
        """Number of requests that are open."""
        return len(self._lanes)

    @property
    def cache_slots(self) -> int:
        """Capacity of the KV pool in rows. It grows as needed and never shrinks."""
        return self._pool.slots

    def open(self, number: int, opening: Opening) -> None:
        """Open a lane for a request.

        Raises:
            ValueError: the number has one.
            UserError: the KV pool is full, or, on the last stage, ``logit_bias`` names a token that is not in the vocabulary.
        """
        if number in self._lanes:
            raise ValueError(f"request {number} is open already")
        reserved = opening.prompt_length + min(opening.sampling.max_tokens, MOST_RESERVED)
        cache = self._pool.open(with_prompt=opening.tokens_per_mask > 0, reserve=reserved)
        self._lanes[number] = self._new_lane(opening, cache)

    def sync(self, number: int, verdict: Verdict) -> None:
        """Replay a verdict: commit and prune what the lane holds. A verdict with ``finished`` drops the lane instead."""
        if (lane := self._lanes.get(number)) is None:
            return
        if verdict.finished is not None:
            lane.close()
            del self._lanes[number]
        else:
            lane.sync(verdict)

    def compute(self, steps: Mapping[int, Step]) -> None:
        """Compute the rows of all requests in one forward. The output is pending until ``sync`` and ``outgoing``."""
        steps = self._valid(steps)
        if not steps:
            return
        lanes = [self._lanes[number] for number in steps]
        entered = [lane.enter(step) for lane, step in zip(lanes, steps.values(), strict=True)]
        inputs = torch.cat([step.token_ids if step.hidden is None else step.hidden for step in steps.values()])
        self._distribute(lanes, self._model.forward(inputs, entered).split([rows.num_rows for rows in entered]))

    def outgoing(self) -> dict[int, Step]:
        """Take the pending output of all requests, with parents as the next stage's trees will number them."""
        steps = {number: lane.outgoing() for number, lane in self._lanes.items()}
        return {number: step for number, step in steps.items() if step is not None}

    def results(self) -> tuple[Update, ...]:
        """Nothing: only the last stage verifies rows."""
        return ()

    def load(self, steps: Mapping[int, Step]) -> Load:
        """The work of ``compute``."""
        steps = self._valid(steps)
        rows = sum(step.num_rows for step in steps.values())
        return Load(rows, sum(self._lanes[number].num_cached for number in steps))

    def advance(self, envelope: Envelope, span: Span = _unrecorded) -> Envelope:
        """One timestep: open lanes, replay verdicts, compute the rows of all requests.

        Args:
            span: the context for a part of the work, by its name ("sync" or "dec") and load.

        Returns:
            what goes to the next rank: the same updates with the rows that leave this stage; from the last stage to rank 0 its
            results instead.
        """
        for update in envelope.updates:
            if update.opening is not None:
                self.open(update.number, update.opening)
        verdicts = {update.number: update.verdict for update in envelope.updates if update.verdict is not None}
        if verdicts:
            with span("sync", Load()):
                for number, verdict in verdicts.items():
                    self.sync(number, verdict)
        steps = self._valid({update.number: update.step for update in envelope.updates if update.step is not None})
        if steps:
            with span("dec", self.load(steps)):
                self.compute(steps)
        return replace(envelope, updates=self._reply(envelope.updates))

    def _reply(self, updates: tuple[Update, ...]) -> tuple[Update, ...]:
        outgoing = self.outgoing()
        return tuple(Update(one.number, one.opening, one.verdict, outgoing.get(one.number)) for one in updates)

    def _new_lane(self, opening: Opening, cache: KVCache) -> Lane:
        return Lane(opening, self._new_sequence(opening), cache, self._device)

    def _valid(self, steps: Mapping[int, Step]) -> dict[int, Step]:
        """The steps of requests that go on."""
        return {number: step for number, step in steps.items() if number in self._lanes and not self._lanes[number].has_ended}

    def _distribute(self, lanes: Sequence[Lane], hidden: Sequence[Tensor]) -> None:
        """Give each lane the activations of its rows."""
        for lane, hidden_RE in zip(lanes, hidden, strict=True):
            lane.computed(hidden_RE)
