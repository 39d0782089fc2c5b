"""A whole pipeline whose stages compute nothing: rows carry marks, and every stage compares what a row may attend to with what it
should see.

A row's *name* is its request's number, its thread's path and all tokens of the thread up to and with its own; masks are negative
tokens. A mark is the number of a name: it is what activations and cached keys consist of.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import torch
from msgspec.structs import replace
from support.drafters import IdleDrafter
from support.kv_caches import read_cache
from support.toy_dialects import END, IDS, TAGS, TEXTS, at, behind, position_after
from torch import Tensor

from benchmarks.methods import applicable_options
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, RequestUpdate, StageMessage, Step
from pipedec.decoding import Experience, Resources, Scheduler, TimestepTiming
from pipedec.decoding.events import Timestep
from pipedec.engine.local import LocalStages
from pipedec.engine.loop import decode
from pipedec.engine.recorder import Recorder
from pipedec.families import KVShape, StateCounts
from pipedec.kv import KVManager
from pipedec.model import KVPool, LaneRows
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import BoundDialect, DecodeThread, NewSequence, State, ThreadedSequence
from pipedec.threads import Sequence as ThreadSequence
from pipedec.topology import Topology
from pipedec.tree import Candidates, DraftRows, Forest, forest_of

PROMPT = 5
MASKS = 3
BLOCK = 4
TIMING = TimestepTiming(0.01, 0.005, (0.001,))
Path = tuple[int, ...]
Name = tuple[int | None, Path | None, tuple[int, ...]]  # of the prompt: no path, and only its last token is the request's own


class Marks:
    """Numbers of names."""

    def __init__(self) -> None:
        self.names: list[Name] = []
        self._numbers: dict[Name, int] = {}

    def of(self, names: list[Name]) -> Tensor:
        """[R, 1]."""
        for name in names:
            if name not in self._numbers:
                self._numbers[name] = len(self.names)
                self.names.append(name)
        return torch.tensor([[self._numbers[name]] for name in names], dtype=torch.float64)

    def read(self, marks: Tensor) -> list[Name]:
        return [self.names[int(mark)] for mark in marks.flatten().tolist()]


class Target:
    """What is said next depends on a thread's path and on how much it has said. ``chatter`` is the weight of plain words."""

    def __init__(self, bound: BoundDialect | None, seed: int, chatter: float = 1.0) -> None:
        weights = {token: 1e-9 for token in range(len(TEXTS))} | {END: 1.5} | {IDS[word]: chatter for word in "abcdefgh"}
        if bound is not None:
            weights |= {token: 1.5 for token in (bound.child_end, bound.join) if token is not None}
            weights |= {bound.opener: 4.0, bound.child_start: 0.5}
        if bound is not None and bound.dialect.opener_end is not None:
            weights |= {IDS[text]: 0.7 for text in TAGS} | {IDS['"/>']: 6.0}
        self._weights = [weights[token] for token in range(len(TEXTS))]
        self._seed = seed
        self.logits = cache(self._logits)

    def _logits(self, path: Path, count: int) -> tuple[float, ...]:
        """Of the token behind ``count`` tokens of a thread."""
        source = random.Random(f"{self._seed} {path} {count}")
        return tuple(math.log(weight) - math.log(-math.log(source.random() + 1e-12)) for weight in self._weights)

    def token(self, path: Path, count: int, banned: frozenset[int] = frozenset()) -> int:
        logits = self.logits(path, count)
        return max((token for token in range(len(logits)) if token not in banned), key=logits.__getitem__)


def naive_answer(target: Target, new_sequence: NewSequence) -> ThreadSequence:
    """One token after another, the threads in turns."""
    sequence = new_sequence()
    while sequence.finished is None:
        for thread in list(sequence.threads):
            if thread.state is State.RUNNING:
                token = target.token(thread.path, thread.num_tokens, sequence.banned(thread.number))
                sequence.accept_token(thread.number, token)
    return sequence


def tokens_of(thread: DecodeThread) -> list[int]:
    """All that a thread has said, with the token that waits for its children."""
    return thread.token_ids + ([] if thread.pending is None else [thread.pending])


def name_at(number: int, thread: DecodeThread, index: int) -> Name:
    return number, thread.path, tuple(tokens_of(thread)[: index + 1])


def prompt_of(number: int) -> tuple[int, ...]:
    """Token ids; requests have all but the last one in common."""
    return (*range(PROMPT - 1), PROMPT - 1 + number)


def prompt_names(number: int, rows: Iterable[int] = range(PROMPT)) -> list[Name]:
    return [(number if index == PROMPT - 1 else None, None, (index,)) for index in rows]


def prefill_names(number: int, said: Sequence[int], rows: Iterable[int]) -> list[Name]:
    """Of rows of the prompt and what was said before."""
    of_prompt, of_said = [row for row in rows if row < PROMPT], [row for row in rows if row >= PROMPT]
    return [*prompt_names(number, of_prompt), *((number, (), tuple(said[: row - PROMPT + 1])) for row in of_said)]


@dataclass
class MarkedModel:
    """In place of a ``StageModel``. ``worker`` is the one that it computes for."""

    marks: Marks
    targets: Mapping[int, Target]  # by request
    worker: StageWorker = field(init=False)
    pool: KVPool = field(init=False)
    config = SimpleNamespace(vocab_size=len(TEXTS))
    stack = SimpleNamespace(routed=(), experts_read=None)

    def make_pool(self, slots: int, block: int, states: StateCounts | None = None) -> KVPool:
        self.pool = KVPool([KVShape(1, 1, 1)], torch.float64, slots, block)
        return self.pool

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        owners = {lane.cache: (number, lane.forest.sequence) for number, lane in self.worker._lanes.items()}
        assert len({lane.cache for lane in lanes}) == len(lanes)
        for lane, rows in zip(lanes, inputs.split([lane.num_rows for lane in lanes]), strict=True):
            slots = [slot for run in lane.cache.next_slots(lane.num_rows) for slot in run]
            self.pool.write(0, torch.tensor(slots), rows.view(-1, 1, 1), -rows.view(-1, 1, 1))
            past = lane.cache.past_length
            lane.append()
            number, sequence = owners[lane.cache]
            if lane.visibility is None:
                self._check_chunk(lane, past, rows, number, sequence.main.token_ids)
            else:
                self._check_rows(lane, rows, sequence)
        return inputs

    def _check_chunk(self, lane: LaneRows, past: int, rows: Tensor, number: int, said: Sequence[int]) -> None:
        names, tokens = self.marks.read(rows), lane.num_tokens
        assert names[:tokens] == prefill_names(number, said, range(past, past + tokens))
        assert [name[0] for name in names[tokens:]] == [number] * lane.num_masks
        assert lane.positions.tolist() == list(range(past, past + lane.num_rows)) and lane.prefill_length == PROMPT
        assert not lane.num_masks or lane.cache.past_length == PROMPT + len(said)
        assert self.marks.read(read_cache(lane.cache, 0)[0]) == prefill_names(number, said, range(past + tokens))

    def _check_rows(self, lane: LaneRows, rows: Tensor, sequence: ThreadSequence) -> None:
        cache, visibility = lane.cache, lane.visibility
        assert visibility is not None
        shared = visibility.shared
        assert shared == (PROMPT if sequence.can_fork else cache.past_length)
        slots = self.marks.read(read_cache(cache, 0)[0])
        where = dict(zip(slots, [*range(shared), *visibility.slot_positions().tolist()], strict=True))
        for row, name in enumerate(self.marks.read(rows)):
            is_seen = [True] * shared + visibility.seen[row].tolist()
            seen = [slot for slot, is_one in zip(slots, is_seen, strict=True) if is_one]
            assert sorted(seen, key=str) == sorted(_visible(sequence, name), key=str), name
            assert int(lane.positions[row]) == where[name] == _position(sequence, name), name
            assert all(where[other] == _position(sequence, other) for other in seen)

    def logits(self, hidden: Tensor) -> Tensor:
        lines = []
        for number, path, tokens in self.marks.read(hidden):
            assert number is not None
            target = self.targets[number]
            if path is None:
                lines.append(target.logits((), 0))
            else:
                is_wrong = tokens[-1] < 0 and hash(tokens) % 3 == 0  # masks err
                lines.append(target.logits(path, len(tokens) + is_wrong))
        return torch.tensor(lines, dtype=torch.float64)

    def check_slots(self, number: int) -> None:
        """Every token of a request that may be seen again is in one slot, every other one in none."""
        if number not in self.worker._lanes:
            return  # its slots are free
        lane = self.worker._lanes[number]
        sequence, cache = lane.forest.sequence, lane.cache
        slots = self.marks.read(read_cache(cache, 0)[0])
        assert len(set(slots)) == len(slots)
        assert slots[:PROMPT] == prompt_names(number)
        past = set(slots[PROMPT : cache.past_length])
        wanted, certain, latest = set(), set(), set()
        for thread, needed in zip(sequence.threads, sequence.needed(), strict=True):
            names = [name_at(number, thread, index) for index in range(len(tokens_of(thread)))]
            certain |= set(names)
            latest |= set(names[-1:])
            wanted |= set(names[: len(names) if needed == thread.num_tokens and needed else needed])
        assert past <= wanted
        assert wanted - latest <= set(slots)
        for of_slot, path, tokens in slots[cache.past_length :]:
            assert path is not None and of_slot == number
            thread = at(sequence, path)
            if (number, path, tokens) in certain:
                assert (number, path, tokens) in wanted
            else:
                assert thread.state is State.RUNNING and list(tokens[: thread.num_tokens]) == thread.token_ids


def _visible(sequence: ThreadSequence, name: Name) -> list[Name]:
    number, path, tokens = name
    assert path is not None and number is not None
    own = at(sequence, path)
    assert list(tokens[: len(tokens_of(own))]) == tokens_of(own)[: len(tokens)], "no row of what can no longer come true"
    others = [
        name_at(number, sequence.threads[other], index)
        for other, count in sequence.threads[own.number].context(len(tokens) - 1)
        for index in range(count)
    ]
    return [*prompt_names(number), *others, *((number, path, tokens[:count]) for count in range(1, len(tokens) + 1))]


def _position(sequence: ThreadSequence, name: Name) -> int:
    _, path, tokens = name
    if path is None:
        return tokens[0]
    thread, index = at(sequence, path), len(tokens) - 1
    if index < thread.num_tokens:
        return thread.positions[index]
    return position_after(sequence, thread.number, list(tokens[thread.num_tokens : index]))


class MarkedDrafter(IdleDrafter):
    """Says what the targets will say, bans apart, ``accuracy`` of the time."""

    def __init__(self, targets: Mapping[int, Target], accuracy: float, seed: int) -> None:
        self._targets, self._accuracy = targets, accuracy
        self._random = random.Random(seed)
        self._sequences: dict[int, ThreadSequence] = {}

    def open_lane(self, number: int, sequence: ThreadSequence, token_ids: Sequence[int], sampling: SamplingParams) -> int:
        self._sequences[number] = sequence
        return 0

    def close_lane(self, number: int) -> None:
        del self._sequences[number]

    def expand(self, requested: Sequence[DraftRows], prompts: Mapping[int, Tensor]) -> list[Candidates]:
        found = []
        for entry in requested:
            thread = self._sequences[entry.number].threads[entry.thread]
            counts = [thread.num_tokens + len(entry.tree.ancestors_of(row)) - 1 for row in entry.rows]
            lines = [self._line(self._targets[entry.number], thread, count, entry.children) for count in counts]
            token_ids = torch.tensor([[token for token, _ in line] for line in lines])
            log_probs = torch.tensor([[chance for _, chance in line] for line in lines]).log()
            found.append(Candidates(torch.tensor(entry.rows), token_ids, log_probs))
        return found

    def _line(self, target: Target, thread: DecodeThread, count: int, children: int) -> list[tuple[int, float]]:
        likely = target.token(thread.path, count)
        others = self._random.sample([token for token in range(len(TEXTS)) if token != likely], children)
        tokens = [likely, *others[1:]] if self._random.random() < self._accuracy else others
        return [(token, 0.6 / 2**place) for place, token in enumerate(tokens)]


class Rehearsal:
    """Answers by ``method`` through marked stages, each in a group of its own.

    Args:
        bound: the dialect of every other request, the first among them; None if all answers are in one thread.
        windows: verdicts travel with the rows; else all ranks learn them at once, and what is under way is pruned.
        arrivals: the timestep in which each request begins.
        slots: of the KV pools.
        prefers_later: the later a request arrives, the sooner it is served.
    """

    def __init__(
        self, bound: BoundDialect | None, seed: int, method: str, stages: int, windows: bool, max_tokens: int,
        tree: Mapping[str, int] | None = None, accuracy: float = 0.7, chatter: float = 1.0, arrivals: Sequence[int] = (1,),
        knee: int = 64, slots: int = 4096, prefers_later: bool = False,
    ) -> None:  # fmt: skip
        self._bound = bound
        self._targets = {number: Target(bound, seed + number, chatter) for number in range(len(arrivals))}
        options = applicable_options(method, tree or {})
        self._requests = [
            TokenizedRequest(number, prompt_of(number), SamplingParams(max_tokens=max_tokens - number), method, options,
                    threads=None if bound is None or number % 2 else "toy", priority=-number * prefers_later)
            for number in range(len(arrivals))
        ]  # fmt: skip
        self._arrivals = list(zip(arrivals, self._requests, strict=True))
        self.kv = KVManager(slots if windows else 4096, BLOCK, shares_prefixes=windows)
        drafter = MarkedDrafter(self._targets, accuracy, seed)
        self.scheduler = Scheduler(Resources(Experience(stages), drafter, trained_masks=MASKS), self.kv, knee)
        self.sequences: dict[int, ThreadSequence] = {}  # rank 0's, by request
        self.stages = MarkedStages(self._targets, self._new_sequence, stages, self.kv.capacity, windows)
        self._timestep = 0

    def run(self) -> list[ThreadSequence]:
        """The threads of each answer."""
        while self._arrivals:
            for _ in decode(self.scheduler, self.stages, self._admit):
                pass
        assert [worker.num_lanes for worker in self.stages.workers] == [0] * len(self.stages.workers)
        assert self.kv.used_slots == 0
        return [self.sequences[number] for number in sorted(self.sequences)]

    def expected(self) -> list[ThreadSequence]:
        return [naive_answer(self._targets[request.number], self._sequence_of(request)) for request in self._requests]

    def _admit(self) -> None:
        self._timestep += 1
        if self._arrivals and not self.scheduler.requests:
            self._timestep = max(self._timestep, self._arrivals[0][0])
        while self._arrivals and self._arrivals[0][0] <= self._timestep:
            _, request = self._arrivals.pop(0)
            self.scheduler.open(self.scheduler.prepare(request, self._recorded(request)))

    def _recorded(self, request: TokenizedRequest) -> NewSequence:
        """Makes sequences of an answer, the newest of which is that of ``sequences``."""
        make = self._sequence_of(request)

        def new_sequence() -> ThreadSequence:
            self.sequences[request.number] = sequence = make()
            return sequence

        return new_sequence

    def _sequence_of(self, request: TokenizedRequest) -> NewSequence:
        return self._new_sequence(NewRequest(PROMPT, request.sampling, threads=request.threads))

    def _new_sequence(self, opening: NewRequest) -> NewSequence:
        if opening.threads is None or self._bound is None:
            return lambda: behind(opening.output_token_ids, ThreadSequence(PROMPT, (END,), opening.sampling.max_tokens))
        bound = self._bound
        return lambda: ThreadedSequence(bound, PROMPT, (END,), opening.sampling.max_tokens)


class MarkedStages:
    """The driver of ``LocalPipeline`` over marked models.

    Args:
        windows: verdicts travel with the rows; else all stages replay them at once.

    Attributes:
        widest: rows of the largest step.
        most_threads: threads of the step with the most of them.
    """

    def __init__(
        self, targets: Mapping[int, Target], new_sequence: Callable[[NewRequest], NewSequence], stages: int, slots: int,
        windows: bool,
    ) -> None:  # fmt: skip
        self._marks = Marks()
        self._new_sequence = new_sequence
        self._forests: dict[int, Forest] = {}  # by request; they replay what rank 0 knows, to name its rows
        self._prefill_rows: dict[int, int] = {}  # by request: rows of the prompt and of what was said before that have entered
        self._said: dict[int, tuple[int, ...]] = {}  # by request: before its lanes were opened
        self.models = [MarkedModel(self._marks, targets) for _ in range(stages)]
        kinds = [StageWorker] * (stages - 1) + [FinalStageWorker]
        self.workers = [
            kind(model, new_sequence, slots=slots, block=BLOCK)  # type: ignore[arg-type]
            for kind, model in zip(kinds, self.models, strict=True)
        ]
        for model, worker in zip(self.models, self.workers, strict=True):
            model.worker = worker
        topology = Topology.even(stages, stages)
        self._stages = LocalStages(self.workers, topology, Recorder(), None, prunes_at_once=not windows)
        self._windows = windows
        self._verdicts: deque[list[int]] = deque([[]] * stages, maxlen=stages)  # the requests that had some, newest first
        self.widest = self.most_threads = 0

    def run_timestep(self, number: int, entering: StageMessage, passage: int, meanwhile: Callable[[], None]) -> Timestep:
        timestep = self._stages.run_timestep(number, self._enter(entering), passage, meanwhile)
        self._verdicts.appendleft([update.number for update in entering.updates if update.verdict is not None])
        for index, model in enumerate(self.models):
            for request in self._verdicts[index if self._windows else 0]:
                model.check_slots(request)
        return dataclasses.replace(timestep, entered=entering, timing=TIMING)

    def end_session(self, last: StageMessage) -> None:
        self._stages.end_session(last)
        self._verdicts.extend([[]] * len(self.models))

    def _enter(self, entering: StageMessage) -> StageMessage:
        """Rank 0's rows with their names."""
        return StageMessage(tuple(map(self._named, entering.updates)), entering.ends_session)

    def _named(self, update: RequestUpdate) -> RequestUpdate:
        number, step = update.number, update.step
        if update.opening is not None:
            self._forests[number] = forest_of(self._new_sequence(update.opening)())
            self._prefill_rows[number], self._said[number] = update.opening.cached, update.opening.output_token_ids
        if update.verdict is not None:
            self._forests[number].replay(update.verdict)
        if step is not None:
            is_chunk = self._prefill_rows[number] < PROMPT + len(self._said[number])
            names = self._chunk_names(number, step) if is_chunk else self._row_names(number, step)
            step = Step(step.token_ids, step.parents, self._marks.of(names), step.threads)
        return replace(update, step=step)

    def _chunk_names(self, number: int, step: Step) -> list[Name]:
        first, said, token_ids = self._prefill_rows[number], self._said[number], step.token_ids.tolist()
        rows = range(first, first + sum(token >= 0 for token in token_ids))
        assert step.parents.tolist() == [-1] * len(token_ids)
        assert token_ids[: len(rows)] == [*prompt_of(number), *said][first : rows.stop]
        self._prefill_rows[number] = rows.stop
        masks = [(number, (), (*said, *range(-1, token - 1, -1))) for token in token_ids if token < 0]
        return [*prefill_names(number, said, rows), *masks]

    def _row_names(self, number: int, step: Step) -> list[Name]:
        forest = self._forests[number]
        threads = torch.zeros_like(step.parents) if step.threads is None else step.threads
        self.widest = max(self.widest, step.num_rows)
        self.most_threads = max(self.most_threads, len(threads.unique()))
        forest.append(step.token_ids, step.parents, threads)
        names, taken = list[Name](), dict[int, int]()
        counts = {thread: int((threads == thread).sum()) for thread in threads.unique().tolist()}
        for index in threads.tolist():
            tree, thread = forest.trees[index], forest.sequence.threads[index]
            row = tree.num_rows - counts[index] + taken.setdefault(index, 0)
            taken[index] += 1
            names.append((number, thread.path, (*tokens_of(thread), *tree.path(row))))
        return names
