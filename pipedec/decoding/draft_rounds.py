"""Rank 0's compute phase: in every timestep some forwards of the draft model, each for all requests.

Methods name the rows of their trees to draft, and receive the candidates; prompts enter the same forwards in chunks. This is
repeated until no method wants more.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate

from pipedec.core.limits import DRAFT_KNEE, DRAFTED_ROWS
from pipedec.core.stage_message import Load
from pipedec.decoding.budget import Budget
from pipedec.decoding.method import DraftRoom, Method, Resources
from pipedec.decoding.proposers import PIECE, Proposals, score
from pipedec.decoding.request import Phase, Request
from pipedec.faults import RequestFaults
from pipedec.methods import MAX_CHOICES
from pipedec.tree import Candidates, DraftRows

_MAX_CHOICES = 2 * MAX_CHOICES  # of all requests; one without room drafts at the next timestep

# Returns the context in which one or more draft forwards run, the first of this load: a timer, or an emulated device.
ForwardTimer = Callable[[Load, int], AbstractContextManager[None]]
Asked = dict[int, list[tuple[Method, Sequence[int]]]]  # by request: methods of its threads, and the rows that they want drafted


class DraftRounds:
    """The forwards of one timestep after another. An exception in work for one request is noted in ``faults``."""

    def __init__(self, resources: Resources, budget: Budget, faults: RequestFaults) -> None:
        self.time_forward: ForwardTimer = lambda load, forwards: nullcontext()
        self._resources = resources
        self._budget = budget
        self._faults = faults
        self._controller = resources.experience.controller
        self._first = 0  # the request that drafts first, if there was no room for it at the last timestep

    def run(self, requests: Mapping[int, Request]) -> None:
        """Draft for these requests, by number, in the order in which they are served."""
        with_lanes = [one for one in requests.values() if one.has_lane and one.number not in self._faults]
        self._index_texts(with_lanes)
        chunks = self._next_chunks(with_lanes)
        if chunks:
            self._controller.drafts_prompts = True
        drafting = [  # requests whose tokens have entered and are in the draft model's cache
            one for one in with_lanes
            if one.phase is Phase.RUNNING and not one.is_idle and one.number not in chunks and one.drafted >= len(one.tokens)
        ]  # fmt: skip
        num_drafting = max(sum(one.method.drafter is not None for one in drafting), 1)
        # Candidates below a row whose chance is far below that of a refused candidate would not enter soon. But chances grow with
        # the next verdict, which also frees room: all of it for a request alone, 1/B of it for one of B requests.
        room = DraftRoom(
            min(max(DRAFT_KNEE // num_drafting, 1), DRAFTED_ROWS), self._controller.forwards,
            self._budget.refused * (1 - 1 / num_drafting),
        )  # fmt: skip
        left, first = _MAX_CHOICES, self._first
        drafting.sort(key=lambda one: one.number < first)
        self._first = 0
        while True:
            asked: Asked = {}
            for one in drafting:
                if left <= 0 and not room.round:
                    self._first = one.number
                    break
                with self._faults.of(one.number):
                    if of_request := one.ask(room):
                        asked[one.number] = of_request
                        left -= sum([max(method.choices, len(rows) * method.children) for method, rows in of_request])
            if not asked and not chunks:
                break
            self._run_round(asked, chunks, requests)
            drafting, chunks = [one for one in drafting if one.number in asked and one.number not in self._faults], {}
            room = room._replace(round=room.round + 1)

    def _index_texts(self, requests: Iterable[Request]) -> None:
        """Index a piece of a long prompt or earlier answer, so that it does not hold up a later timestep."""
        left = PIECE
        self._resources.experience.shared_texts.index(left)
        for one in requests:
            with self._faults.of(one.number):
                left -= one.method.index_text(left)
            if left <= 0:
                return

    def _next_chunks(self, requests: Iterable[Request]) -> dict[int, Sequence[int]]:
        """The next chunks of prompts for the draft model; none for requests that do not use it now."""
        chunks: dict[int, Sequence[int]] = {}
        room = self._budget.knee
        for one in requests:
            count = min(one.entered - one.drafted, room)
            if count > 0 and not (one.method.is_tuned and not self._controller.is_speculating):
                chunks[one.number] = one.tokens[one.drafted : one.drafted + count]
                one.drafted += count
                room -= count
        return chunks

    def _run_round(self, asked: Asked, chunks: Mapping[int, Sequence[int]], requests: Mapping[int, Request]) -> None:
        """Draft the rows that methods have asked for, beside chunks of prompts; add the candidates to their trees."""
        drafted = [(method, rows) for of_request in asked.values() for method, rows in of_request if method.drafter is not None]
        candidates = self._expand([method.to_draft(rows) for method, rows in drafted], chunks, requests)
        proposals: dict[int, list[Proposals]] = {}
        for number in [number for number in asked if number not in self._faults]:
            found = iter(candidates[number])
            with self._faults.of(number):
                made = [method.drafted(rows, None if method.drafter is None else next(found)) for method, rows in asked[number]]
                proposals[number] = [one for one in made if one is not None]
        self._faults.apart(list(proposals), lambda numbers: score([one for number in numbers for one in proposals[number]]))

    def _expand(
        self, requested: list[DraftRows], chunks: Mapping[int, Sequence[int]], requests: Mapping[int, Request]
    ) -> dict[int, list[Candidates]]:
        """The candidates of each request's entries. Runs several forwards if there are more rows than one should compute."""
        candidates: defaultdict[int, list[Candidates]] = defaultdict(list)
        while requested or chunks:
            ends = list(accumulate([len(entry.rows) for entry in requested]))
            fitting = requested[: max(bisect_right(ends, DRAFT_KNEE), 1)]
            numbers = list(dict.fromkeys([*chunks, *[entry.number for entry in fitting]]))
            for found in self._faults.apart(numbers, partial(self._forward, fitting, chunks, requests)):
                for number, one in found:
                    candidates[number].append(one)
            requested, chunks = [entry for entry in requested[len(fitting) :] if entry.number not in self._faults], {}
        return candidates

    def _forward(
        self, requested: Sequence[DraftRows], chunks: Mapping[int, Sequence[int]], requests: Mapping[int, Request],
        numbers: Sequence[int],
    ) -> list[tuple[int, Candidates]]:  # fmt: skip
        """One forward over what is requested for some requests: each with the candidates of an entry."""
        drafter = self._resources.drafter
        assert drafter is not None
        entries = [entry for entry in requested if entry.number in numbers]
        prompts = {number: chunk for number, chunk in chunks.items() if number in numbers}
        rows = sum([len(entry.rows) for entry in entries]) + sum(map(len, prompts.values()))
        sequences = [requests[number].sequence for number in {entry.number for entry in entries}]
        past = [sequence.prompt_length + sum([thread.num_tokens for thread in sequence.threads]) for sequence in sequences]
        forwards = drafter.num_forwards(entries) or int(bool(prompts))
        # A chunk of a prompt is assumed to attend to no chunk before it.
        with self.time_forward(Load(rows, sum(past)), forwards) if forwards else nullcontext():
            return [(entry.number, one) for entry, one in zip(entries, drafter.expand(entries, prompts), strict=True)]
