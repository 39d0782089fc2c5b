"""The methods of all running requests, and what of them enters the pipeline at each timestep.

Owns the draft model's use, the prompts that have yet to enter, and who waits for KV memory. Knows no stage, no process and no
client.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from msgspec import structs

from pipedec.core import DEFAULT_METHOD, Opening, Request, Step, Update, UserError, Verdict
from pipedec.decoding.budget import Budget, Claim
from pipedec.decoding.controller import Entered, TimestepTiming
from pipedec.decoding.drafter import Drafter
from pipedec.decoding.experience import Experience
from pipedec.decoding.memory import LaneSizes, Memory
from pipedec.decoding.method import DraftRoom, Method, MethodContext
from pipedec.decoding.request_state import RequestState
from pipedec.decoding.scoring import Scoring
from pipedec.decoding.tally import Tally
from pipedec.kv import KVManager
from pipedec.methods import find_method, make_options
from pipedec.threads import NewSequence
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows

DRAFTED_ROWS = 16  # of one forward for one request: more make no answer faster
DRAFT_KNEE = 64  # rows of one draft forward for all requests
_UNLIMITED = 2**40  # slots
_DRAFTLESS = {"proposers": ["ngrams"]}  # options of the default method in place of one whose draft model is not loaded yet


class Company:
    """Runs on rank 0. In every timestep: ``to_pause``, ``propose``, ``draft`` while the stages compute, ``apply`` per verdict.

    A request waits in here until there is KV memory for it; the stages learn of it with its first rows. Whose priority value is
    lower, and then whose number, comes first.

    Args:
        passage: timesteps that a row takes to pass through the pipeline.
        drafter: None without a draft model.
        device: of the draft model.
        trained_masks: mask rows that the target's BiTA was trained with; 0 if it has none.
        knee: rows that the stages compute in about the time of one.
        experience: what earlier requests have taught.
        kv: the books of the stages' KV memory; None for as much as anybody could need, without shared prefixes.
        lane_sizes: how much of it lanes get before they need it.

    Attributes:
        kv: see ``kv`` of the arguments.
        tally: counts what enters and is accepted.
        awaits_drafter: there is a draft model, but it is still being loaded: until ``adopt``, methods that need one are replaced
            by one that can do without, and gives the same answers.
    """

    def __init__(
        self,
        passage: int,
        drafter: Drafter | None = None,
        device: torch.device | str = "cpu",
        trained_masks: int = 0,
        knee: int = 64,
        experience: Experience | None = None,
        kv: KVManager | None = None,
        lane_sizes: LaneSizes = LaneSizes(),
    ) -> None:
        self.kv = kv or KVManager(_UNLIMITED, shares_prefixes=False)
        self.tally = Tally()
        self.awaits_drafter = False
        self._drafter = drafter
        self._undrafted: list[int] = []  # requests that are to be paused, since their draft model has been loaded
        self._device = device
        self._trained_masks = trained_masks
        self._budget = Budget(knee)
        self._experience = experience or Experience(passage)
        self._controller = self._experience.controller
        self._scoring = Scoring()
        self._draft_room = DraftRoom()
        self._memory = Memory(self.kv, knee, lane_sizes)
        self._requests: dict[int, RequestState] = {}  # by number, in order of age

    @property
    def num_waiting(self) -> int:
        """Requests that wait for KV memory."""
        return sum(not one.has_lane for one in self._requests.values())

    @property
    def num_running(self) -> int:
        """Requests with a lane."""
        return len(self._requests) - self.num_waiting

    def check(self, request: Request, sequence: ThreadSequence) -> None:
        """Whether the method of ``request`` can run here, and its answer can fit.

        Args:
            sequence: of its answer, just begun: what the answer's structure forces needs memory, too.

        Raises:
            UserError: the method is unknown, cannot work with its options, or needs a draft model or a BiTA and there is none;
                prompt and answer need more KV memory than there is; or the prompt's log-probabilities cannot be had.
        """
        self._new_state(request, lambda: sequence)

    def _new_state(self, request: Request, new_sequence: NewSequence) -> RequestState:
        if request.sampling.prompt_logprobs is not None and request.threads is not None:
            raise UserError("prompt_logprobs needs an answer in one thread: leave it, or threads, out")
        state = RequestState(request, new_sequence, self._context, self.tally)
        self._memory.check(state)
        return state

    def open(self, request: Request, new_sequence: NewSequence) -> None:
        """Begin a request: its prompt enters with the next timesteps, as soon as there is memory.

        Args:
            new_sequence: makes the sequence of its answer, in which the tokens are that it has said already. An answer in several
                threads that is paused gets a new one.

        Raises:
            UserError: as ``check``, or the prompt is empty.
        """
        if not request.prompt_token_ids:
            raise UserError("the prompt is empty: give at least one token")
        self._requests[request.number] = self._new_state(request, new_sequence)
        self._requests = dict(sorted(self._requests.items(), key=lambda item: item[1].age))

    def state(self, number: int) -> RequestState:
        """A running request. Its hits and misses include those before pauses of an answer in one thread."""
        return self._requests[number]

    def cached_tokens(self, number: int) -> int:
        """Tokens of a request's prompt that were found in the KV cache when it first entered; 0 as long as it has not."""
        return self._requests[number].cached_tokens or 0

    def apply(self, number: int, verdict: Verdict) -> None:
        """Follow a verdict; one with ``finished`` closes the request. One without a lane is ignored."""
        one = self._requests.get(number)
        if one is None or not one.has_lane:
            return
        one.apply(verdict)
        if verdict.finished is not None:
            self.close(number)

    def close(self, number: int) -> None:
        """Forget a request, which has ended or was cancelled."""
        one = self._requests.pop(number, None)
        if one is not None and one.has_lane:
            self._leave_lane(one)

    def adopt(self, drafter: Drafter) -> None:
        """The draft model is loaded. Requests whose methods would have used it are paused and go on with it."""
        self._drafter, self.awaits_drafter = drafter, False
        undrafted = [one for one in self._requests.values() if one.lacks_drafter]
        self._undrafted = [one.number for one in undrafted if one.has_lane]
        for one in undrafted:
            if not one.has_lane:
                one.pause(is_closing=one.is_closing)

    def forget_prefixes(self) -> None:
        """Requests that open from now on compute their prompts: they adopt nothing of those that have ended."""
        self.kv.forget_kept()
        if self._drafter is not None:
            self._drafter.forget_prefixes()

    def interrupt(self) -> None:
        """The stages have lost all lanes, and what their KV pools hold: every request waits, to go on behind what it has said."""
        for one in self._requests.values():
            if one.has_lane:
                self._forget_lane(one)
                one.pause(is_closing=False)
            one.is_closing = False
        self._memory.clear()

    def to_pause(self) -> list[int]:
        """Requests that must be paused now, since others need their memory, or to go on with the draft model that has come; to be
        asked before each ``propose``.
        """
        if self._undrafted:
            undrafted, self._undrafted = self._undrafted, []
            return [number for number in undrafted if (one := self._requests.get(number)) and one.has_lane and one.lacks_drafter]
        return self._memory.to_pause(list(self._requests.values()))

    def pause(self, number: int) -> None:
        """A request gives up its lane. It gets another one, before younger ones, after ``closed`` and when there is memory."""
        self.tally.pauses += 1
        self._leave_lane(self._requests[number])
        self._requests[number].pause()

    def closed(self, number: int) -> None:
        """Every stage has closed the lane of a request that was paused."""
        if number in self._requests:
            self._requests[number].is_closing = False

    def propose(self) -> dict[int, Update]:
        """By request, what enters at the next timestep: openings, chunks of prompts, rows of trees, and the slots they need.

        Openings are in the order in which the slots were given: one may copy what lies in slots that a later one gets.
        """
        updates: dict[int, Update] = {}
        prompt_rows = rows = 0
        for number, room in self._budget.share(list(self._claims()), self._controller.pays).items():
            one = self._requests[number]
            opening = None if one.has_lane else self._open_lane(one)
            if not one.has_lane:
                continue
            if one.is_prefilling:
                step = self._prefill(one, room)
                prompt_rows += 0 if step is None else step.num_rows
            else:
                step = self._decode(one, room)
            rows += 0 if step is None else step.num_rows
            updates[number] = Update(number, opening, step=step)
        for number, slots in self._memory.take_grown().items():
            updates[number] = structs.replace(updates.get(number, Update(number)), slots=slots)
        if self.kv.shares_prefixes:
            self._share_prefixes()
        self._controller.record_entered(Entered(rows, prompt_rows, self._num_tuned()))
        return {number: one for number, one in updates.items() if (one.opening, one.step, one.slots) != (None, None, ())}

    def _prefill(self, one: RequestState, room: int) -> Step | None:
        """The next chunk of a request's text."""
        entered = one.entered
        step = one.next_chunk(room)
        if step is not None:
            self.tally.enter(step, one.entered - entered, one.masks.count > 0)
        return step

    def _decode(self, one: RequestState, room: int) -> Step | None:
        """Rows of a request's trees, as far as there is memory."""
        room = self._memory.room_for(one, room)
        step = one.propose(room) if room else None
        if step is not None:
            self.tally.enter(step, 0, one.masks.count > 0)
        return step

    def _share_prefixes(self) -> None:
        """Let other requests adopt what has joined the past of each."""
        for one in self._requests.values():
            if one.has_lane and (added := one.take_adoptable()):
                self.kv.extend(one.number, added)

    def _claims(self) -> Iterator[Claim]:
        """Of requests with a lane, and of the first ones of those that wait, as many as might get rows now."""
        self._memory.begin(self._requests.values())
        prompt_rows = 0
        is_full = False
        for one in self._requests.values():
            cached = 0
            if not one.has_lane:
                found = None if is_full or prompt_rows >= self._budget.knee else self._memory.cached_for(one)
                if found is None:
                    is_full = True
                    continue
                cached = found
            claim = self._memory.fitted(one, one.claim(cached))
            prompt_rows += claim.prompt
            yield claim

    def _open_lane(self, one: RequestState) -> Opening | None:
        """Open the lane of a request; None if there is no memory left for it."""
        lease = self._memory.open(one)
        if lease is None:
            return None
        drafted = 0
        if self._drafter is not None and one.has_drafter:
            drafted = self._drafter.open(one.number, one.sequence, one.text)
        return one.open(lease, drafted)

    def _leave_lane(self, one: RequestState) -> None:
        """Close a lane. What it has accepted last is committed with its last verdict, before others open."""
        self.kv.extend(one.number, one.take_adoptable())
        self.kv.close(one.number)
        self._forget_lane(one)

    def _forget_lane(self, one: RequestState) -> None:
        self._budget.forget(one.number)
        if self._drafter is not None and one.has_drafter:
            self._drafter.close(one.number)

    def draft(self) -> None:
        """Rank 0's compute phase: the draft model's forwards, each for all requests."""
        chunks = self._next_draft_chunks()
        if chunks:
            self._controller.record_draft_prefill()
        running = [each for each in self._requests.values() if each.has_lane and each.number not in chunks]
        awake = [each for each in running if each.is_drafted and not each.is_idle]
        self._set_draft_room(sum(each.has_drafter for each in awake))
        drafting = awake
        while True:
            asked = {each.number: rows for each in drafting if (rows := each.draft(self._draft_room.rows))}
            if not asked and not chunks:
                break
            rows = [entry for of_request in asked.values() for entry in of_request]
            for (method, of_tree), candidates in zip(rows, self._forward(rows, chunks), strict=True):
                method.drafted(of_tree, candidates)
            self._scoring.score()
            drafting, chunks = [each for each in drafting if each.number in asked], {}
            self._draft_room.round += 1
        for each in awake:
            each.note_idle()

    def observe(self, timing: TimestepTiming) -> None:
        """Learn how long a timestep of the full pipeline took."""
        self._controller.record_timestep(timing)

    def _context(self, request: Request, sequence: ThreadSequence) -> MethodContext:
        """For the methods of an answer's threads, from now until it is paused."""
        if self.awaits_drafter and find_method(request.method).draft != "none":
            request = replace(request, method=DEFAULT_METHOD, options=make_options(DEFAULT_METHOD, _DRAFTLESS))
        return MethodContext(
            request,
            sequence,
            self._drafter,
            self._experience,
            self._scoring,
            self._draft_room,
            self._controller.children,
            self._device,
            self._trained_masks,
        )

    def _num_tuned(self) -> int:
        """The number of requests that are decoded, if all of them leave it to the controller how much to speculate, else 0."""
        decoded = [one for one in self._requests.values() if one.has_lane and not one.is_prefilling]
        return len(decoded) if all(one.is_tuned for one in decoded) else 0

    def _next_draft_chunks(self) -> dict[int, Sequence[int]]:
        """Take what the draft model computes of prompts in this timestep; nothing of those for which it is not used now."""
        chunks: dict[int, Sequence[int]] = {}
        room = self._budget.knee
        for number, one in self._requests.items():
            if not one.has_lane or (one.is_tuned and not self._controller.is_speculating):
                continue
            chunk = one.undrafted[:room]
            if chunk:
                chunks[number] = chunk
                one.drafted += len(chunk)
                room -= len(chunk)
        return chunks

    def _set_draft_room(self, num_drafting: int) -> None:
        """The draft model's rows are shared evenly by the requests that use it.

        A row whose chance is far below that of a refused one is not drafted: what it proposes would not enter soon. But its
        chance grows with the next verdict, which also frees room: all of it for a request alone, 1/B of it for one of B requests.
        """
        self._draft_room.forwards = self._controller.forwards
        self._draft_room.rows = min(max(DRAFT_KNEE // max(num_drafting, 1), 1), DRAFTED_ROWS)
        self._draft_room.min_chance = self._budget.refused * (1 - 1 / max(num_drafting, 1))
        self._draft_room.round = 0

    def _forward(self, rows: Sequence[tuple[Method, Sequence[int]]], chunks: dict[int, Sequence[int]]) -> list[Candidates | None]:
        """The candidates after ``rows``, None for methods without a draft model: one forward, or several if there are more rows
        than one should compute.
        """
        drafted = [method.to_draft(of_tree) for method, of_tree in rows if method.drafter is not None]
        candidates: list[Candidates] = []
        while drafted or chunks:
            assert self._drafter is not None
            count = _fitting(drafted)
            candidates += self._drafter.expand(drafted[:count], chunks)
            drafted, chunks = drafted[count:], {}
        found = iter(candidates)
        return [None if method.drafter is None else next(found) for method, _ in rows]


def _fitting(requested: Sequence[DraftRows]) -> int:
    """How many of these entries one forward computes: at least one."""
    rows = 0
    for count, entry in enumerate(requested):
        rows += len(entry.rows)
        if rows > DRAFT_KNEE and count:
            return count
    return len(requested)
