"""The methods of all running requests, and what of them enters the pipeline at each timestep.

Owns the draft model's use and the prompts that have yet to enter. Knows no stage, no process and no client.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from pipedec.core import Request, Step, UserError, Verdict
from pipedec.decoding.controller import TimestepTiming
from pipedec.decoding.drafter import Drafter
from pipedec.decoding.experience import Experience
from pipedec.decoding.lockstep import in_lockstep, resumed
from pipedec.decoding.method import Method
from pipedec.decoding.registry import create_method
from pipedec.threads import Sequence, single_thread


@dataclass
class _Member:
    """A running request.

    Attributes:
        prompt: int64, what of the prompt has yet to enter, and the masks behind it.
    """

    request: Request
    method: Method
    prompt: Tensor = field(repr=False)


class Company:
    """Runs on rank 0. In every timestep: ``propose``, ``draft`` while the stages compute, and ``apply`` for each verdict.

    Args:
        passage: timesteps that a row takes to pass through the pipeline.
        drafter: None without a draft model.
        device: of the rows that enter.
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
        self._knee = knee
        self._experience = experience or Experience(passage)
        self._members: dict[int, _Member] = {}  # by request, in order of arrival
        self._chunks: dict[int, Tensor] = {}  # by request, the part of its prompt that enters now, for the draft model

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
        prompt = torch.tensor([*request.prompt_token_ids, *masks], dtype=torch.int64, device=self._device)
        self._members[request.number] = _Member(request, method, prompt)
        if self._drafter is not None and method.has_drafter:
            self._drafter.open(request.number, sequence)
        return method

    def apply(self, number: int, verdict: Verdict) -> None:
        """Follow a verdict; one with ``finished`` closes the request. A request that is not running is ignored."""
        if number not in self._members:
            return
        self._members[number].method.apply(verdict)
        if verdict.finished is not None:
            self.close(number)

    def close(self, number: int) -> None:
        """Forget a request, which has ended or was cancelled."""
        member = self._members.pop(number, None)
        self._chunks.pop(number, None)
        if member is not None and self._drafter is not None and member.method.has_drafter:
            self._drafter.close(number)

    def propose(self) -> dict[int, Step]:
        """By request, the rows that enter at the next timestep: chunks of prompts, and rows of trees."""
        self._chunks = {}
        steps = {}
        for number, member in self._members.items():
            step = self._next_chunk(number, member) if len(member.prompt) else member.method.propose()
            if step is not None:
                steps[number] = step
        return steps

    def draft(self) -> None:
        """Rank 0's compute phase: the draft model's forwards, each for all requests."""
        chunks, self._chunks = self._chunks, {}
        drafting = in_lockstep([member.method.draft() for member in self._members.values() if not len(member.prompt)])
        requested = next(drafting, None)
        while requested is not None or chunks:
            assert self._drafter is not None
            candidates, chunks = self._drafter.expand(requested or [], chunks), {}
            requested = None if requested is None else resumed(drafting, candidates)

    def observe(self, timing: TimestepTiming) -> None:
        """Learn how long a timestep of the full pipeline took."""
        for member in self._members.values():
            member.method.observe(timing)

    def _method(self, request: Request, sequence: Sequence) -> Method:
        return create_method(request, sequence, self._drafter, self._experience, self._device, self._trained_masks)

    def _next_chunk(self, number: int, member: _Member) -> Step:
        """Take the next chunk of a prompt."""
        ends = member.method.masks.count  # masks follow the last chunk
        rows = len(member.prompt)
        count = rows if self.whole_prompts or rows - ends <= self._knee else self._knee
        chunk, member.prompt = member.prompt[:count], member.prompt[count:]
        if member.method.has_drafter:
            self._chunks[number] = chunk
        return Step(chunk, torch.full_like(chunk, -1))
