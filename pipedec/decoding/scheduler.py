"""The running requests of rank 0, and which of their rows enter the pipeline at each timestep.

A request waits here until there is KV memory for it; the stages receive it with its first rows. Requests are ordered by priority
value, then by number, lower ones first. Numbers never repeat, so a late result of a request that has ended is ignored, and the
pipeline need not drain before another one begins. A paused request opens new lanes under the same number, but only once every
stage has closed the old ones. Knows no stage, no process and no client.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from msgspec.structs import replace

from pipedec.core.errors import UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import HiddenStates, RequestUpdate, StageMessage
from pipedec.core.verdict import Verdict
from pipedec.decoding.budget import Budget
from pipedec.decoding.controller import EnteredCounts
from pipedec.decoding.draft_rounds import DraftRounds
from pipedec.decoding.events import (
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
from pipedec.decoding.memory import LaneSizes, Memory
from pipedec.decoding.method import Drafter, Resources
from pipedec.decoding.request import AnswerText, Phase, Request
from pipedec.families import StateCounts
from pipedec.faults import RequestFaults, is_of_machine
from pipedec.kv import KVManager
from pipedec.threads import NewSequence
from pipedec.topology import rank_name

logger = logging.getLogger(__name__)
_UNLIMITED = 2**40  # slots
_T = TypeVar("_T")


class Scheduler:
    """In every timestep: ``entering``, ``draft`` while the stages compute, and ``take`` for each result.

    An exception in work for one request is its own fault: the request ends, and others go on.

    Args:
        kv: manager of the stages' KV memory; None for unlimited memory without shared prefixes.
        knee: rows that the stages compute in about the time of one.
        states: what the stages' pools of recurrent layers hold; None for a target without such layers.
        listeners: called with each record, in order.

    Attributes:
        requests: the running ones, by number, in the order in which they are served; read only.
        only: the one request that is served; None: all are.
        now: returns the time in seconds, on emulated devices if times are computed.
    """

    def __init__(
        self, resources: Resources, kv: KVManager | None = None, knee: int = KNEE_ROWS, lane_sizes: LaneSizes = LaneSizes(),
        listeners: Iterable[Listener] = (), states: StateCounts | None = None,
    ) -> None:  # fmt: skip
        self.requests: dict[int, Request] = {}
        self.only: int | None = None
        self.now: Callable[[], float] = time.perf_counter
        self.kv = kv or KVManager(_UNLIMITED, shares_prefixes=False)
        self.resources = resources
        self.tally = resources.tally
        self.controller = resources.experience.controller
        self.faults = RequestFaults(rank_name(0))
        self.listeners = list(listeners)
        self._memory = Memory(self.kv, knee, lane_sizes, states)
        self._budget = Budget(knee)
        self.draft_rounds = DraftRounds(resources, self._budget, self.faults)
        self._arrived: list[Request] = []  # since the last timestep
        self._undrafted: list[Request] = []  # to pause, since their draft model has been loaded
        self._unreplayed: list[Request] = []  # with verdicts that the stages have yet to replay
        self._closing: list[Request] = []  # ended; some stages have yet to close the lane

    @property
    def num_waiting(self) -> int:
        """Requests that wait for KV memory."""
        return sum(not request.has_lane for request in self.requests.values())

    @property
    def num_running(self) -> int:
        """Requests with a lane."""
        return len(self.requests) - self.num_waiting

    def emit(self, record: Record) -> None:
        for listen in self.listeners:
            listen(record)

    # Requests come

    def prepare(self, asked: TokenizedRequest, new_sequence: NewSequence, text: AnswerText | None = None) -> Request:
        """The request, which ``open`` lets begin. Arguments as of ``Request``. Raises UserError if its method cannot run here,
        or its prompt and answer, or its trees, need more memory than there is.
        """
        request, capacity = Request(asked, new_sequence, self.resources, text), self.kv.capacity
        if request.most > capacity:
            prompt, answer = len(asked.prompt_token_ids), asked.sampling.max_tokens
            raise UserError(
                f"the request needs {request.most:,} slots of KV cache ({prompt:,} for the prompt, {answer:,} for max_tokens, "
                f"{request.method.together:,} for rows that enter together), but there are {capacity:,}: shorten the prompt, "
                "lower max_tokens, or raise --kv-cache-memory"
            )
        together, rows = request.method.together, self._memory.stashes.counts.rows
        if together > rows:
            raise UserError(
                f"{together:,} rows of the request enter together, but there is memory for {rows:,} rows of trees in recurrent "
                "layers: ask for a smaller tree"
            )
        return request

    def open(self, request: Request) -> None:
        """Let a prepared request begin; its prompt enters as soon as there is memory."""
        request.began = self.now()
        self.requests[request.number] = request
        self.requests = dict(sorted(self.requests.items(), key=lambda item: (item[1].priority, item[0])))
        self._arrived.append(request)

    def adopt(self, drafter: Drafter) -> None:
        """Use the draft model, now that it is loaded. Requests whose own methods use it are paused, and continue with them; those
        whose methods need more memory than there is go on without it.
        """
        self.resources.drafter, self.resources.awaits_drafter = drafter, False
        for request in self.requests.values():
            if request.lacks_drafter and (refusal := self._refusal(request)) is not None:
                logger.warning("request %d goes on without the draft model: %s", request.number, refusal)
                request.stays_draftless = True
            elif request.lacks_drafter and request.has_lane:
                self._undrafted.append(request)
            elif request.lacks_drafter:
                request.begin()

    def _refusal(self, request: Request) -> UserError | None:
        """The reason why a request like this one would not be accepted now."""
        try:
            self.prepare(request.asked, request.new_sequence)
        except UserError as error:
            return error
        return None

    def opened(self) -> list[RequestOpened]:
        """The running requests that have lanes, for a listener that joins late."""
        return [RequestOpened(one, one.opening) for one in self.requests.values() if one.opening is not None]

    # A timestep

    def entering(self) -> StageMessage:
        """The message of the next timestep: for each request concerned its opening, the verdict that the stages have yet to
        replay, and the rows that enter.
        """
        for request in self._to_pause():
            self.pause(request)
        replaying, self._unreplayed = self._unreplayed, []
        if self._memory.stashes.is_limited:  # threads may start in states of lanes that are closed
            replaying.sort(key=lambda request: request.unreplayed is None or request.unreplayed.finished is None)
        updates: dict[int, RequestUpdate] = {}
        for request in replaying:
            updates[request.number] = RequestUpdate(request.number, verdict=request.unreplayed)
            request.unreplayed = None
        proposed = self._propose()
        self.end_failed()
        for number, update in proposed.items():
            known = updates.get(number)
            updates[number] = update if known is None else replace(update, verdict=known.verdict)
            if update.opening is not None:
                self.requests[number].is_known = True
                self.emit(RequestOpened(self.requests[number], update.opening))
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            if request.number in self.requests and not request.is_known:
                self.emit(Waits(request))
        return StageMessage(tuple(updates.values()))

    def _to_pause(self) -> list[Request]:
        """Requests whose memory others need, or which continue with the draft model that has been loaded."""
        if self._undrafted:
            undrafted, self._undrafted = self._undrafted, []
            return [one for one in undrafted if one.number in self.requests and one.has_lane and one.lacks_drafter]
        return self._served(self._memory.to_pause)

    def _propose(self) -> dict[int, RequestUpdate]:
        """Updates by request: openings, chunks of prompts, rows of trees, and the slots they need.

        Openings are in the order in which the slots were given: one may copy the contents of slots that a later one gets.
        """
        updates: dict[int, RequestUpdate] = {}
        prompt_rows = rows = 0
        for number, room in self._served(self._share).items():
            request, opening = self.requests[number], None
            with self.faults.of(number):
                if not request.has_lane:
                    lease = self._memory.open(request)
                    if lease is None:
                        continue
                    request.phase = Phase.PREFILLING
                    opening = request.open(lease)
                if request.phase is Phase.PREFILLING:
                    step = request.enter_chunk(room)
                    prompt_rows += 0 if step is None else step.num_rows
                else:
                    room = self._memory.room_for(request, room)
                    step = request.enter_rows(room) if room else None
                rows += 0 if step is None else step.num_rows
                if opening is not None or step is not None:
                    updates[number] = RequestUpdate(number, opening, step=step)
        lanes = [request for request in self.requests.values() if request.has_lane]
        for request in lanes:
            if request.new_slots:
                update = updates.get(request.number, RequestUpdate(request.number))
                updates[request.number], request.new_slots = replace(update, slots=request.new_slots), ()
            if self.kv.shares_prefixes and (added := request.adoptable()):
                self.kv.extend(request.number, added)
        are_tuned = [request.method.is_tuned for request in lanes if request.phase is Phase.RUNNING]
        fills = any([request.fills for request in lanes])
        self.controller.record_entered(EnteredCounts(rows, prompt_rows, len(are_tuned) if all(are_tuned) else 0, fills))
        return updates

    def _share(self, requests: list[Request]) -> dict[int, int]:
        """The rows of each request that may enter."""
        claims = self._memory.claims(requests)
        shares = self._budget.share(claims, self.controller.pays)
        for claim in claims:
            self.requests[claim.number].waited = claim.waited
        return shares

    def _served(self, work: Callable[[list[Request]], _T]) -> _T:
        """The result of ``work`` for the requests that are served. If it raises, once more without those whose claims raise."""

        def served() -> list[Request]:
            found = [request for number, request in self.requests.items() if number not in self.faults]
            return found if self.only is None else [request for request in found if request.number == self.only]

        try:
            return work(served())
        except Exception as error:
            before = served()
            if is_of_machine(error):
                raise
            for request in before:
                with self.faults.of(request.number):
                    list(request.claim().demand.chances)
            if len(served()) == len(before):
                raise
        return work(served())

    def draft(self) -> None:
        """Rank 0's compute phase: the draft model's forwards, each for all requests."""
        self.draft_rounds.run(self.requests)

    # Results

    def take(self, result: RequestUpdate, timestep: int) -> tuple[Request, Verdict] | None:
        """Follow a result of the last stage. Returns the request and the verdict, cut where the answer ends; None without a
        verdict, or if the request has ended or waits.
        """
        with self.faults.of(result.number):
            return self._taken(result, timestep)
        return None

    def _taken(self, result: RequestUpdate, timestep: int) -> tuple[Request, Verdict] | None:
        verdict, request = result.verdict, self.requests.get(result.number)
        if request is None or request.phase is Phase.PAUSING:
            if verdict is not None and verdict.finished is not None and not verdict.tokens and verdict.failure is None:
                self._lane_closed(result.number, request, verdict.finished)
            return None
        first, logprobs = request.scored.new(result.prompt_logprobs)
        if logprobs:
            self.emit(PromptScored(request, first, logprobs))
        if (read := result.hidden_states) is not None:
            first, rows = request.read.new(read.rows)
            if rows:
                self.emit(PromptScored(request, first, (), HiddenStates(read.dtype, rows)))
        if verdict is None:
            return None
        if verdict.failure is not None:
            self.tally.corrupted += verdict.finished == "corrupted"
            self._fail(request, verdict.finished or "failed", verdict.failure)
            return request, verdict
        if request.text is not None:
            verdict = request.text.cut(verdict)
        request.record_times(timestep, self.now())
        self.emit(Advanced(request, verdict, result.logprobs, timestep))
        with self.faults.of(request.number):
            request.commit(verdict)
        self._replay_later(request, verdict)
        if verdict.finished is not None:
            self._end(request, verdict.finished)
        return request, verdict

    def _replay_later(self, request: Request, verdict: Verdict) -> None:
        if request.unreplayed is None:
            self._unreplayed.append(request)
        request.unreplayed = verdict

    def _lane_closed(self, number: int, request: Request | None, reason: str) -> None:
        """The last stage, and so every stage, has closed the lane."""
        if reason == "paused" and request is not None:
            request.phase = Phase.WAITING
        elif reason != "paused" and (ended := next((one for one in self._closing if one.number == number), None)) is not None:
            self._closing.remove(ended)
            self.emit(RequestClosed(ended))

    def end_failed(self) -> None:
        """End the requests for which something has raised on this rank."""
        for number, failure in self.faults.pop_failures().items():
            if (request := self.requests.get(number)) is not None:
                self._fail(request, "failed", failure)

    def _fail(self, request: Request, reason: str, failure: str) -> None:
        self._close_lanes(request, reason)
        self._end(request, reason, failure)
        self.kv.forget_kept()  # its rows must not serve as a prefix

    def _close_lanes(self, request: Request, reason: str) -> None:
        """Close the request's lanes on all stages, with the tokens accepted since the last update."""
        if request.is_known:
            accepted = () if request.unreplayed is None else request.unreplayed.accepted
            self._replay_later(request, Verdict(accepted, reason))

    def _end(self, request: Request, reason: str, failure: str | None = None) -> None:
        del self.requests[request.number]
        self._leave_lane(request)
        request.phase = Phase.ENDED
        tenant = request.asked.tenant
        if tenant is not None and failure is None:
            for before, answer in request.texts():
                self.resources.experience.shared_texts.add(tenant, before, answer)
        self.emit(RequestEnded(request, reason, failure))
        if request.is_known:
            self._closing.append(request)
        else:
            self.emit(RequestClosed(request))

    def _leave_lane(self, request: Request) -> None:
        """Free the memory of its lane, if it has one. The last accepted tokens are committed with its last verdict, before others
        open.
        """
        if request.has_lane:
            self.kv.extend(request.number, request.adoptable())
            self.kv.free(request.number)
            request.leave_lane()

    # Requests go, or lose their lanes

    def pause(self, request: Request) -> None:
        """Take a request's lane. It gets another one, before younger requests, once every stage has closed the old one and when
        there is memory.
        """
        self.tally.pauses += 1
        request.metrics.pauses += 1
        self._leave_lane(request)
        request.begin_again(Phase.PAUSING)
        self._close_lanes(request, "paused")
        self.emit(Waits(request))

    def cancel(self, number: int) -> None:
        """End a request in any state, without a verdict for its method. No effect if it is not running."""
        if (request := self.requests.get(number)) is not None:
            self._close_lanes(request, "cancelled")
            self._end(request, "cancelled")

    def interrupt(self) -> None:
        """All lanes, the contents of the stages' KV pools, and all results on their way are lost: running requests continue after
        their last accepted token.
        """
        for request in self.requests.values():
            if request.has_lane:
                self._leave_lane(request)
                request.begin_again(Phase.WAITING)
            request.phase, request.is_known = Phase.WAITING, False
        self.kv.clear()
        self.closed()
        for request in self._unreplayed:
            request.unreplayed = None
        self._unreplayed.clear()
        for request in self.requests.values():
            self.emit(Interrupted(request))

    def drop(self, number: int) -> None:
        """Forget a running request that has no lane."""
        self.emit(RequestClosed(self.requests.pop(number)))

    def closed(self) -> None:
        """Every stage has closed all lanes."""
        closing, self._closing = self._closing, []
        for request in closing:
            self.emit(RequestClosed(request))
        self.emit(Drained())

    def forget_prefixes(self) -> None:
        """Let requests that open from now on adopt no prefixes of ended ones."""
        self.kv.forget_kept()
        if self.resources.drafter is not None:
            self.resources.drafter.forget_prefixes()
