"""The workers of the pipeline's stages: contiguous layers, and a lane for each running request.

A worker has two entries. ``replay`` takes in verdicts and openings. ``advance`` takes a message, replays what it brings, and
computes its rows, of any number of requests, in one forward. Requests come and go at any timestep.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from msgspec.structs import replace
from torch import Tensor

from pipedec.core import EMPTY, Envelope, Load, Opening, RankLost, Step, Update, Verdict
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

    def replay(self, updates: Iterable[Update], waiting: Envelope = EMPTY) -> Envelope:
        """Take in all that updates bring but their rows: verdicts, openings and slots.

        A verdict commits and prunes rows (PipeDec §3.4.3). With ``finished`` it then drops the lane, whose slots hold the
        request's tokens for others to adopt. Openings come last, in order: they may copy rows that a verdict moves, and have
        slots of requests that a verdict ends.

        Args:
            waiting: what ``advance`` has returned last, if it waits to be sent.

        Returns:
            ``waiting`` without the rows that were pruned; with no updates if nothing is left to be sent.

        Raises:
            ValueError: a request is open already, or its slots are not in the pool.
            UserError: on the last stage, ``logit_bias`` names a token that is not in the vocabulary.
        """
        steps = _steps_of(waiting)
        for update in sorted(updates, key=lambda update: update.opening is not None):
            if update.opening is not None:
                self._open(update.number, update.opening)
            if update.verdict is not None:
                self._sync(update.number, update.verdict, steps)
            if update.slots and (lane := self._lanes.get(update.number)) is not None:
                lane.extend(update.slots)
        left = (update for update in _with_steps(waiting.updates, steps) if update != Update(update.number))
        return dataclasses.replace(waiting, updates=tuple(left)) if waiting.updates else waiting

    def advance(self, message: Envelope, span: Span = _unrecorded) -> Envelope:
        """One timestep: replay what the message brings, await its activations, and compute its rows.

        Args:
            span: the context for a part of the work, by its name ("sync" or "dec") and load.

        Returns:
            what goes to the next rank: the same updates with the rows that leave this stage; from the last stage to rank 0 its
            results instead.

        Raises:
            RankLost: the updates do not fit the requests here, or activations did not come; the message names the rank that has
                sent them.
        """
        has_verdicts = any(update.verdict is not None for update in message.updates)
        with span("sync", Load()) if has_verdicts else nullcontext():
            self._replay_received(message.updates)
        steps = _steps_of(message)
        if steps:
            message.await_hidden()
            steps = self._valid(steps)
            load = Load(_num_rows(steps), sum(self._lanes[number].num_cached for number in steps))
            with span("dec", load) if load.rows else nullcontext():
                steps = self._compute(steps)
        return Envelope(self._reply(message.updates, steps), message.ends_session)

    def _replay_received(self, updates: Iterable[Update]) -> None:
        try:
            self.replay(updates)
        except (ValueError, KeyError, IndexError) as error:
            peer = self._stage - 1
            raise RankLost(f"rank {peer} sent updates that do not fit the requests of rank {self._stage}: {error}") from error

    def _open(self, number: int, opening: Opening) -> None:
        """Open a lane for a request, and copy the rows that it is to have copies of."""
        if number in self._lanes:
            raise ValueError(f"request {number} is open already")
        cache = self._pool.cache(with_prompt=opening.tokens_per_mask > 0)
        cache.extend(opening.slots)
        cache.adopt(opening.cached, opening.copied)
        self._lanes[number] = self._new_lane(number, opening, cache)

    def _sync(self, number: int, verdict: Verdict, waiting: dict[int, Step]) -> None:
        """Replay a verdict, and prune what waits to be sent by it."""
        if (lane := self._lanes.get(number)) is None:
            return
        if (advance := lane.sync(verdict)) is not None:
            self.pruned_rows += advance.num_rows - len(advance.committed) - len(advance.kept)
            if (step := waiting.pop(number, None)) is not None and (left := lane.pruned(step, advance)) is not None:
                waiting[number] = left
        if verdict.finished is not None:
            self.pruned_rows += lane.num_candidates
            del self._lanes[number]

    def _compute(self, steps: Mapping[int, Step]) -> dict[int, Step]:
        """Compute the rows of all requests in one forward. Returns what leaves the stage."""
        if not steps:
            return {}
        self.rows += _num_rows(steps)
        lanes = [self._lanes[number] for number in steps]
        entered = [lane.enter(step) for lane, step in zip(lanes, steps.values(), strict=True)]
        inputs = torch.cat([step.token_ids if step.hidden is None else step.hidden for step in steps.values()])
        inputs = to_device(inputs, self._device)
        hidden_RE = marked(inputs, self._model.forward(inputs, entered), self._stage)
        return self._outputs(steps, hidden_RE, [rows.num_rows for rows in entered])

    def _reply(self, updates: tuple[Update, ...], steps: Mapping[int, Step]) -> tuple[Update, ...]:
        return _with_steps(updates, steps)

    def _new_lane(self, number: int, opening: Opening, cache: KVCache) -> Lane:
        return Lane(opening, self._new_sequence(opening), cache, self._device)

    def _valid(self, steps: Mapping[int, Step]) -> dict[int, Step]:
        """The steps of requests that go on; the rows of others are void."""
        valid = {number: step for number, step in steps.items() if number in self._lanes and not self._lanes[number].has_ended}
        self.pruned_rows += _num_rows(steps) - _num_rows(valid)
        return valid

    def _outputs(self, steps: Mapping[int, Step], hidden_RE: Tensor, counts: Sequence[int]) -> dict[int, Step]:
        """The steps with their activations, of which each has so many rows."""
        by_step = zip(steps.items(), hidden_RE.split(counts), strict=True)
        return {number: Step(step.token_ids, step.parents, own_RE, step.threads) for (number, step), own_RE in by_step}


def _num_rows(steps: Mapping[int, Step]) -> int:
    return sum(step.num_rows for step in steps.values())


def _steps_of(message: Envelope) -> dict[int, Step]:
    return {update.number: update.step for update in message.updates if update.step is not None}


def _with_steps(updates: tuple[Update, ...], steps: Mapping[int, Step]) -> tuple[Update, ...]:
    return tuple(replace(update, step=steps.get(update.number)) for update in updates)
