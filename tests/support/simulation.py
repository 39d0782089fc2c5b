"""A simulated pipeline for a scheduler of requests: one stage that remembers what is in the slots of its KV pool, and an end that
says what the answers say. Requests come, are cancelled, are paused and end at any timestep.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch

from pipedec import threads
from pipedec.core.errors import UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, RequestUpdate, SlotRuns, Step
from pipedec.core.verdict import Verdict
from pipedec.decoding import Drafter, Experience, LaneSizes, Request, Resources, Scheduler, TimestepTiming
from pipedec.families import StateCounts
from pipedec.kv import KVManager
from pipedec.methods import BestFirstOptions, BitaOptions, PipeDecOptions, StaticTreeOptions
from pipedec.threads import NewSequence
from pipedec.threads import Sequence as ThreadSequence
from pipedec.tree import Candidates, DraftRows, PredictionTree, RowChanges
from support.drafters import RARE, IdleDrafter, ScriptedDrafter
from support.toy_dialects import behind
from support.toy_structures import Rule, ToyStructure, rule_of

KNEE = 16
METHODS: dict[str, tuple[MethodOptions | None, ...]] = {
    "pp": (None,),
    "pipedec": (PipeDecOptions(5, 3), PipeDecOptions(40, 4)),
    "stpp": (
        StaticTreeOptions(4, 3, 2),
        StaticTreeOptions(16, 4, 3),
        StaticTreeOptions(depth=3, rows=9, proposers=("draft", "ngrams")),
    ),
    "bita": (BitaOptions(depth=2), BitaOptions(depth=2, shape="straightforward")),
    "pipedec-bestfirst": (None, BestFirstOptions(width=3), BestFirstOptions(forwards=1), BestFirstOptions(proposers=("ngrams",))),
}
MASKS = 2


class KnowingDrafter(IdleDrafter):
    """Knows ``share`` of what every request's answer says next. Counts rows as a draft model with a cache does."""

    def __init__(self, chooser: random.Random, share: float = 0.6) -> None:
        self._share = share
        self.answers: dict[int, list[int]] = {}
        self.open_requests: dict[int, ScriptedDrafter] = {}
        self.prompts: dict[int, list[int]] = {}
        self.texts: dict[int, list[int]] = {}
        self.forwards: list[int] = []
        self.adopts = False
        self._chooser = chooser
        self._sequences: dict[int, threads.Sequence] = {}
        self._prompt_lengths: dict[int, int] = {}

    def open_lane(self, number: int, sequence: threads.Sequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        assert number not in self.open_requests
        cached = self._chooser.randint(0, len(token_ids)) if self.adopts else 0
        self.open_requests[number], self.prompts[number] = ScriptedDrafter({}), [*token_ids[:cached]]
        self._sequences[number] = sequence
        self.texts[number], self._prompt_lengths[number] = [*token_ids], sequence.prompt_length
        return cached

    def close_lane(self, number: int) -> None:
        del self.open_requests[number]

    def follow_tree(self, number: int, thread: int, changes: RowChanges) -> None:
        self.open_requests[number].follow_tree(number, thread, changes)

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Sequence[int]]) -> list[Candidates]:
        for number, chunk in prompts.items():
            self.prompts[number] += chunk
            assert self.prompts[number] == self.texts[number][: len(self.prompts[number])]
        self.forwards.append(sum(len(entry.rows) for entry in requested))
        assert len({entry.number for entry in requested}) == len(requested)
        assert not {entry.number for entry in requested} & set(prompts)
        return [self._candidates(entry) for entry in requested]

    def _candidates(self, entry: DraftRows) -> Candidates:
        assert self.prompts[entry.number] == self.texts[entry.number], "rows are drafted behind the whole prompt"
        drafted = self.open_requests[entry.number].drafted
        assert not drafted & set(entry.rows)
        drafted |= set(entry.rows)
        if self.adopts and self._chooser.random() < 0.1:  # there is no memory
            return Candidates(torch.tensor(entry.rows), torch.zeros(len(entry.rows), 0).long(), torch.zeros(len(entry.rows), 0))
        lines = [self._possible(entry, row, self._line(entry, row))[: entry.children] for row in entry.rows]
        tokens = torch.tensor([[token for token, _ in line] for line in lines])
        return Candidates(
            torch.tensor(entry.rows), tokens, torch.tensor([[chance for _, chance in line] for line in lines]).log()
        )

    def _possible(self, entry: DraftRows, row: int, line: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """What a structure allows has a chance, at the least; nothing else has."""
        grammar = self._sequences[entry.number].grammar
        if grammar is None:
            return line
        path = entry.tree.tokens_of(entry.tree.ancestors_of(row)[-2::-1])
        allowed, chances = grammar.allowed(path), dict(line)
        ranked = sorted(((token, chances.get(token, 0.001)) for token in allowed), key=lambda pair: -pair[1])
        return [*ranked, *((token, 0.0) for token, _ in line if token not in allowed), *[(0, 0.0)] * 4][:4]

    def _line(self, entry: DraftRows, row: int) -> list[tuple[int, float]]:
        answer, place = self.answers[entry.number], entry.tree.positions_of([row])[0] - self._prompt_lengths[entry.number] + 1
        if self._chooser.random() < self._share and 0 <= place < len(answer):
            return [(answer[place], 0.8), *((token, 0.02) for token in range(100, 103))]
        return [(62, 0.3), *RARE, (63, 0.005)]


class Stage:
    """A stage's pool.

    Attributes:
        memory: for each slot with a token of a past, a digest of this token and all before it.
        states: for each place of states, the digest of the tokens that led to them.
    """

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}
        self.states: dict[int, int] = {}
        self.lanes: dict[int, Lane] = {}

    def check(self) -> None:
        """The past of every lane is its own text."""
        for lane in self.lanes.values():
            digest = 0
            for token, slot in zip(lane.past, lane.slots, strict=False):
                digest = hash((digest, token))
                assert self.memory[slot] == digest


class Lane:
    """A request on a stage, between its opening and its closing.

    Attributes:
        arrivals: rows that entered, by timesteps in the pipeline; of the prompt ``True`` if it ends there.
        said: by the verdicts of the last stage.
    """

    def __init__(
        self, stage: Stage, request: TokenizedRequest, answer: list[int], rule: Rule | None, opening: NewRequest
    ) -> None:
        self.slots: list[int] = []
        self.tree = PredictionTree()
        self.arrivals: list[torch.Tensor | bool] = []
        self.computed: set[int] = set()
        self.said = list(opening.output_token_ids)
        self.answer = answer
        self._rule = rule
        self._stage = stage
        self._text = [*request.prompt_token_ids, *opening.output_token_ids]
        self._masks = MASKS if opening.tokens_per_mask else 0
        assert opening.prompt_length == len(request.prompt_token_ids) and self.said == answer[: len(self.said)]
        self.extend(opening.slots)
        self.past = self._text[: opening.cached]
        assert len(self.past) < len(self._text)
        for index in range(opening.copied[1]):
            target = self.slots[opening.cached - opening.copied[1] + index]
            stage.memory[target] = stage.memory[opening.copied[0] + index]
        self._snapshots = dict(opening.snapshots)
        assert opening.snapshot is None or stage.states[opening.snapshot] == self._digest

    def extend(self, slots: SlotRuns) -> None:
        self.slots += [slot for start, count in slots for slot in range(start, start + count)]

    def enter(self, step: Step | None) -> None:
        if step is None:
            self.arrivals.insert(0, torch.zeros(0, dtype=torch.int64))
        elif len(self.past) < len(self._text):
            assert set(step.parents.tolist()) == {-1}
            self._prefill([token for token in step.token_ids.tolist() if token >= 0], step.num_rows)
        else:
            where = self.tree.append(step.token_ids, step.parents)
            self.arrivals.insert(0, torch.arange(where.start, where.stop))
            self._write_rows(self.tree.num_rows)
            self._check_structure(where)

    def _check_structure(self, where: slice) -> None:
        """Nothing enters that is not allowed."""
        if self._rule is None:
            return
        for path in map(self.tree.path, range(where.start, where.stop)):
            assert all(token < 0 or token in self._rule((*self.said, *path[:index])) for index, token in enumerate(path))

    def _prefill(self, chunk: list[int], rows: int) -> None:
        first = len(self.past)
        self._commit(chunk)
        is_last = self.past == self._text
        assert self.past == self._text[: len(self.past)] and rows - len(chunk) == (self._masks if is_last else 0)
        self._write_rows(rows - len(chunk))
        self.arrivals.insert(0, is_last)
        assert len(self.past) > first
        assert not any(first < tokens < len(self.past) for tokens in self._snapshots), "chunks end where states are kept"
        if (place := self._snapshots.get(len(self.past))) is not None:
            self._stage.states[place] = self._digest

    @property
    def _digest(self) -> int:
        """That of all its past."""
        return self._stage.memory[self.slots[len(self.past) - 1]] if self.past else 0

    def _commit(self, tokens: list[int]) -> None:
        memory, digest = self._stage.memory, self._digest
        for token in tokens:
            digest = memory[self.slots[len(self.past)]] = hash((digest, token))
            self.past.append(token)

    def _write_rows(self, count: int) -> None:
        """Rows that are in no past are written behind it."""
        assert len(self.past) + count <= len(self.slots), "a lane has slots for all its rows"
        for slot in self.slots[len(self.past) : len(self.past) + count]:
            self._stage.memory[slot] = -1

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
        forecast = tuple((token, 60, 61) for token in self.answer[len(self.said) :][: self._masks])
        finished = "length" if self.said == self.answer else None
        return Verdict.of(*accepted, finished=finished, forecast=forecast if self._masks else ())

    def replay(self, verdict: Verdict) -> None:
        advance = self.tree.advance_to(verdict.tokens)
        self._commit(advance.committed_ids.tolist())
        self._write_rows(self.tree.num_rows)
        self.arrivals = [rows if isinstance(rows, bool) else advance.renumber(rows)[1] for rows in self.arrivals]
        self.computed = set(advance.renumber(torch.tensor(sorted(self.computed), dtype=torch.int64))[1].tolist())


def updates(scheduler: Scheduler) -> dict[int, RequestUpdate]:
    """What enters at the next timestep, by request."""
    return {update.number: update for update in scheduler.entering().updates}


def proposed(scheduler: Scheduler) -> dict[int, Step]:
    """The rows that enter at the next timestep."""
    return {number: update.step for number, update in updates(scheduler).items() if update.step is not None}


def entered(scheduler: Scheduler) -> dict[int, int]:
    """By request, the number of rows that enter at the next timestep."""
    return {number: step.num_rows for number, step in proposed(scheduler).items()}


def scheduler_of(
    passage: int, drafter: Drafter | None = None, knee: int = KNEE_ROWS, kv: KVManager | None = None,
    lane_sizes: LaneSizes = LaneSizes(), trained_masks: int = 0, experience: Experience | None = None,
    states: StateCounts | None = None,
) -> Scheduler:  # fmt: skip
    """A scheduler without requests."""
    resources = Resources(experience or Experience(passage), drafter, trained_masks=trained_masks)
    return Scheduler(resources, kv, knee, lane_sizes, states=states)


def begin(scheduler: Scheduler, request: TokenizedRequest, new_sequence: NewSequence | None = None) -> Request:
    """Let a request begin; its answer is in one thread and has no end token unless ``new_sequence`` is given."""
    prompt, tokens = len(request.prompt_token_ids), request.sampling.max_tokens
    begun = scheduler.prepare(request, new_sequence or partial(ThreadSequence, prompt, (), tokens))
    scheduler.open(begun)
    return begun


def judge(scheduler: Scheduler, number: int, verdict: Verdict, timestep: int = 1) -> None:
    """Let the last stage's verdict arrive."""
    scheduler.take(RequestUpdate(number, verdict=verdict), timestep)


def close_lane(scheduler: Scheduler, number: int, reason: str = "paused") -> None:
    """Let every stage close a lane."""
    scheduler.take(RequestUpdate(number, verdict=Verdict((), reason)), 1)


@dataclass
class Running:
    """A request that has not ended."""

    request: TokenizedRequest
    answer: list[int]
    rule: Rule | None = None


@dataclass
class Simulation:
    """A scheduler and its pipeline.

    Attributes:
        kv: None for as much memory as anybody wants.
        states: of the stage's recurrent layers; None if it has none.
        timesteps: so far.
        texts: what conversations were about: prompts begin with the beginning of one.
        methods: of the requests.
        has_structures: some answers have one.
        known: share of the answers that the draft model knows.
        verdicts: those of the last timestep.
    """

    seed: int
    kv: KVManager | None = None
    lane_sizes: LaneSizes = LaneSizes()
    states: StateCounts | None = None
    running: dict[int, Running] = field(default_factory=dict)
    timesteps: int = 0
    texts: list[tuple[int, ...]] = field(default_factory=lambda: [()])
    cached: int = 0
    methods: Mapping[str, tuple[MethodOptions | None, ...]] = field(default_factory=METHODS.copy)
    has_structures: bool = True
    known: float = 0.6
    groups: int = 0  # drawn unless it is given
    adopts_drafter: bool = False  # a draft model that came late: requests of any age are paused for it
    verdicts: dict[int, Verdict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chooser = chooser = random.Random(self.seed)
        self.groups = self.groups or chooser.choice((1, 2, 5))
        self.drafter = KnowingDrafter(chooser, self.known)
        self.drafter.adopts = self.kv is not None
        self.scheduler = self._new_scheduler(self.drafter)
        self.stage = Stage()
        self.seconds_per_row = chooser.choice((0.0, 0.01, 1.0))
        self._closing: list[tuple[int, int, str]] = []  # when every stage has closed a lane: timestep, request, reason

    def _new_scheduler(self, drafter: Drafter | None) -> Scheduler:
        return scheduler_of(self.groups, drafter, KNEE, self.kv, self.lane_sizes, MASKS, states=self.states)

    def arrive(self, number: int, lengths: Sequence[int] = (1, 2, 3, 5, 8, 12, 30, 60)) -> None:
        chooser, name = self.chooser, self.chooser.choice(list(self.methods))
        before = chooser.choice(self.texts)
        new = (chooser.randrange(50) for _ in range(chooser.choice((1, 3, KNEE, 3 * KNEE + 1))))
        prompt = (*before[: chooser.randint(0, len(before))], *new)
        answer = [chooser.randrange(50) for _ in range(chooser.choice(lengths))]
        said = tuple(answer[: chooser.randrange(len(answer))] if self.kv is not None and chooser.random() < 0.2 else ())
        is_structured = self.has_structures and chooser.random() < 0.5
        rule = cache(rule_of(answer, (*range(50), *range(60, 64), *range(100, 103)), self.seed)) if is_structured else None
        sampling, options = SamplingParams(max_tokens=len(answer)), chooser.choice(self.methods[name])
        request = TokenizedRequest(
            number, prompt, sampling, name, options, priority=chooser.choice((0, 0, 1)), output_token_ids=said
        )
        self.drafter.answers[number] = answer
        try:
            structure = (lambda: None) if rule is None else partial(ToyStructure, rule)
            begin(self.scheduler, request, lambda: behind(said, ThreadSequence(len(prompt), (), len(answer), structure())))  # type: ignore[arg-type] # a stand-in
        except UserError as error:
            lacks_slots = self.kv is not None and len(prompt) + len(answer) + 150 > self.kv.capacity
            assert lacks_slots or (self.states is not None and "ask for a smaller tree" in str(error))
        else:
            self.running[number] = Running(request, answer, rule)

    def timestep(self) -> dict[int, RequestUpdate]:
        self.timesteps += 1
        while self._closing and self._closing[0][0] <= self.timesteps:
            _, number, reason = self._closing.pop(0)
            close_lane(self.scheduler, number, reason)
        lanes = [self.running[number].request for number in self.stage.lanes if number in self.running]
        found = updates(self.scheduler)
        for number, update in found.items():
            if update.verdict is not None and update.verdict.finished == "paused":
                ages = sorted((request.priority, request.number) for request in lanes)
                assert self.adopts_drafter or ages[-1] == (self.running[number].request.priority, number)
        entering = {number: update.step for number, update in found.items() if update.step is not None}
        assert set(entering) <= set(self.running) and all(step.num_rows for step in entering.values())
        rows = sum(step.num_rows for step in entering.values())
        assert rows <= KNEE or len(entering) == 1
        self._advance(found)
        self.scheduler.draft()
        self.scheduler.controller.record_timestep(TimestepTiming(1 + self.seconds_per_row * rows, 0.5, (0.1,)))
        self._take_results()
        return found

    def _advance(self, updates: dict[int, RequestUpdate]) -> None:
        """The stage replays verdicts, opens lanes, and computes rows."""
        for number, update in updates.items():
            if (verdict := update.verdict) is None:
                continue
            if (lane := self.stage.lanes.get(number)) is not None:
                lane.replay(verdict)
            if verdict.finished:
                self.stage.lanes.pop(number, None)
                self._closing.append((self.timesteps + self.groups + 1, number, verdict.finished))
        for number, update in updates.items():
            if update.opening is not None:
                one = self.running[number]
                assert number not in self.stage.lanes and all(number != closing for _, closing, _ in self._closing)
                self.stage.lanes[number] = Lane(self.stage, one.request, one.answer, one.rule, update.opening)
                self.cached += update.opening.cached
                if self.kv is not None and self.kv.snapshots is not None:
                    assert (update.opening.snapshot is None) == (update.opening.cached == 0)
            if number in self.stage.lanes:
                self.stage.lanes[number].extend(update.slots)
        for number, lane in self.stage.lanes.items():
            lane.enter(updates[number].step if number in updates else None)
        self.stage.check()
        if self.states is not None:
            assert len(self.stage.lanes) <= self.states.states
            assert sum(lane.tree.num_rows for lane in self.stage.lanes.values()) <= self.states.rows

    def _take_results(self) -> None:
        self.verdicts = {}
        for number, lane in self.stage.lanes.items():
            verdict, one = lane.verdict(self.groups), self.running.get(number)
            if verdict is None or one is None:
                continue
            metrics = self.scheduler.requests[number].metrics
            judge(self.scheduler, number, verdict, self.timesteps)
            self.verdicts[number] = verdict
            if verdict.finished:
                assert metrics.hits + metrics.misses == max(len(one.answer) - 1 - len(one.request.output_token_ids), 0)
                self.texts.append((*one.request.prompt_token_ids, *one.answer))
                del self.running[number]

    def lose(self) -> None:
        """The stage loses all lanes and what is in its slots."""
        self.stage = Stage()
        self._closing.clear()
        self.scheduler.interrupt()

    def draft_late(self) -> None:
        """From now on the draft model is not loaded yet; for a scheduler without requests."""
        self.scheduler = self._new_scheduler(None)
        self.scheduler.resources.awaits_drafter = True

    def cancel(self) -> None:
        number = self.chooser.choice(list(self.running))
        self.scheduler.cancel(number)
        del self.running[number]

    def finish(self, timesteps: int = 3000) -> None:
        for _ in range(timesteps):
            if not self.running:
                return
            self.timestep()
        raise AssertionError(f"{list(self.running)} have not ended")
