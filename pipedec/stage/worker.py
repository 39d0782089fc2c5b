"""The workers of the pipeline's stages: contiguous layers, and a lane for each running request.

A worker receives rows and verdicts of any number of requests. It computes all rows in one forward, holds its output until the
verdicts of the timestep have pruned it (PipeDec §3.4.3), and passes it on. Requests come and go at any timestep.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from pipedec.core import Envelope, Load, Opening, RankLost, SlotRuns, Step, Update, Verdict
from pipedec.device import to_device, to_host
from pipedec.model import FirstForward, KVCache, StageModel, Usual, warm_up
from pipedec.stage.corruption import marked
from pipedec.stage.lane import Lane
from pipedec.threads import NewSequence


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
        stage: its number, which is named if it computes NaN or infinity.
        slots, block: of the KV pool (see ``KVPool``). Which request has which slots is said from outside.

    Attributes:
        rows: how many were computed.
        pruned_rows: how many were dropped without having been accepted: void ones, and rows of trees that verdicts pruned.
    """

    def __init__(
        self,
        model: StageModel,
        new_sequence: Callable[[Opening], NewSequence],
        device: torch.device | str = "cpu",
        *,
        slots: int,
        block: int = 16,
        stage: int = 1,
    ) -> None:
        self._model = model
        self._new_sequence = new_sequence
        self._device = device
        self._stage = stage
        self._pool = model.make_pool(slots, block)
        self._lanes: dict[int, Lane] = {}
        self.rows = 0
        self.pruned_rows = 0

    @property
    def num_lanes(self) -> int:
        """Number of requests that are open."""
        return len(self._lanes)

    @property
    def cache_slots(self) -> int:
        """Capacity of the KV pool in rows."""
        return self._pool.slots

    def warm_up(self, usual: Usual, progress: Callable[[int, int], None]) -> None:
        """Compute forwards as of usual requests (see ``model.warm_up``), before any request comes. Nothing is counted."""
        warm_up(self._model, self._pool, usual, self._rehearse, progress, self._stage)

    def _rehearse(self, forward: FirstForward, hidden_RE: Tensor) -> None:
        """Do what is done with the rows of a forward, and wait for the device."""
        to_host(hidden_RE[-1:])

    def reset(self) -> None:
        """Drop all lanes: requests come again with all their rows, and nothing in the pool is theirs any more."""
        self.pruned_rows += sum(lane.num_candidates for lane in self._lanes.values())
        self._lanes.clear()

    def open(self, number: int, opening: Opening) -> None:
        """Open a lane for a request, and copy the rows that it is to have copies of.

        Raises:
            ValueError: the number has one, or its slots are not in the pool.
            UserError: on the last stage, ``logit_bias`` names a token that is not in the vocabulary.
        """
        if number in self._lanes:
            raise ValueError(f"request {number} is open already")
        cache = self._pool.cache(with_prompt=opening.tokens_per_mask > 0)
        cache.extend(opening.slots)
        cache.adopt(opening.cached, opening.copied)
        self._lanes[number] = self._new_lane(opening, cache)

    def extend(self, number: int, slots: SlotRuns) -> None:
        """Give a request further slots. Raises ValueError if these are not in the pool."""
        if (lane := self._lanes.get(number)) is not None:
            lane.extend(slots)

    def sync(self, number: int, verdict: Verdict) -> None:
        """Replay a verdict: commit and prune what the lane holds. A verdict with ``finished`` then drops the lane.

        So the slots of a request that has ended hold its tokens, for others to adopt.
        """
        if (lane := self._lanes.get(number)) is None:
            return
        self.pruned_rows += lane.sync(verdict)
        if verdict.finished is not None:
            self.pruned_rows += lane.num_candidates
            del self._lanes[number]

    def replay(self, updates: Iterable[Update]) -> None:
        """All that updates bring before their rows: verdicts, openings and slots.

        Openings come last, in order: they may copy rows that a verdict moves, and have slots of requests that a verdict ends.
        """
        for update in sorted(updates, key=lambda update: update.opening is not None):
            if update.opening is not None:
                self.open(update.number, update.opening)
            if update.verdict is not None:
                self.sync(update.number, update.verdict)
            if update.slots:
                self.extend(update.number, update.slots)

    def compute(self, steps: Mapping[int, Step]) -> None:
        """Compute the rows of all requests in one forward. The output is pending until ``sync`` and ``outgoing``."""
        steps, arrived = self._valid(steps), steps
        rows = _num_rows(steps)
        self.rows += rows
        self.pruned_rows += _num_rows(arrived) - rows
        if not steps:
            return
        lanes = [self._lanes[number] for number in steps]
        entered = [lane.enter(step) for lane, step in zip(lanes, steps.values(), strict=True)]
        inputs = torch.cat([step.token_ids if step.hidden is None else step.hidden for step in steps.values()])
        inputs = to_device(inputs, self._device)
        hidden_RE = marked(inputs, self._model.forward(inputs, entered), self._stage)
        self._distribute(lanes, hidden_RE, [rows.num_rows for rows in entered])

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
        return Load(_num_rows(steps), sum(self._lanes[number].num_cached for number in steps))

    def advance(self, envelope: Envelope, span: Span = _unrecorded) -> Envelope:
        """One timestep: replay verdicts, open lanes, await the activations, compute the rows of all requests.

        Args:
            span: the context for a part of the work, by its name ("sync" or "dec") and load.

        Returns:
            what goes to the next rank: the same updates with the rows that leave this stage; from the last stage to rank 0 its
            results instead.

        Raises:
            RankLost: the updates do not fit the requests here, or activations did not come; the message names the rank that has
                sent them.
        """
        has_verdicts = any(update.verdict is not None for update in envelope.updates)
        with span("sync", Load()) if has_verdicts else nullcontext():
            self._replay_received(envelope.updates)
        steps = {update.number: update.step for update in envelope.updates if update.step is not None}
        if steps:
            envelope.await_hidden()
            load = self.load(steps)
            with span("dec", load) if load.rows else nullcontext():
                self.compute(steps)
        return Envelope(self._reply(envelope.updates), envelope.ends_session)

    def _replay_received(self, updates: Iterable[Update]) -> None:
        try:
            self.replay(updates)
        except (ValueError, KeyError, IndexError) as error:
            peer = self._stage - 1
            raise RankLost(f"rank {peer} sent updates that do not fit the requests of rank {self._stage}: {error}") from error

    def _reply(self, updates: tuple[Update, ...]) -> tuple[Update, ...]:
        outgoing = self.outgoing()
        return tuple(replace(update, step=outgoing.get(update.number)) for update in updates)

    def _new_lane(self, opening: Opening, cache: KVCache) -> Lane:
        return Lane(opening, self._new_sequence(opening), cache, self._device)

    def _valid(self, steps: Mapping[int, Step]) -> dict[int, Step]:
        """The steps of requests that go on."""
        return {number: step for number, step in steps.items() if number in self._lanes and not self._lanes[number].has_ended}

    def _distribute(self, lanes: Sequence[Lane], hidden_RE: Tensor, counts: Sequence[int]) -> None:
        """Give each lane the activations of its rows, of which it has ``counts``."""
        for lane, own_RE in zip(lanes, hidden_RE.split(counts), strict=True):
            lane.computed(own_RE)


def _num_rows(steps: Mapping[int, Step]) -> int:
    return sum(step.num_rows for step in steps.values())
