"""The batch of requests that are decoded together: their methods, and which of their rows enter the pipeline at each timestep.

Owns the use of the draft model, the prompts that have yet to enter, and the requests that wait for KV memory. Knows no stage, no
process and no client.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import TypeVar

import torch
from msgspec import structs

from pipedec.core.errors import UserError
from pipedec.core.limits import DRAFTED_ROWS, KNEE_ROWS
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.stage_message import Load, RequestUpdate
from pipedec.core.verdict import Verdict
from pipedec.decoding.budget import Budget
from pipedec.decoding.controller import EnteredCounts, TimestepTiming
from pipedec.decoding.experience import Experience
from pipedec.decoding.memory import LaneSizes, Memory
from pipedec.decoding.method import Drafter, DraftRoom, Method, MethodContext
from pipedec.decoding.proposers import Proposals, score
from pipedec.decoding.request_state import RequestState, Tally
from pipedec.faults import RequestFaults, is_of_machine
from pipedec.kv import KVManager
from pipedec.methods import MAX_CHOICES, find_method, make_options
from pipedec.model.markov import MarkovTable
from pipedec.threads import NewSequence
from pipedec.threads import Sequence as ThreadSequence
from pipedec.topology import rank_name
from pipedec.tree import Candidates, DraftRows

DRAFT_KNEE = 64  # maximum rows of all requests in one draft forward
_MAX_CHOICES = 2 * MAX_CHOICES  # of all requests; one without room drafts at the next timestep
_UNLIMITED = 2**40  # slots
_T = TypeVar("_T")
_DRAFTLESS = {"proposers": ["ngrams"]}  # options of the default method while it replaces one whose draft model is being loaded

# Returns the context in which a draft forward of this load runs: a timer, or an emulated device.
ForwardTimer = Callable[[Load], AbstractContextManager[None]]


class Batch:
    """Runs on rank 0. In every timestep: ``to_pause``, ``propose``, ``draft`` while the stages compute, ``apply`` per verdict.

    A request waits here until there is KV memory for it; the stages receive it with its first rows. Requests are ordered by
    priority value, then by number, lower ones first. Their hits and misses survive a pause if the answer is in one thread.

    An exception in work for one request is noted in ``faults``. It gets no more rows, and the caller closes it; others go on.

    Args:
        passage: timesteps from a row's entry to its verdict, at least.
        device: of the draft model.
        trained_masks: mask rows that the target's BiTA was trained with; 0 if it has none.
        knee: rows that the stages compute in about the time of one.
        experience: learned from earlier requests; None to begin without.
        kv: manager of the stages' KV memory; None for unlimited memory without shared prefixes.
        markov: of the target's BiTA, if it has one.
    """

    def __init__(
        self, passage: int, drafter: Drafter | None = None, device: torch.device | str = "cpu", trained_masks: int = 0,
        knee: int = KNEE_ROWS, experience: Experience | None = None, kv: KVManager | None = None,
        lane_sizes: LaneSizes = LaneSizes(), markov: MarkovTable | None = None,
    ) -> None:  # fmt: skip
        self.kv = kv or KVManager(_UNLIMITED, shares_prefixes=False)
        self.device = device
        self.tally = Tally()
        self.requests: dict[int, RequestState] = {}  # the running ones, by number, in the order in which they are served
        self.only: int | None = None  # the one request that is served; None: all are
        self.faults = RequestFaults(rank_name(0))
        self.awaits_drafter = False  # until ``adopt``, the default method without a draft replaces those that need one
        self.time_forward: ForwardTimer = lambda load: nullcontext()
        self._drafter = drafter
        self._undrafted: list[int] = []  # requests to pause, since their draft model has been loaded
        self._trained_masks, self._markov = trained_masks, markov
        self._budget = Budget(knee)
        self._experience = experience or Experience(passage)
        self._controller = self._experience.controller
        self._proposals: list[Proposals] = []
        self._draft_room = DraftRoom()
        self._first_drafted = 0  # the request that drafts first, if there was no room for it at the last timestep
        self._memory = Memory(self.kv, knee, lane_sizes)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for KV memory."""
        return sum(not state.has_lane for state in self.requests.values())

    @property
    def passage(self) -> int:
        """Timesteps from a row's entry at this timestep to its verdict."""
        return self._controller.passage

    @property
    def full_passage(self) -> int:
        """As of ``Controller``."""
        return self._controller.full_passage

    def fill_links(self, latency: float) -> None:
        """As of ``Controller``."""
        self._controller.fill_links(latency)

    @property
    def num_running(self) -> int:
        """Requests with a lane."""
        return len(self.requests) - self.num_waiting

    def check(self, request: TokenizedRequest, sequence: ThreadSequence) -> None:
        """Raises UserError if the method of ``request`` cannot run here, prompt and answer (a new ``sequence``) need more memory
        than there is, or the prompt's log-probabilities are requested with several threads.
        """
        self._new_state(request, lambda: sequence)

    def _new_state(self, request: TokenizedRequest, new_sequence: NewSequence) -> RequestState:
        if request.sampling.prompt_logprobs is not None and request.threads is not None:
            raise UserError("prompt_logprobs needs an answer in one thread: leave it, or threads, out")
        state, capacity = RequestState(request, new_sequence, self._context, self.tally), self.kv.capacity
        if state.most > capacity:
            prompt, answer = len(request.prompt_token_ids), request.sampling.max_tokens
            raise UserError(
                f"the request needs {state.most:,} slots of KV cache ({prompt:,} for the prompt, {answer:,} for max_tokens, "
                f"{state.together:,} for rows that enter together), but there are {capacity:,}: shorten the prompt, lower "
                "max_tokens, or raise --kv-cache-memory"
            )
        return state

    def open(self, request: TokenizedRequest, new_sequence: NewSequence) -> None:
        """Begin a request: its prompt enters as soon as there is memory. ``new_sequence`` makes the sequence of its answer with
        earlier tokens, again if an answer in several threads is paused. Raises UserError as ``check``, or if the prompt is empty.
        """
        if not request.prompt_token_ids:
            raise UserError("the prompt is empty: give at least one token")
        self.requests[request.number] = self._new_state(request, new_sequence)
        self.requests = dict(sorted(self.requests.items(), key=lambda item: (item[1].request.priority, item[0])))

    def apply(self, number: int, verdict: Verdict) -> None:
        """Apply a verdict, which closes the request if it is ``finished``. Ignored if the request has no lane."""
        state = self.requests.get(number)
        if state is None or not state.has_lane:
            return
        with self.faults.of(number):
            state.apply(verdict)
        if verdict.finished is not None:
            self.close(number)

    def close(self, number: int) -> None:
        """Forget a request, which has ended or was cancelled."""
        state = self.requests.pop(number, None)
        if state is None:
            return
        if state.has_lane:
            self._leave_lane(state)
        if state.request.tenant is not None and number not in self.faults:
            for before, answer in state.texts():
                self._experience.shared_texts.add(state.request.tenant, before, answer)

    def adopt(self, drafter: Drafter) -> None:
        """Use the draft model, now that it is loaded. Requests whose own methods use it are paused, and continue with them."""
        self._drafter, self.awaits_drafter = drafter, False
        undrafted = [state for state in self.requests.values() if state.lacks_drafter]
        self._undrafted = [state.number for state in undrafted if state.has_lane]
        for state in undrafted:
            if not state.has_lane:
                state.pause(is_closing=state.is_closing)

    def forget_prefixes(self) -> None:
        """Let requests that open from now on adopt no prefixes of ended ones."""
        self.kv.forget_kept()
        if self._drafter is not None:
            self._drafter.forget_prefixes()

    def interrupt(self) -> None:
        """Discard all lanes and the contents of the stages' KV pools: every request waits, and continues where it was."""
        for state in self.requests.values():
            if state.has_lane:
                self._leave_lane(state)
                state.pause(is_closing=False)
            state.is_closing = False
        self.kv.clear()
        self._memory.grown.clear()

    def to_pause(self) -> list[int]:
        """Requests to pause before ``propose``: others need their memory, or they continue with the loaded draft model."""
        if self._undrafted:
            undrafted = [self.requests[number] for number in self._undrafted if number in self.requests]
            self._undrafted = []
            return [state.number for state in undrafted if state.has_lane and state.lacks_drafter]
        return self._served(self._memory.to_pause)

    def pause(self, number: int) -> None:
        """Take a request's lane. It gets another one, before younger requests, after ``closed`` and when there is memory."""
        self.tally.pauses += 1
        self._leave_lane(self.requests[number])
        self.requests[number].pause()

    def closed(self, number: int) -> None:
        """Note that every stage has closed the lane of a paused request."""
        if number in self.requests:
            self.requests[number].is_closing = False

    def propose(self) -> dict[int, RequestUpdate]:
        """The updates of the next timestep by request: openings, chunks of prompts, rows of trees, and the slots they need.

        Openings are in the order in which the slots were given: one may copy the contents of slots that a later one gets.
        """
        updates: dict[int, RequestUpdate] = {}
        prompt_rows = rows = 0
        shares = self._served(lambda states: self._budget.share(self._memory.claims(states), self._controller.pays))
        for number, room in shares.items():
            state, opening = self.requests[number], None
            with self.faults.of(number):
                if not state.has_lane:
                    lease = self._memory.open(state)
                    if lease is None:
                        continue
                    state.has_lane = True
                    opening = state.open(lease)
                if state.is_prefilling:
                    step = state.next_chunk(room)
                    prompt_rows += 0 if step is None else step.num_rows
                else:
                    room = self._memory.room_for(state, room)
                    step = state.propose(room) if room else None
                rows += 0 if step is None else step.num_rows
                updates[number] = RequestUpdate(number, opening, step=step)
        grown, self._memory.grown = self._memory.grown, {}
        for number, slots in grown.items():
            updates[number] = structs.replace(updates.get(number, RequestUpdate(number)), slots=slots)
        lanes = [state for state in self.requests.values() if state.has_lane]
        for state in lanes if self.kv.shares_prefixes else ():
            if added := state.take_adoptable():
                self.kv.extend(state.number, added)
        are_tuned = [state.is_tuned for state in lanes if not state.is_prefilling]
        fills = any([state.fills for state in lanes])
        self._controller.record_entered(EnteredCounts(rows, prompt_rows, len(are_tuned) if all(are_tuned) else 0, fills))
        return {number: update for number, update in updates.items() if update.opening or update.step or update.slots}

    def _served(self, work: Callable[[list[RequestState]], _T]) -> _T:
        """The result of ``work`` for the requests that are served. If it raises, once more without those whose claims raise."""

        def served() -> list[RequestState]:
            found = [state for number, state in self.requests.items() if number not in self.faults]
            return found if self.only is None else [state for state in found if state.number == self.only]

        try:
            return work(served())
        except Exception as error:
            before = served()
            if is_of_machine(error):
                raise
            for state in before:
                with self.faults.of(state.number):
                    list(state.claim().demand.chances)
            if len(served()) == len(before):
                raise
        return work(served())

    def _leave_lane(self, state: RequestState) -> None:
        """Close a lane. Its last accepted tokens are committed with its last verdict, before others open."""
        self.kv.extend(state.number, state.take_adoptable())
        self.kv.close(state.number)
        self._budget.forget(state.number)
        if state.drafter is not None:
            state.drafter.close(state.number)

    def draft(self) -> None:
        """Rank 0's compute phase: the draft model's forwards, each for all requests."""
        chunks = self._next_draft_chunks()
        if chunks:
            self._controller.drafts_prompts = True
        drafting = [  # requests whose text has entered and is in the draft model's cache
            state for number, state in self.requests.items()
            if state.has_lane and not (state.is_idle or state.is_prefilling or number in self.faults)
            and number not in chunks and state.drafted >= len(state.text)
        ]  # fmt: skip
        num_drafting = max(sum(state.drafter is not None for state in drafting), 1)
        room = self._draft_room
        room.forwards, room.round = self._controller.forwards, 0
        room.rows = min(max(DRAFT_KNEE // num_drafting, 1), DRAFTED_ROWS)
        # Candidates below a row whose chance is far below that of a refused candidate would not enter soon. But chances grow with
        # the next verdict, which also frees room: all of it for a request alone, 1/B of it for one of B requests.
        room.min_chance = self._budget.refused * (1 - 1 / num_drafting)
        left, first = _MAX_CHOICES, self._first_drafted
        drafting.sort(key=lambda state: state.number < first)
        self._first_drafted = 0
        while True:
            asked: dict[int, list[tuple[Method, Sequence[int]]]] = {}
            for state in drafting:
                if left <= 0 and not room.round:
                    self._first_drafted = state.number
                    break
                with self.faults.of(state.number):
                    if of_request := state.draft(room.rows):
                        asked[state.number] = of_request
                        left -= sum([max(method.choices, len(of_tree) * method.children) for method, of_tree in of_request])
            if not asked and not chunks:
                break
            self._draft_round(asked, chunks)
            drafting, chunks = [state for state in drafting if state.number in asked and state.number not in self.faults], {}
            room.round += 1

    def _draft_round(self, asked: Mapping[int, list[tuple[Method, Sequence[int]]]], chunks: dict[int, Sequence[int]]) -> None:
        """Draft the rows that methods have asked for, by request, beside chunks of prompts; add the candidates to their trees."""
        drafted = [(method, rows) for of_request in asked.values() for method, rows in of_request if method.drafter is not None]
        candidates = self._expand([method.to_draft(rows) for method, rows in drafted], chunks)
        proposals: dict[int, list[Proposals]] = {}
        for number in [number for number in asked if number not in self.faults]:
            found = iter(candidates[number])
            with self.faults.of(number):
                for method, rows in asked[number]:
                    method.drafted(rows, None if method.drafter is None else next(found))
                proposals[number] = list(self._proposals)
            self._proposals.clear()
        self.faults.apart(list(proposals), lambda numbers: score([one for number in numbers for one in proposals[number]]))

    def observe(self, timing: TimestepTiming) -> None:
        """Learn how long a timestep of the full pipeline took."""
        self._controller.record_timestep(timing)

    def _context(self, request: TokenizedRequest, sequence: ThreadSequence) -> MethodContext:
        """The context of the methods of an answer's threads, from now until it is paused."""
        if self.awaits_drafter and find_method(request.method).draft != "none":
            request = replace(request, method=DEFAULT_METHOD, options=make_options(DEFAULT_METHOD, _DRAFTLESS))
        return MethodContext(
            request, sequence, self._drafter, self._experience, self._proposals, self._draft_room, self._controller.children,
            sequence.grammar, self.device, self._trained_masks, self._markov,
        )  # fmt: skip

    def _next_draft_chunks(self) -> dict[int, Sequence[int]]:
        """Take the next chunks of prompts for the draft model; none for requests that do not use it now."""
        chunks: dict[int, Sequence[int]] = {}
        room = self._budget.knee
        for number, state in self.requests.items():
            count = min(state.entered - state.drafted, room)
            if (
                count > 0
                and state.has_lane
                and number not in self.faults
                and not (state.is_tuned and not self._controller.is_speculating)
            ):
                chunks[number] = state.text[state.drafted : state.drafted + count]
                state.drafted += count
                room -= count
        return chunks

    def _expand(self, requested: list[DraftRows], chunks: dict[int, Sequence[int]]) -> dict[int, list[Candidates]]:
        """The candidates of each request's entries. Runs several forwards if there are more rows than one should compute."""
        candidates: defaultdict[int, list[Candidates]] = defaultdict(list)
        while requested or chunks:
            ends = list(accumulate([len(entry.rows) for entry in requested]))
            fitting = requested[: max(bisect_right(ends, DRAFT_KNEE), 1)]
            numbers = list(dict.fromkeys([*chunks, *[entry.number for entry in fitting]]))
            for found in self.faults.apart(numbers, partial(self._forward, fitting, chunks)):
                for number, one in found:
                    candidates[number].append(one)
            requested, chunks = [entry for entry in requested[len(fitting) :] if entry.number not in self.faults], {}
        return candidates

    def _forward(
        self, requested: Sequence[DraftRows], chunks: Mapping[int, Sequence[int]], numbers: Sequence[int]
    ) -> list[tuple[int, Candidates]]:
        """One forward over what is requested for some requests: each with the candidates of an entry."""
        assert self._drafter is not None
        entries = [entry for entry in requested if entry.number in numbers]
        prompts = {number: chunk for number, chunk in chunks.items() if number in numbers}
        with self.time_forward(self._load(entries, prompts)):
            return [(entry.number, one) for entry, one in zip(entries, self._drafter.expand(entries, prompts), strict=True)]

    def _load(self, requested: Sequence[DraftRows], chunks: Mapping[int, Sequence[int]]) -> Load:
        """The load of one forward. A chunk of a prompt is assumed to attend to no chunk before it."""
        rows = sum([len(entry.rows) for entry in requested]) + sum(map(len, chunks.values()))
        sequences = [self.requests[number].sequence for number in {entry.number for entry in requested}]
        past = [sequence.prompt_length + sum([thread.num_tokens for thread in sequence.threads]) for sequence in sequences]
        return Load(rows, sum(past))
