"""Schedules that no processor rounds: stages that compute nothing, and a draft that follows a script.

The script's log-probabilities are multiples of a power of two, so their sums are exact, and hardly any two are equal. BiTA is not
here, as its proposals come from the stages.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from benchmarks.policy.recording import DraftMemo, RecordedDrafter
from benchmarks.policy.replay import ReplayedAnswer, ReplayedPipeline, WatchedExperience
from golden.watched import DIGITS, counted, line
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.kv import KVManager
from pipedec.plan.budgets import kv_slots
from pipedec.plan.spec import PipelineSpec
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, RowChanges

VOCABULARY = 97
CHILDREN = 32
GRID = 2.0**-12


@cache
def following(token: int) -> list[tuple[int, float]]:
    """What the script says of the token behind ``token``: the likeliest first, with their log-probabilities."""
    chance = random.Random(token)
    steps = [chance.randint(1200, 3600) for _ in range(CHILDREN)]
    tokens = chance.sample(range(VOCABULARY), CHILDREN)
    return [(token, -GRID * sum(steps[: place + 1])) for place, token in enumerate(tokens)]


def answer_of(number: int, length: int) -> tuple[int, ...]:
    """What the target says: mostly the script's first choice, now and then a later one, at times one that it does not have."""
    chance, token, said = random.Random(1000 + number), number, list[int]()
    for _ in range(length):
        place = chance.choices((0, 1, 2, 7, None), (60, 15, 10, 5, 10))[0]
        token = chance.randrange(VOCABULARY) if place is None else following(token)[place][0]
        said.append(token)
    return tuple(said)


class Script:
    """A draft model of any number of requests."""

    def open_lane(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        return 0

    def close_lane(self, number: int) -> None: ...
    def threads_changed(self, number: int) -> None: ...
    def forget_prefixes(self) -> None: ...
    def follow_tree(self, number: int, thread: int, changes: RowChanges) -> None: ...

    def num_forwards(self, requested: Sequence[DraftRows]) -> int:
        return 1

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        return [_candidates(entry) for entry in requested]


def _candidates(entry: DraftRows) -> Candidates:
    lines = [following(token)[: entry.children] for token in entry.tree.tokens_of(list(entry.rows))]
    tokens, log_probs = ([[pair[index] for pair in one] for one in lines] for index in (0, 1))
    return Candidates(torch.tensor(entry.rows), torch.tensor(tokens), torch.tensor(log_probs))


class _CountedDrafter(RecordedDrafter):
    """Nothing is recorded, so the script is asked for everything."""

    def __init__(self) -> None:
        memos: dict[int, DraftMemo] = {}
        super().__init__(lambda number: memos.setdefault(number, DraftMemo()), Script, CHILDREN)
        self.forwards: list[int] = []  # rows of each

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        self.forwards.append(sum(len(entry.rows) for entry in requested) + sum(map(len, prompts.values())))
        return super().expand(requested, prompts)


class _Run:
    """Requests, by the timestep at which they come, through stages that compute nothing."""

    def __init__(self, spec: PipelineSpec, arrivals: Mapping[int, Iterable[TokenizedRequest]]) -> None:
        assert spec.emulation is not None
        self.drafter = _CountedDrafter()
        kv, experience = KVManager(kv_slots(spec), spec.kv_block), WatchedExperience(spec.topology.num_groups)
        self.pipeline = ReplayedPipeline(spec.emulation, spec.topology, self.drafter, experience, kv)
        self.answers: list[ReplayedAnswer] = []
        self.lines: list[str] = []
        self._coming = dict(sorted(arrivals.items()))
        self._noted = 0  # forwards
        for _ in self.pipeline.run(self._admit):
            continue
        assert not self._coming, "all have come before the others ended"

    def _admit(self) -> None:
        if self.pipeline.timesteps:
            self._note()
        for timestep in [timestep for timestep in self._coming if timestep <= self.pipeline.timesteps + 1]:
            for request in self._coming.pop(timestep):
                self.answers.append(self.pipeline.begin(request, answer_of(request.number, request.sampling.max_tokens)))

    def _note(self) -> None:
        """The timestep that has just ended."""
        rows = {group: sum(requests.values()) for group, requests in enumerate(self.pipeline.fill[-1], start=1)}
        self.lines.append(line(rows, self.drafter.forwards[self._noted :], self.pipeline.kv_slots[-1]))
        self._noted = len(self.drafter.forwards)


def scripted(spec: PipelineSpec, arrivals: Mapping[int, Iterable[TokenizedRequest]]) -> dict[str, Any]:
    """The schedule of requests that come at these timesteps; each says ``max_tokens`` of its script."""
    run = _Run(spec, arrivals)
    return {
        "answers": [counted(answer.metrics) for answer in run.answers],
        "emulated ms": round(1000 * run.pipeline.clock.seconds(), DIGITS),
        "draft forwards": len(run.drafter.forwards),
        "draft rows": sum(run.drafter.forwards),
        "steps": run.lines,
    }
