"""One stage of the pipeline: a worker with contiguous layers, and a lane for each running request.

A worker has two entries. ``replay`` applies verdicts and opens lanes. ``advance`` takes a message, replays what it brings, and
computes its rows, of any number of requests, in one forward. Requests come and go at any timestep.
"""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Protocol, cast

import torch
from msgspec.structs import replace
from torch import Tensor

from pipedec.core.stage_message import EMPTY, Load, NewRequest, RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.device import HOST, to_device, to_host
from pipedec.families import StateCounts
from pipedec.faults import RequestFaults
from pipedec.model import FirstForward, KVCache, LaneRows, StageModel, Usual, warm_up
from pipedec.threads import NewSequence, State
from pipedec.topology import rank_name
from pipedec.tree import Advance, ThreadChanges, forest_of, is_mask


class SpanContext(Protocol):
    """Makes the context for a part of a timestep's work, by its name ("sync" or "dec") and load."""

    def __call__(self, name: str, load: Load, /) -> AbstractContextManager[None]: ...


def _unrecorded(name: str, load: Load) -> AbstractContextManager[None]:
    return nullcontext()


class Lane:
    """One request on one stage: its KV cache and a copy of its prediction trees. It knows no other request and no model.

    In every timestep: ``sync`` if there is a verdict, then ``enter`` if it has rows, which the worker computes with those of
    other lanes.

    Attributes:
        has_ended: whether rows that still arrive are void. Only the last stage knows that before the verdict returns to it.
    """

    has_ended = False

    def __init__(self, opening: NewRequest, new_sequence: NewSequence, cache: KVCache, device: torch.device | str) -> None:
        self.cache = cache
        self.forest = forest_of(new_sequence(), tracks_paths=cache.states is not None)
        self._prompt_length = opening.prompt_length
        self._prefill_length = opening.prompt_length + len(opening.output_token_ids)
        self._has_masks = opening.tokens_per_mask > 0
        self._snapshots = dict(opening.snapshots)  # by tokens of the past
        self._awaited: set[int] = set()  # ended threads whose last tokens have yet to enter
        self._device = device

    def enter(self, step: Step) -> LaneRows:
        """Add the rows that are computed next: chunks of the prompt and of the earlier answer, then rows of trees.

        Masks are the last rows. They may follow the last chunk; neither forest nor cache keeps these.
        """
        num_masks = int(is_mask(step.token_ids).sum()) if self._has_masks else 0
        first = self.cache.past_length
        if first < self._prefill_length:
            positions = torch.arange(first, first + step.num_rows, device=self._device)
            return LaneRows(positions, self.cache, None, self._prompt_length, num_masks)
        rows = self.forest.append(step.token_ids, step.parents, step.threads)
        positions, visibility = to_device(self.forest.positions_of(rows), self._device), self.forest.visibility(rows)
        threads = None if self.forest.threads is None else self.forest.threads[rows].tolist()
        self._awaited.difference_update(threads or ())
        return LaneRows(positions, self.cache, visibility, num_masks=num_masks, threads=threads)

    def sync(self, verdict: Verdict) -> tuple[Advance, ThreadChanges] | None:
        """Replay a verdict: commit and prune forest and cache. Returns the changes of rows and threads; None without tokens."""
        if not verdict.tokens:
            return None
        advance, changes, past = self.forest.replay(verdict)
        self._commit(advance, changes)
        if past is not None:
            self.cache.release(past)
        return advance, changes

    def _commit(self, advance: Advance, changes: ThreadChanges) -> None:
        """Commit and prune rows of the cache, and follow threads with recurrent states."""
        if (states := self.cache.states) is None or self.forest.threads is None:
            self.cache.commit(advance.committed, advance.kept)
            return
        for start in changes.starts:
            states.fork(start.thread, cast(int, self.forest.sequence.threads[start.thread].parent))
        self.cache.commit(advance.committed, advance.kept, advance.joining)
        self._awaited |= {number for number in changes.last if not self.forest.trees[number].num_rows}
        ended = {thread.number for thread in self.forest.sequence.threads if thread.state is State.ENDED}
        states.end(ended - self._awaited)

    def save_snapshot(self) -> None:
        """Keep the states of recurrent layers for other requests, if the past has reached a place where rank 0 wants that."""
        if (place := self._snapshots.get(self.cache.past_length)) is not None and self.cache.states is not None:
            self.cache.states.save(place)

    def pruned(self, waiting: Step, advance: Advance) -> Step | None:
        """Prune rows that wait to be sent with their activations, and renumber parents; None if no row is left.

        They were the newest of the forest before ``advance``.
        """
        assert waiting.hidden is not None
        first = advance.num_rows - waiting.num_rows
        kept = advance.kept[bisect_left(advance.kept.tolist(), first) :]
        if not kept.shape[0]:
            return None
        forest, rows = self.forest, slice(self.forest.num_rows - kept.shape[0], self.forest.num_rows)
        threads = None if forest.threads is None else forest.threads[rows]
        return Step(forest.token_ids[rows], forest.parents[rows], waiting.hidden[kept - first], threads)


class StageWorker:
    """One stage L_i (PipeDec §3.1).

    An exception in work for one request drops its lane, and the next message says why: neither the stage nor other requests fail.
    Updates for a number without a lane are ignored: the request has failed, or its last verdict has overtaken them.

    Args:
        new_sequence: makes, for the opening of a request, the function that makes sequences of its answer.
        stage: its number, which is reported if a request fails here.
        slots, block: of the KV pool (see ``KVPool``). The caller assigns slots to requests.
        states: what the pools of recurrent layers hold; None for a usual number. The caller counts those in use.

    Attributes:
        rows: how many were computed.
        pruned_rows: how many were dropped without having been accepted: void ones, and rows of trees that verdicts pruned.
        experts: that rows of a forward passed through, added up over forwards and layers, as far as they were counted.
        expert_layers: layers with experts in these forwards, added up.
    """

    def __init__(
        self, model: StageModel, new_sequence: Callable[[NewRequest], NewSequence], device: torch.device | str = "cpu", *,
        slots: int, block: int = 16, stage: int = 1, states: StateCounts | None = None,
    ) -> None:  # fmt: skip
        self._model, self._new_sequence, self._device, self._stage = model, new_sequence, device, stage
        self._pool = model.make_pool(slots, block, states)
        self._lanes: dict[int, Lane] = {}
        self._faults = RequestFaults(rank_name(stage), self._drop)
        self.rows = 0
        self.pruned_rows = 0
        self.experts: int | Tensor = 0  # once counted, on the device: only who reads it waits
        self.expert_layers = 0

    @property
    def num_lanes(self) -> int:
        """Number of requests that are open."""
        return len(self._lanes)

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer, at the most; 0 without any."""
        return max((one.num_experts for one in self._model.stack.routed), default=0)

    @property
    def cache_slots(self) -> int:
        """Capacity of the KV pool in rows."""
        return self._pool.slots

    def warm_up(self, usual: Usual, progress: Callable[[int, int], None]) -> None:
        """Compute forwards of usual sizes before the first request (see ``model.warm_up``); they do not count as ``rows``."""
        warm_up(self._model, self._pool, usual, self._rehearse, progress, self._stage)

    def _rehearse(self, forward: FirstForward, hidden_RE: Tensor) -> None:
        """Read results of a warm-up forward from the device, as after any forward."""
        to_host(hidden_RE[-1:])

    def reset(self) -> None:
        """Drop all lanes and their claims on the pool: requests are sent again with all their rows."""
        self._faults.pop_failures()
        for number in list(self._lanes):
            self._drop(number)

    def replay(self, updates: Iterable[RequestUpdate], waiting: StageMessage = EMPTY) -> StageMessage:
        """Apply everything in updates except their rows: verdicts, openings and slots.

        A verdict commits and prunes rows (PipeDec §3.4.3). With ``finished`` it then drops the lane, whose slots hold the
        request's tokens for others to adopt. Openings come last, in order: they may copy rows that a verdict moves, and have
        slots of requests that a verdict ends.

        Returns:
            ``waiting``, the last result of ``advance`` if it has not been sent, without the rows that were pruned.
        """
        unsent = {update.number: update for update in waiting.updates}
        for update in sorted(updates, key=lambda update: update.opening is not None):
            with self._faults.of(update.number):
                self._replay(update, unsent)
            if update.number in self._faults:
                unsent.pop(update.number, None)
        if not unsent:
            return waiting
        return dataclasses.replace(waiting, updates=tuple(one for one in unsent.values() if one != RequestUpdate(one.number)))

    def advance(self, message: StageMessage, span: SpanContext = _unrecorded) -> StageMessage:
        """Run one timestep: replay the updates of the message, await its activations, and compute its rows.

        Args:
            span: called for each part of the work.

        Returns:
            the message to the next rank: the same updates with the rows that leave this stage; from the last stage to rank 0 its
            results instead. Either names the requests that have failed here.

        Raises:
            RankLost: activations did not come; the message names the rank that was to send them.
        """
        updates = message.updates
        has_verdicts = any(update.verdict is not None for update in updates)
        with span("sync", Load()) if has_verdicts else nullcontext():
            self.replay(updates)
        arrived = {update.number: update.step for update in updates if update.step is not None}
        if arrived:
            message.await_hidden()
        steps = {number: step for number, step in arrived.items() if number in self._lanes and not self._lanes[number].has_ended}
        rows = sum(step.num_rows for step in steps.values())
        self.rows += rows
        self.pruned_rows += sum(step.num_rows for number, step in arrived.items() if number not in steps)  # void ones
        load = Load(rows, sum(self._lanes[number].cache.length for number in steps))
        with span("dec", load) if rows else nullcontext():
            entered = self._enter(steps)
            computed = self._faults.apart(list(entered), partial(self._forward, steps, entered)) if entered else []
            activations = {number: own_RE for by_number, _ in computed for number, own_RE in by_number.items()}
            reply = self._reply(updates, steps, activations, all(is_finite for _, is_finite in computed))
        return StageMessage(self._with_failures(reply), message.ends_session)

    def _enter(self, steps: Mapping[int, Step]) -> dict[int, LaneRows]:
        """The rows of each request that can enter."""
        entered: dict[int, LaneRows] = {}
        for number, step in steps.items():
            with self._faults.of(number):
                entered[number] = self._lanes[number].enter(step)
        return entered

    def _forward(
        self, steps: Mapping[int, Step], entered: Mapping[int, LaneRows], numbers: Sequence[int]
    ) -> tuple[dict[int, Tensor], bool]:
        """Compute the rows of ``numbers``. Returns the activations of each, and whether all are known to be finite."""
        entering, lanes = [steps[number] for number in numbers], [entered[number] for number in numbers]
        inputs = torch.cat([step.token_ids if step.hidden is None else step.hidden for step in entering])
        inputs = to_device(inputs, self._device)
        hidden_RE = self._model.forward(inputs, lanes)
        stack = self._model.stack
        if stack.experts_read is not None:
            self.experts += stack.experts_read
            self.expert_layers += len(stack.routed)
        for number in numbers:
            self._lanes[number].save_snapshot()
        if not (is_finite := known_finite(hidden_RE)):
            hidden_RE = marked(inputs, hidden_RE, self._stage)
        return dict(zip(numbers, hidden_RE.split([rows.num_rows for rows in lanes]), strict=True)), is_finite

    def _drop(self, number: int) -> None:
        """Drop the lane of a request that has failed."""
        if (lane := self._lanes.pop(number, None)) is not None:
            self.pruned_rows += lane.forest.num_rows
            lane.cache.close()

    def _replay(self, update: RequestUpdate, unsent: dict[int, RequestUpdate]) -> None:
        """Apply an update except its rows (see ``replay``), also to the request's unsent rows."""
        number = update.number
        if (opening := update.opening) is not None:
            if number in self._lanes:
                raise ValueError(f"request {number} is open already")
            has_masks = opening.tokens_per_mask > 0
            slots = opening.slots, opening.cached, opening.copied
            cache = KVCache(self._pool, *slots, with_prompt=has_masks, snapshot=opening.snapshot)
            self._lanes[number] = self._new_lane(number, opening, cache)
        if update.verdict is not None:
            self._sync(number, update.verdict, unsent)
        if update.slots and (lane := self._lanes.get(number)) is not None:
            lane.cache.extend(update.slots)

    def _with_failures(self, updates: tuple[RequestUpdate, ...]) -> tuple[RequestUpdate, ...]:
        """The updates for the next rank, with the failures of requests."""
        if not (failures := self._faults.pop_failures()):
            return updates
        known = [update.number for update in updates]
        updates += tuple(RequestUpdate(number) for number in failures if number not in known)
        return tuple(replace(one, failure=one.failure or failures.get(one.number)) for one in updates)

    def _new_lane(self, number: int, opening: NewRequest, cache: KVCache) -> Lane:
        return Lane(opening, self._new_sequence(opening), cache, self._device)

    def _sync(self, number: int, verdict: Verdict, unsent: dict[int, RequestUpdate]) -> None:
        """Replay a verdict, and prune the request's unsent rows by it."""
        if (lane := self._lanes.get(number)) is None:
            return
        if (replayed := lane.sync(verdict)) is not None:
            advance, _ = replayed
            self.pruned_rows += advance.num_rows - advance.committed.shape[0] - advance.kept.shape[0]
            if (update := unsent.get(number)) is not None and update.step is not None:
                unsent[number] = replace(update, step=lane.pruned(update.step, advance))
        if verdict.finished is not None:
            self._drop(number)

    def _reply(
        self, updates: tuple[RequestUpdate, ...], steps: Mapping[int, Step], activations: Mapping[int, Tensor], is_finite: bool
    ) -> tuple[RequestUpdate, ...]:
        """The updates for the next rank, with the rows that were computed. ``is_finite``: their activations are known to be
        finite.
        """
        leaving = {number: steps[number].with_hidden(own_RE) for number, own_RE in activations.items()}
        return tuple(replace(update, step=leaving.get(update.number)) for update in updates)


def known_finite(values: Tensor) -> bool:
    """True if all values are known to be finite, so that there is nothing to mark. Never synchronises with a device.

    Checks their sum, which costs a hundredth of checking each value: it is finite only if all of them are. (It may overflow
    although they are; then they are all checked.)
    """
    return values.device == HOST and math.isfinite(values.sum(dtype=torch.float32))


def marked(inputs: Tensor, hidden_RE: Tensor, stage: int) -> Tensor:
    """``hidden_RE``, which ``stage`` computed from ``inputs``, with a mark in place of each row that is not finite.

    A mark is NaN except for its first value, the number of the first stage to compute such a row. Later stages compute NaN from
    it and pass the mark on; the last one turns it into a token id that no vocabulary has. Does not wait for a device.
    """
    mark_E = torch.full_like(hidden_RE[0], torch.nan)
    mark_E[0] = stage
    hidden_RE = torch.where(hidden_RE.isfinite().all(1, keepdim=True), hidden_RE, mark_E)
    if not inputs.is_floating_point():
        return hidden_RE
    return torch.where(inputs.isnan().any(1, keepdim=True), inputs, hidden_RE)
