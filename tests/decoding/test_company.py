"""Many requests in one company, through a simulated pipeline: they come, are cancelled and end at any timestep."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from drafters import RARE, ScriptedDrafter
from examples import examples
from hypothesis import given
from hypothesis import strategies as st

from pipedec import threads
from pipedec.core import MethodOptions, Request, Step, UserError, Verdict
from pipedec.decoding import Company, Experience, Method, TimestepTiming
from pipedec.decoding.company import DRAFT_KNEE
from pipedec.methods import BestFirstOptions, PipeDecOptions, StaticTreeOptions
from pipedec.tree import Candidates, DraftRows, PredictionTree, RowChanges

KNEE = 16
METHODS: dict[str, tuple[MethodOptions | None, ...]] = {
    "pp": (None,),
    "pipedec": (PipeDecOptions(5, 3), PipeDecOptions(40, 4)),
    "stpp": (StaticTreeOptions(4, 3, 2), StaticTreeOptions(16, 4, 3)),
    "pipedec-bestfirst": (None, BestFirstOptions(width=3), BestFirstOptions(forwards=1), BestFirstOptions(proposers=("ngrams",))),
}


class KnowingDrafter:
    """Knows some of what every request's answer says next. Counts rows as a draft model with a cache does."""

    def __init__(self, chooser: random.Random) -> None:
        self.answers: dict[int, list[int]] = {}
        self.open_requests: dict[int, ScriptedDrafter] = {}
        self.prompts: dict[int, list[int]] = {}
        self.forwards: list[int] = []
        self._chooser = chooser

    def open(self, number: int, sequence: threads.Sequence, token_ids: Sequence[int]) -> int:
        assert number not in self.open_requests
        self.open_requests[number], self.prompts[number] = ScriptedDrafter({}), []
        return 0

    def close(self, number: int) -> None:
        del self.open_requests[number]

    def threads_changed(self, number: int) -> None: ...

    def advance(self, number: int, thread: int, changes: RowChanges) -> None:
        self.open_requests[number].advance(number, thread, changes)

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        for number, chunk in prompts.items():
            self.prompts[number] += chunk
        self.forwards.append(sum(len(entry.rows) for entry in requested))
        assert len({entry.number for entry in requested}) == len(requested)
        assert not {entry.number for entry in requested} & set(prompts)
        return [self._candidates(entry) for entry in requested]

    def _candidates(self, entry: DraftRows) -> Candidates:
        drafted = self.open_requests[entry.number].drafted
        assert not drafted & set(entry.rows)
        drafted |= set(entry.rows)
        lines = [self._line(entry, row)[: entry.children] for row in entry.rows]
        tokens = torch.tensor([[token for token, _ in line] for line in lines])
        return Candidates(
            torch.tensor(entry.rows), tokens, torch.tensor([[chance for _, chance in line] for line in lines]).log()
        )

    def _line(self, entry: DraftRows, row: int) -> list[tuple[int, float]]:
        answer, place = self.answers[entry.number], entry.tree.positions_of([row])[0] - len(self.prompts[entry.number]) + 1
        if self._chooser.random() < 0.6 and 0 <= place < len(answer):
            return [(answer[place], 0.8), *((token, 0.02) for token in range(100, 103))]
        return [(60, 0.3), *RARE, (63, 0.005)]


def proposed(company: Company) -> dict[int, Step]:
    """The rows that enter at the next timestep."""
    return {number: update.step for number, update in company.propose().items() if update.step is not None}


@dataclass
class Running:
    """A request with what a stage knows of it.

    Attributes:
        arrivals: rows that entered, by timesteps in the pipeline; of the prompt ``True`` if it ends there.
    """

    request: Request
    method: Method
    answer: list[int]
    tree: PredictionTree = field(default_factory=PredictionTree)
    prompt: list[int] = field(default_factory=list)
    arrivals: list[torch.Tensor | bool] = field(default_factory=list)
    computed: set[int] = field(default_factory=set)
    said: list[int] = field(default_factory=list)

    @property
    def whole_prompt(self) -> list[int]:
        return [*self.request.prompt_token_ids, *range(-1, -1 - self.method.masks.count, -1)]

    def enter(self, step: Step | None) -> None:
        if step is None:
            self.arrivals.insert(0, torch.zeros(0, dtype=torch.int64))
        elif len(self.prompt) < len(self.whole_prompt):
            assert set(step.parents.tolist()) == {-1}
            self.prompt += step.token_ids.tolist()
            assert self.prompt == self.whole_prompt[: len(self.prompt)]
            self.arrivals.insert(0, len(self.prompt) == len(self.whole_prompt))
        else:
            where = self.tree.append(step.token_ids, step.parents)
            self.arrivals.insert(0, torch.arange(where.start, where.stop))

    def verdict(self, groups: int) -> Verdict | None:
        """On what leaves the last group."""
        if len(self.arrivals) < groups:
            return None
        leaving = self.arrivals.pop()
        if isinstance(leaving, bool):
            return self._verdict(1) if leaving else None
        self.computed |= set(leaving.tolist())
        row, tokens = 0 if self.tree.num_rows else None, 0
        while row is not None and row in self.computed and len(self.said) + tokens < len(self.answer):
            row, tokens = self.tree.child(row, self.answer[len(self.said) + tokens]), tokens + 1
        return self._verdict(tokens) if tokens else None

    def _verdict(self, tokens: int) -> Verdict:
        accepted = self.answer[len(self.said) :][:tokens]
        self.said += accepted
        advance = self.tree.advance(accepted)
        self.arrivals = [rows if isinstance(rows, bool) else advance.renumber(rows)[1] for rows in self.arrivals]
        self.computed = set(advance.renumber(torch.tensor(sorted(self.computed), dtype=torch.int64))[1].tolist())
        return Verdict.of(*accepted, finished="length" if self.said == self.answer else None)


class Simulation:
    def __init__(self, seed: int) -> None:
        self.chooser = chooser = random.Random(seed)
        self.groups = chooser.choice((1, 2, 5))
        self.drafter = KnowingDrafter(chooser)
        self.experience = Experience(self.groups)
        self.company = Company(self.groups, self.drafter, trained_masks=2, knee=KNEE, experience=self.experience)
        self.running: dict[int, Running] = {}
        self.seconds_per_row = chooser.choice((0.0, 0.01, 1.0))

    def arrive(self, number: int) -> None:
        name = self.chooser.choice(list(METHODS))
        prompt = tuple(self.chooser.randrange(50) for _ in range(self.chooser.choice((1, 3, KNEE, 3 * KNEE + 1))))
        request = Request(
            number, prompt, method=name, options=self.chooser.choice(METHODS[name]), priority=self.chooser.choice((0, 0, 1))
        )
        answer = [self.chooser.randrange(50) for _ in range(self.chooser.randint(1, 12))]
        self.drafter.answers[number] = answer
        sequence = threads.single_thread(len(prompt), (), len(answer))
        self.company.open(request, lambda: sequence)
        self.running[number] = Running(request, self.company.method(number), answer)

    def timestep(self) -> None:
        steps = proposed(self.company)
        assert set(steps) <= set(self.running) and all(step.num_rows for step in steps.values())
        rows = sum(step.num_rows for step in steps.values())
        assert rows <= KNEE or len(steps) == 1
        self.company.draft()
        self.company.observe(TimestepTiming(1 + self.seconds_per_row * rows, 0.5, (0.1,)))
        for number, one in list(self.running.items()):
            one.enter(steps.get(number))
            verdict = one.verdict(self.groups)
            if verdict is not None:
                self.company.apply(number, verdict)
                if verdict.finished:
                    assert one.method.hits + one.method.misses == len(one.answer) - 1
                    del self.running[number]

    def cancel(self) -> None:
        number = self.chooser.choice(list(self.running))
        self.company.close(number)
        del self.running[number]


@examples(40)
@given(st.integers(0, 2**32))
def test_all_requests_end_whatever_is_beside_them(seed: int) -> None:
    """With its own tokens, in steps that a stage's tree takes; and nothing is left of those that are gone."""
    simulation = Simulation(seed)
    for number in range(40):
        if number < 25 and len(simulation.running) < 12:
            simulation.arrive(number)
        simulation.timestep()
        if simulation.running and simulation.chooser.random() < 0.1:
            simulation.cancel()
    for _ in range(3000):
        if not simulation.running:
            break
        simulation.timestep()
    assert not simulation.running
    assert simulation.drafter.open_requests == {}
    assert simulation.company.propose() == {}
    simulation.company.apply(7, Verdict.of(1))  # of a request that is gone: void


def test_a_draft_forward_serves_all_requests_and_is_bounded() -> None:
    chooser = random.Random(1)
    drafter = KnowingDrafter(chooser)
    company = Company(2, drafter, knee=256)
    for number in range(40):
        drafter.answers[number] = [chooser.randrange(50) for _ in range(30)]
        company.open(Request(number, (1, 2, 3)), partial(threads.single_thread, 3, (), 30))
    company.propose()
    company.draft()
    for number in range(40):
        company.apply(number, Verdict.of(drafter.answers[number][0]))
    drafter.forwards.clear()
    for _ in range(3):
        company.propose()
        company.draft()
    assert drafter.forwards[0] == 40 and len(drafter.forwards) <= 6
    assert max(drafter.forwards) <= DRAFT_KNEE


def test_without_speculation_nothing_is_drafted_and_prompts_are_made_up_for(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = KnowingDrafter(random.Random(1))
    experience = Experience(1)
    company = Company(1, drafter, knee=8, experience=experience)
    drafter.answers[0] = list(range(20))
    is_speculating = False
    monkeypatch.setattr(type(experience.controller), "is_speculating", property(lambda controller: is_speculating))
    company.open(Request(0, tuple(range(20))), partial(threads.single_thread, 20, (), 20))
    for _ in range(3):
        company.propose()
        company.draft()
    company.apply(0, Verdict.of(0))
    assert proposed(company)[0].num_rows == 1
    company.draft()
    assert drafter.forwards == []
    is_speculating = True
    for rows in (8, 16, 20, 20):
        company.draft()
        assert len(drafter.prompts[0]) == rows
    assert drafter.forwards[:4] == [0, 0, 0, 1], "rows are drafted behind the whole prompt"


def test_a_prompt_that_must_not_be_cut_enters_whole() -> None:
    company = Company(1, knee=8)
    company.whole_prompts = True
    company.open(Request(0, tuple(range(100)), method="pp"), partial(threads.single_thread, 100, (), 5))
    assert proposed(company)[0].num_rows == 100


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        Company(1).open(Request(0, (), method="pp"), partial(threads.single_thread, 0, (), 5))
