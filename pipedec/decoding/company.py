"""The methods of all running requests, and what of them enters the pipeline at each timestep.

Owns the draft model's use and the prompts that have yet to enter. Knows no stage, no process and no client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pipedec.core import Request, Step, UserError, Verdict
from pipedec.decoding.budget import Budget, Claim, Wish
from pipedec.decoding.context import DraftRoom, MethodContext
from pipedec.decoding.controller import Entered, TimestepTiming
from pipedec.decoding.drafter import Drafter, RequestDrafter
from pipedec.decoding.experience import Experience
from pipedec.decoding.lockstep import in_lockstep, resumed
from pipedec.decoding.method import Method
from pipedec.decoding.registry import create_method
from pipedec.decoding.scoring import Scoring
from pipedec.threads import Sequence, single_thread
from pipedec.tree import Candidates, DraftRows

DRAFTED_ROWS = 16  # of one forward for one request: more make no answer faster
DRAFT_KNEE = 64  # rows of one draft forward for all requests


@dataclass
class _Member:
    """A running request.

    Attributes:
        prompt: what of the prompt has yet to enter, and the masks behind it.
        undrafted: what of the prompt has entered and is not in the draft model's cache.
        rests: nothing of it enters, and nothing is drafted for it, before the next verdict.
    """

    request: Request
    method: Method
    prompt: list[int]
    undrafted: list[int] = field(default_factory=list)
    rests: bool = False

    @property
    def is_prefilling(self) -> bool:
        return len(self.prompt) > 0

    @property
    def is_drafted(self) -> bool:
        """Whether the whole prompt has entered, and the draft model has computed it if the method uses it."""
        return not self.prompt and not self.undrafted

    def claim(self, whole_prompts: bool) -> Claim:
        number, priority, rows = self.request.number, self.request.priority, len(self.prompt)
        if self.rests:
            return Claim(number, priority)
        if not rows:
            return Claim(number, priority, self.method.wish())
        tail = 1 + self.method.masks.count  # the masks enter with the last token
        if whole_prompts or rows <= tail:
            return Claim(number, priority, Wish(whole=rows))
        return Claim(number, priority, prompt=rows, tail=tail)

    def next_chunk(self, rows: int, device: torch.device | str) -> Step:
        """Take the next chunk of the prompt."""
        chunk, self.prompt = self.prompt[:rows], self.prompt[rows:]
        if self.method.has_drafter:
            self.undrafted += chunk
        token_ids = torch.tensor(chunk, dtype=torch.int64, device=device)
        return Step(token_ids, torch.full_like(token_ids, -1))


class Company:
    """Runs on rank 0. In every timestep: ``propose``, ``draft`` while the stages compute, and ``apply`` for each verdict.

    Args:
        passage: timesteps that a row takes to pass through the pipeline.
        drafter: None without a draft model.
        device: of the rows that enter, and of the draft model.
        trained_masks: mask rows that the target's BiTA was trained with; 0 if it has none.
        knee: rows that the stages compute in about the time of one.
        experience: what earlier requests have taught.

    Attributes:
        whole_prompts: whether a prompt enters in one step, however long it is.
    """

    def __init__(
        self,
        passage: int,
        drafter: Drafter | None = None,
        device: torch.device | str = "cpu",
        trained_masks: int = 0,
        knee: int = 64,
        experience: Experience | None = None,
    ) -> None:
        self.whole_prompts = False
        self._drafter = drafter
        self._device = device
        self._trained_masks = trained_masks
        self._budget = Budget(knee)
        self._experience = experience or Experience(passage)
        self._controller = self._experience.controller
        self._scoring = Scoring(device)
        self._draft_room = DraftRoom()
        self._members: dict[int, _Member] = {}  # by request, in order of arrival

    def check(self, request: Request) -> None:
        """Whether the method of ``request`` can run here.

        Raises:
            UserError: it is unknown, cannot work with its options, or needs a draft model or a BiTA and there is none.
        """
        self._method(request, single_thread(len(request.prompt_token_ids), (), 1))

    def open(self, request: Request, sequence: Sequence) -> Method:
        """Begin a request: its prompt enters with the next timesteps.

        Args:
            sequence: the answer's threads, just begun. Only the method passes accepted tokens to it.

        Raises:
            UserError: as ``check``.
        """
        if not request.prompt_token_ids:
            raise UserError("the prompt is empty: give at least one token")
        method = self._method(request, sequence)
        masks = range(-1, -1 - method.masks.count, -1)
        self._members[request.number] = _Member(request, method, [*request.prompt_token_ids, *masks])
        if self._drafter is not None and method.has_drafter:
            self._drafter.open(request.number, sequence)
        return method

    def apply(self, number: int, verdict: Verdict) -> None:
        """Follow a verdict; one with ``finished`` closes the request. A request that is not running is ignored."""
        if number not in self._members:
            return
        self._members[number].method.apply(verdict)
        self._members[number].rests = False
        if verdict.finished is not None:
            self.close(number)

    def close(self, number: int) -> None:
        """Forget a request, which has ended or was cancelled."""
        member = self._members.pop(number, None)
        self._budget.forget(number)
        if member is not None and self._drafter is not None and member.method.has_drafter:
            self._drafter.close(number)

    def propose(self) -> dict[int, Step]:
        """By request, the rows that enter at the next timestep: chunks of prompts, and rows of trees."""
        claims = [member.claim(self.whole_prompts) for member in self._members.values()]
        shares = self._budget.share(claims, self._controller.pays)
        steps: dict[int, Step] = {}
        prompt_rows = 0
        for number, rows in shares.items():
            member = self._members[number]
            if member.is_prefilling:
                steps[number] = member.next_chunk(rows, self._device)
                prompt_rows += rows
            elif (step := member.method.propose(rows)) is not None:
                steps[number] = step
        self._controller.record_entered(Entered(sum(step.num_rows for step in steps.values()), prompt_rows, self._num_tuned()))
        return steps

    def draft(self) -> None:
        """Rank 0's compute phase: the draft model's forwards, each for all requests."""
        chunks = self._next_draft_chunks()
        if chunks:
            self._controller.record_draft_prefill()
        awake = [each for number, each in self._members.items() if each.is_drafted and not each.rests and number not in chunks]
        drafting = [each.method for each in awake]
        self._set_draft_room(sum(method.has_drafter for method in drafting))
        rounds = in_lockstep([method.draft() for method in drafting])
        requested = next(rounds, None)
        while requested is not None or chunks:
            candidates, chunks = self._expand(requested or [], chunks), {}
            requested = None if requested is None else resumed(rounds, candidates)
        for each in awake:
            each.rests = each.method.rests

    def observe(self, timing: TimestepTiming) -> None:
        """Learn how long a timestep of the full pipeline took."""
        self._controller.record_timestep(timing)

    def _method(self, request: Request, sequence: Sequence) -> Method:
        drafter = None if self._drafter is None else RequestDrafter(self._drafter, request.number)
        return create_method(
            MethodContext(
                request,
                sequence,
                drafter,
                self._experience,
                self._scoring,
                self._draft_room,
                self._device,
                self._trained_masks,
            )
        )

    def _num_tuned(self) -> int:
        """The number of running requests if all of them leave it to the controller how much to speculate, else 0."""
        running = [member.method for member in self._members.values() if not member.is_prefilling]
        return len(running) if all(method.is_tuned for method in running) else 0

    def _next_draft_chunks(self) -> dict[int, list[int]]:
        """Take what the draft model computes of prompts in this timestep; nothing of those for which it is not used now."""
        chunks: dict[int, list[int]] = {}
        room = self._budget.knee
        for number, member in self._members.items():
            if member.method.is_tuned and not self._controller.is_speculating:
                continue
            count = len(member.undrafted) if self.whole_prompts else min(len(member.undrafted), room)
            if count:
                chunks[number], member.undrafted = member.undrafted[:count], member.undrafted[count:]
                room -= count
        return chunks

    def _set_draft_room(self, num_drafting: int) -> None:
        """The draft model's rows are shared evenly by the requests that use it."""
        self._draft_room.forwards = self._controller.forwards
        self._draft_room.rows = min(max(DRAFT_KNEE // max(num_drafting, 1), 1), DRAFTED_ROWS)
        self._draft_room.min_chance = self._budget.refused

    def _expand(self, requested: list[DraftRows], chunks: dict[int, list[int]]) -> list[Candidates]:
        """The candidates for ``requested``: one forward, or several if there are more rows than one should compute."""
        candidates: list[Candidates] = []
        while requested or chunks:
            assert self._drafter is not None
            count = _fitting(requested)
            candidates += self._drafter.expand(requested[:count], chunks)
            requested, chunks = requested[count:], {}
        return candidates


def _fitting(requested: list[DraftRows]) -> int:
    """How many of these entries one forward computes: at least one."""
    rows = 0
    for count, entry in enumerate(requested):
        rows += len(entry.rows)
        if rows > DRAFT_KNEE and count:
            return count
    return len(requested)
