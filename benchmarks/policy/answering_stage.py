"""A last stage that computes nothing and knows the answers.

It is a real worker, so rows, verdicts and slots are treated as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from msgspec.structs import replace
from torch import Tensor

from pipedec.bench.overhead.null_stage import no_layers, sequence_of
from pipedec.core import NewRequest, RequestUpdate, SamplingParams, Step, Verdict
from pipedec.model import KVCache
from pipedec.stage.final import FinalLane, FinalStageWorker, SlotTokens
from pipedec.tree import Advance, ThreadChanges


@dataclass
class KnownAnswer:
    """An answer in one thread, without an end token, and the timesteps of its rows.

    Attributes:
        token_ids: the answer.
        prefilled: the timestep in which the prompt had arrived at the last stage; None before it.
        arrivals: the timesteps in which the rows of accepted tokens arrived at the last stage, in the order of the tokens.
    """

    token_ids: Sequence[int]
    prefilled: int | None = None
    arrivals: list[int] = field(default_factory=list)


AnswerOf = Callable[[int, NewRequest], KnownAnswer]


class _NoTokens(SlotTokens):
    """Remembers nothing: without penalties, past tokens are not needed."""

    def __init__(self) -> None:
        super().__init__(0)

    def read(self, slots: Iterable[range]) -> Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def write(self, slots: Iterable[range], token_ids: Tensor) -> None:
        """Do nothing."""


class _AnsweringLane(FinalLane):
    """Returns after each row the answer's token for the next position; rows off the answer's path are dropped anyway.

    Args:
        now: returns the present timestep.
    """

    def __init__(self, answer: KnownAnswer, now: Callable[[], int], opening: NewRequest, cache: KVCache, stage: int) -> None:
        plain = replace(opening, sampling=SamplingParams())
        super().__init__(plain, sequence_of(opening, len(answer.token_ids)), cache, "cpu", 1, _NoTokens(), stage)
        self._answer = answer
        self._now = now
        self._arrivals: list[int] = []  # of each row of the tree

    def say(self) -> list[int]:
        """The tokens after the rows that entered last."""
        token_ids, last = self._answer.token_ids, len(self._answer.token_ids) - 1
        positions = self._entered.positions[self._entered.num_rows - self.num_judged :].tolist()
        if self._entered.visibility is not None:
            self._arrivals += [self._now()] * len(positions)
        elif positions and not self._answer.arrivals:
            self._answer.prefilled = self._now()
        return [token_ids[min(position + 1 - self._prompt_length, last)] for position in positions]

    def sync(self, verdict: Verdict) -> tuple[Advance, ThreadChanges] | None:
        if (replayed := super().sync(verdict)) is not None:
            advance, _ = replayed
            self._answer.arrivals += [self._arrivals[row] for row in advance.committed.tolist()]
            self._arrivals = [self._arrivals[row] for row in advance.kept.tolist()]
        return replayed


class AnsweringStage(FinalStageWorker):
    """A last stage that knows the answers. Sampling parameters are ignored.

    Args:
        answer_of: returns the answer to a request, by its number and opening.
        now: returns the present timestep.
        slots, block, stage: see ``StageWorker``.
    """

    def __init__(self, answer_of: AnswerOf, now: Callable[[], int], slots: int, block: int = 16, stage: int = 1) -> None:
        super().__init__(no_layers(), sequence_of, slots=slots, block=block, stage=stage)
        self._answer_of = answer_of
        self._now = now

    def _new_lane(self, number: int, opening: NewRequest, cache: KVCache) -> FinalLane:
        return _AnsweringLane(self._answer_of(number, opening), self._now, opening, cache, self._stage)

    def _reply(
        self, updates: tuple[RequestUpdate, ...], steps: Mapping[int, Step], activations: Sequence[Tensor], is_finite: bool
    ) -> tuple[RequestUpdate, ...]:
        """The results in the order in which their lanes were opened, after those of lanes that have ended."""
        places = {number: place for place, number in enumerate(self._lanes)}
        results = super()._reply(updates, steps, activations, is_finite)
        return tuple(sorted(results, key=lambda result: places.get(result.number, -1)))

    def _judge(self, computed: list[tuple[FinalLane, Tensor]], is_finite: bool) -> list[list[int]]:
        return [cast(_AnsweringLane, lane).say() for lane, _ in computed]
