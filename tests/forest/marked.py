"""A whole pipeline whose stages compute nothing: rows carry marks, and every stage compares what a row may attend to with what it
should see.

A row's *name* is its thread's path and all tokens of the thread up to and with its own; masks are negative tokens. A mark is the
number of a name: it is what activations and cached keys consist of.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor
from toy_dialects import END, IDS, TAGS, TEXTS

from pipedec.core import Request, SamplingParams, Step, Verdict
from pipedec.decoding import Experience, TimestepTiming, create_method
from pipedec.forest import Forest, paths
from pipedec.methods import applicable_options
from pipedec.model.cache import KVCache
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import BoundDialect, DecodeThread, NewSequence, Sequence, State
from pipedec.tree import Advance, Candidates, RowsToDraft, Visibility

PROMPT = 5
MASKS = 3
Path = tuple[int, ...]
Name = tuple[Path | None, tuple[int, ...]]  # of the prompt: no path


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

    def __init__(self, bound: BoundDialect, seed: int, chatter: float = 1.0) -> None:
        dialect = bound.dialect
        control = [token for token in (bound.opener, bound.child_end, bound.join, END) if token is not None]
        weights = {token: 1e-9 for token in range(len(TEXTS))} | {token: 1.5 for token in control}
        weights |= {bound.opener: 4.0, bound.child_start: 0.5} | {IDS[word]: chatter for word in "abcdefgh"}
        if dialect.opener_end is not None:
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


def naive_answer(target: Target, new_sequence: NewSequence) -> Sequence:
    """One token after another, the threads in turns."""
    sequence = new_sequence()
    while sequence.finished is None:
        for thread in list(sequence.threads):
            if thread.state is State.RUNNING:
                token = target.token(thread.path, thread.num_tokens, sequence.banned(thread.number))
                sequence.accept(thread.number, token)
    return sequence


def tokens_of(thread: DecodeThread) -> list[int]:
    """All that a thread has said, with the token that waits for its children."""
    return thread.token_ids + ([] if thread.pending is None else [thread.pending])


def name_at(thread: DecodeThread, index: int) -> Name:
    return thread.path, tuple(tokens_of(thread)[: index + 1])


@dataclass
class MarkedModel:
    """In place of a ``StageModel``. ``sequences`` are those of its worker, the forest's first."""

    marks: Marks
    target: Target
    sequences: list[Sequence] = field(default_factory=list)
    config = SimpleNamespace(vocab_size=len(TEXTS))

    def make_cache(self) -> KVCache:
        self.cache = KVCache(1, 1, 1, torch.float64, "cpu", block=4)
        return self.cache

    def forward(
        self, inputs: Tensor, positions: Tensor, cache: KVCache, visibility: Visibility | None = None,
        prefill_length: int | None = None, num_masks: int = 0,
    ) -> Tensor:  # fmt: skip
        rows = len(inputs)
        cache.reserve(rows)
        cache.write(0, inputs.view(1, rows, 1), -inputs.view(1, rows, 1))
        if visibility is None:
            cache.extend_past(rows)
            return inputs
        assert visibility.seen.shape == (rows, cache.length + rows - PROMPT) and visibility.shared == PROMPT
        cache.extend_tree(rows)
        slots = self.marks.read(cache.view(0)[0])
        where = dict(zip(slots, [*range(PROMPT), *visibility.slot_positions().tolist()], strict=True))
        for row, name in enumerate(self.marks.read(inputs)):
            is_seen = [*[True] * PROMPT, *visibility.seen[row].tolist()]
            seen = [slot for slot, of_slot in zip(slots, is_seen, strict=True) if of_slot]
            assert sorted(seen, key=str) == sorted(self._visible(name), key=str), name
            assert int(positions[row]) == where[name] == self._position(name), name
            assert all(where[other] == self._position(other) for other in seen)
        return inputs

    def _visible(self, name: Name) -> list[Name]:
        path, tokens = name
        assert path is not None
        sequence = self.sequences[0]
        own = sequence.at(path)
        assert list(tokens[: len(tokens_of(own))]) == tokens_of(own)[: len(tokens)], "no row of what can no longer come true"
        others = [
            name_at(sequence.threads[other], index)
            for other, count in sequence.context(own.number, len(tokens) - 1)
            for index in range(count)
        ]
        return [*prompt_names(), *others, *((path, tokens[:count]) for count in range(1, len(tokens) + 1))]

    def _position(self, name: Name) -> int:
        path, tokens = name
        if path is None:
            return tokens[0]
        sequence, index = self.sequences[0], len(tokens) - 1
        thread = sequence.at(path)
        if index < thread.num_tokens:
            return thread.positions[index]
        return sequence.following(thread.number, list(tokens[thread.num_tokens : index]))[0]

    def logits(self, hidden: Tensor) -> Tensor:
        lines = []
        for path, tokens in self.marks.read(hidden):
            if path is None:
                lines.append(self.target.logits((), 0))
            else:
                is_wrong = tokens[-1] < 0 and hash(tokens) % 3 == 0  # masks err
                lines.append(self.target.logits(path, len(tokens) + is_wrong))
        return torch.tensor(lines, dtype=torch.float64)

    def check_slots(self) -> None:
        """Every token that may be seen again is in one slot, every other one in none."""
        sequence, cache = self.sequences[0], self.cache
        slots = self.marks.read(cache.view(0)[0])
        assert len(set(slots)) == len(slots)
        assert slots[:PROMPT] == prompt_names()
        past = set(slots[PROMPT : cache.past_length])
        wanted, certain, latest = set(), set(), set()
        for thread, needed in zip(sequence.threads, sequence.needed(), strict=True):
            names = [name_at(thread, index) for index in range(len(tokens_of(thread)))]
            certain |= set(names)
            latest |= set(names[-1:])
            wanted |= set(names[: len(names) if needed == thread.num_tokens and needed else needed])
        assert past <= wanted
        assert wanted - latest <= set(slots)
        for path, tokens in slots[cache.past_length :]:
            assert path is not None
            thread = sequence.at(path)
            if (path, tokens) in certain:
                assert (path, tokens) in wanted
            else:
                assert thread.state is State.RUNNING and list(tokens[: thread.num_tokens]) == thread.token_ids


def prompt_names() -> list[Name]:
    return [(None, (index,)) for index in range(PROMPT)]


class MarkedDrafter:
    """Says what the target will say, bans apart, ``accuracy`` of the time."""

    def __init__(self, target: Target, sequence: Sequence, accuracy: float, seed: int) -> None:
        self._target, self._sequence, self._accuracy = target, sequence, accuracy
        self._random = random.Random(seed)

    def begin(self, sequence: Sequence) -> None: ...
    def prefill(self, token_ids: Tensor) -> None: ...
    def advance(self, thread: int, advance: Advance) -> None: ...
    def threads_changed(self) -> None: ...

    def expand(self, requested: list[RowsToDraft], children: int) -> list[Candidates]:
        found = []
        for number, tree, rows in requested:
            thread = self._sequence.threads[number]
            depths = (tree.tree_mask.sum(1) - 1)[rows].tolist()
            lines = [self._line(thread, thread.num_tokens + depth, children) for depth in depths]
            token_ids = torch.tensor([[token for token, _ in line] for line in lines])
            log_probs = torch.tensor([[chance for _, chance in line] for line in lines]).log()
            found.append(Candidates(rows, token_ids, log_probs))
        return found

    def _line(self, thread: DecodeThread, count: int, children: int) -> list[tuple[int, float]]:
        likely = self._target.token(thread.path, count)
        others = self._random.sample([token for token in range(len(TEXTS)) if token != likely], children)
        tokens = [likely, *others[1:]] if self._random.random() < self._accuracy else others
        return [(token, 0.6 / 2**place) for place, token in enumerate(tokens)]


class Rehearsal:
    """An answer by ``method`` through marked stages, each in a group of its own.

    Args:
        windows: verdicts travel with the rows; else all ranks learn them at once, and what is under way is pruned.
    """

    def __init__(
        self, bound: BoundDialect, seed: int, method: str, stages: int, windows: bool, max_tokens: int,
        tree: Mapping[str, int] | None = None, accuracy: float = 0.7, chatter: float = 1.0,
    ) -> None:  # fmt: skip
        self._marks, self._windows = Marks(), windows
        self._target = Target(bound, seed, chatter)
        self._new_sequence: NewSequence = lambda: Sequence(bound, PROMPT, (END,), max_tokens)
        sampling = SamplingParams(max_tokens=max_tokens)
        self._models = [MarkedModel(self._marks, self._target) for _ in range(stages)]
        self._workers: list[StageWorker] = [StageWorker(model) for model in self._models[:-1]]  # type: ignore[arg-type]
        self._final = FinalStageWorker(self._models[-1])  # type: ignore[arg-type]
        self._workers.append(self._final)
        self.sequence = self._new_sequence()
        self._forest = Forest(self._new_sequence())  # replays what rank 0 knows, to name its rows
        drafter = MarkedDrafter(self._target, self.sequence, accuracy, seed)
        request = Request(0, tuple(range(PROMPT)), sampling, method, applicable_options(method, tree or {}))
        self.method = create_method(request, self.sequence, drafter, Experience(stages), "cpu", MASKS)
        for model, worker in zip(self._models, self._workers, strict=True):
            worker.begin(self._recorded(model), sampling, self.method.masks.named)
        self.widest = 0

    def _recorded(self, model: MarkedModel) -> NewSequence:
        def new_sequence() -> Sequence:
            model.sequences.append(self._new_sequence())
            return model.sequences[-1]

        return new_sequence

    def run(self) -> Sequence:
        """The answer's threads, the very same ones at every rank."""
        verdict: Verdict | None = self._prefill()
        (self._run_windows if self._windows else self._run_tasks)(verdict)
        for model in self._models:
            assert [tokens_of(thread) for thread in model.sequences[0].threads] == list(map(tokens_of, self.sequence.threads))
            assert model.cache.length == PROMPT
        return self.sequence

    def expected(self) -> Sequence:
        return naive_answer(self._target, self._new_sequence)

    def _prefill(self) -> Verdict | None:
        masks = self.method.masks.count
        tokens = torch.tensor([*range(PROMPT), *range(-1, -masks - 1, -1)])
        names: list[Name] = [*prompt_names(), *(((), tuple(range(-1, -count - 1, -1))) for count in range(1, masks + 1))]
        chunk = Step(tokens, torch.full_like(tokens, -1), self._marks.of(names))
        self.method.prefill(tokens)
        for worker in self._workers:
            worker.prefill(chunk)
            chunk = worker.outgoing() or chunk
        return self._final.verdict()

    def _run_tasks(self, verdict: Verdict | None) -> None:
        arriving: list[Step | None] = [None] * len(self._workers)
        idle = 0
        while True:
            if verdict is not None:
                self._apply(verdict)
                for worker, model in zip(self._workers, self._models, strict=True):
                    worker.sync(verdict)
                    model.check_slots()
                if verdict.finished:
                    return
            arriving = [self._propose(), *(worker.outgoing() for worker in self._workers[:-1])]
            idle = 0 if any(arriving) else idle + 1
            assert idle < 3, "the answer stands still"
            self._draft()
            for worker, step in zip(self._workers, arriving, strict=True):
                if step is not None:
                    worker.decode(step)
            verdict = None if arriving[-1] is None else self._final.verdict()

    def _run_windows(self, verdict: Verdict | None) -> None:
        """Every rank replays the same verdicts and rows; only rank 0 learns a verdict some timesteps after it fell."""
        assert verdict is not None
        self._apply(verdict)
        results: deque[Verdict | None] = deque([None] * (len(self._workers) - 1))
        idle = 0
        while True:
            step = self._propose()
            results.append(self._through(step, verdict))
            if verdict is not None and verdict.finished:
                return
            self._draft()
            verdict = results.popleft()
            if verdict is not None:
                self._apply(verdict)
            idle = idle + 1 if step is None and verdict is None else 0
            assert idle < 3 + len(self._workers), "the answer stands still"

    def _through(self, step: Step | None, verdict: Verdict | None) -> Verdict | None:
        for worker, model in zip(self._workers, self._models, strict=True):
            if verdict is not None:
                worker.sync(verdict)
                model.check_slots()
            if step is not None and not (verdict and verdict.finished):
                worker.decode(step)
                step = worker.outgoing()
        return None if verdict and verdict.finished else self._final.verdict()

    def _apply(self, verdict: Verdict) -> None:
        self.method.apply(verdict)
        self._forest.advance(verdict)

    def _draft(self) -> None:
        self.method.draft()
        self.method.observe(TimestepTiming(0.01, 0.005, (0.001,)))

    def _propose(self) -> Step | None:
        """Rows with their names."""
        if self.sequence.finished is not None:
            return None
        step = self.method.propose()
        if step is None:
            return None
        assert step.threads is not None
        self.widest = max(self.widest, step.num_rows)
        self._forest.append(step.token_ids, step.parents, step.threads)
        names, taken = list[Name](), dict[int, int]()
        counts = {number: int((step.threads == number).sum()) for number in step.threads.unique().tolist()}
        for number in step.threads.tolist():
            tree, thread = self._forest.trees[number], self.sequence.threads[number]
            row = tree.num_rows - counts[number] + taken.setdefault(number, 0)
            taken[number] += 1
            names.append((thread.path, (*tokens_of(thread), *paths(tree, [row])[0])))
        return Step(step.token_ids, step.parents, self._marks.of(names), step.threads)
