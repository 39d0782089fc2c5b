"""A whole pipeline whose stages compute nothing: rows carry marks, and every stage compares what a row may attend to with what it
should see.

A row's *name* is its thread's path and all tokens of the thread up to and with its own; masks are negative tokens. A mark is the
number of a name: it is what activations and cached keys consist of.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from toy_dialects import END, IDS, TAGS, TEXTS

from pipedec.core import Envelope, Request, SamplingParams, Step, Verdict
from pipedec.decoding import Experience, TimestepTiming, create_method
from pipedec.engine.loop import decode
from pipedec.engine.recorder import Timestep
from pipedec.forest import Forest, paths
from pipedec.methods import applicable_options
from pipedec.model.cache import KVCache
from pipedec.stage import FinalStageWorker, StageWorker
from pipedec.threads import BoundDialect, DecodeThread, NewSequence, Sequence, State, single_thread
from pipedec.tree import Advance, Candidates, RowsToDraft, Visibility

PROMPT = 5
MASKS = 3
TIMING = TimestepTiming(0.01, 0.005, (0.001,))
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

    def recording(self, new_sequence: NewSequence) -> NewSequence:
        """Makes sequences and keeps them."""

        def recorded() -> Sequence:
            self.sequences.append(new_sequence())
            return self.sequences[-1]

        return recorded

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
        shared = visibility.shared
        assert shared == (PROMPT if self.sequences[0].can_fork else cache.past_length)
        assert visibility.seen.shape == (rows, cache.length + rows - shared)
        cache.extend_tree(rows)
        slots = self.marks.read(cache.view(0)[0])
        where = dict(zip(slots, [*range(shared), *visibility.slot_positions().tolist()], strict=True))
        for row, name in enumerate(self.marks.read(inputs)):
            is_seen = [True] * shared + visibility.seen[row].tolist()
            seen = [slot for slot, is_one in zip(slots, is_seen, strict=True) if is_one]
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
        if sequence.finished is not None and not sequence.can_fork:
            return  # the next request drops everything
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

    def __init__(self, target: Target, accuracy: float, seed: int) -> None:
        self._target, self._accuracy = target, accuracy
        self._random = random.Random(seed)

    def begin(self, sequence: Sequence) -> None:
        self._sequence = sequence

    def prefill(self, token_ids: Tensor) -> None: ...
    def advance(self, number: int, advance: Advance) -> None: ...
    def threads_changed(self) -> None: ...

    def expand(self, asks: list[RowsToDraft], children: int) -> list[Candidates]:
        found = []
        for number, tree, rows in asks:
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
        bound: the dialect; None for an answer in one thread.
        windows: verdicts travel with the rows; else all ranks learn them at once, and what is under way is pruned.
    """

    def __init__(
        self, bound: BoundDialect | None, seed: int, method: str, stages: int, windows: bool, max_tokens: int,
        tree: Mapping[str, int] | None = None, accuracy: float = 0.7, chatter: float = 1.0,
    ) -> None:  # fmt: skip
        self._target = Target(bound, seed, chatter)
        self._new_sequence: NewSequence = lambda: (
            single_thread(PROMPT, (END,), max_tokens) if bound is None else Sequence(bound, PROMPT, (END,), max_tokens)
        )
        sampling = SamplingParams(max_tokens=max_tokens)
        self.sequence = self._new_sequence()
        drafter = MarkedDrafter(self._target, accuracy, seed)
        self._request = Request(0, tuple(range(PROMPT)), sampling, method, applicable_options(method, tree or {}))
        self.method = create_method(self._request, self.sequence, drafter, Experience(stages), "cpu", MASKS)
        kind = WindowedStages if windows else InstructedStages
        self.stages = kind(self._target, self._new_sequence, self.sequence, stages, sampling, self.method.masks.named)

    def run(self) -> Sequence:
        """The answer's threads, the very same ones at every rank."""
        for _ in decode(self._request, self.method, self.stages):
            pass
        for model in self.stages.models:
            assert [tokens_of(thread) for thread in model.sequences[0].threads] == list(map(tokens_of, self.sequence.threads))
            assert not self.sequence.can_fork or model.cache.length == PROMPT
        return self.sequence

    def expected(self) -> Sequence:
        return naive_answer(self._target, self._new_sequence)


class MarkedStages:
    """Stages on marked models: what drivers of the decode loop share.

    Args:
        sequence: of rank 0, which names the rows that enter.

    Attributes:
        widest: rows of the largest step.
        most_threads: threads of the step with the most of them.
    """

    def __init__(
        self, target: Target, new_sequence: NewSequence, sequence: Sequence, stages: int, sampling: SamplingParams, named: int
    ) -> None:
        self._marks = Marks()
        self._sequence = sequence
        self._forest = Forest(new_sequence())  # replays what rank 0 knows, to name its rows
        self.models = [MarkedModel(self._marks, target) for _ in range(stages)]
        self._workers: list[StageWorker] = [StageWorker(model) for model in self.models[:-1]]  # type: ignore[arg-type]
        self._workers.append(FinalStageWorker(self.models[-1]))  # type: ignore[arg-type]
        for model, worker in zip(self.models, self._workers, strict=True):
            worker.begin(model.recording(new_sequence), sampling, named)
        self._idle = 0
        self.widest = self.most_threads = 0

    def prefill(self, chunks: list[list[int]], compute: Callable[[Tensor], None]) -> Verdict:
        [chunk] = chunks
        tokens = torch.tensor(chunk)
        compute(tokens)
        masks = [((), tuple(range(-1, token - 1, -1))) for token in chunk if token < 0]
        step: Step | None = Step(tokens, torch.full_like(tokens, -1), self._marks.of([*prompt_names(), *masks]))
        for worker in self._workers:
            assert step is not None
            worker.prefill(step)
            step = worker.outgoing()
        verdict = self._workers[-1].verdict()
        assert verdict is not None
        return verdict

    def _sync(self, worker: StageWorker, model: MarkedModel, verdict: Verdict | None) -> None:
        if verdict is not None:
            worker.sync(verdict)
            model.check_slots()

    def _enter(self, entering: Envelope) -> Step | None:
        """Rank 0's rows with their names."""
        if entering.verdict is not None:
            self._forest.advance(entering.verdict)
        self._idle = 0 if entering.step is not None or entering.verdict is not None else self._idle + 1
        assert self._idle < 3 + len(self._workers), "the answer stands still"
        step = entering.step
        if step is None:
            return None
        threads = torch.zeros_like(step.parents) if step.threads is None else step.threads
        self.widest = max(self.widest, step.num_rows)
        self.most_threads = max(self.most_threads, len(threads.unique()))
        self._forest.append(step.token_ids, step.parents, threads)
        names, taken = list[Name](), dict[int, int]()
        counts = {number: int((threads == number).sum()) for number in threads.unique().tolist()}
        for number in threads.tolist():
            tree, thread = self._forest.trees[number], self._sequence.threads[number]
            row = tree.num_rows - counts[number] + taken.setdefault(number, 0)
            taken[number] += 1
            names.append((thread.path, (*tokens_of(thread), *paths(tree, [row])[0])))
        return Step(step.token_ids, step.parents, self._marks.of(names), step.threads)


class InstructedStages(MarkedStages):
    """All ranks learn a verdict at once, and what is under way is pruned: single tasks, and ``LocalPipeline``."""

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        for worker, model in zip(self._workers, self.models, strict=True):
            self._sync(worker, model, entering.verdict)
        arriving = [self._enter(entering), *(worker.outgoing() for worker in self._workers[:-1])]
        meanwhile()
        for worker, step in zip(self._workers, arriving, strict=True):
            if step is not None:
                worker.decode(step)
        verdict = None if arriving[-1] is None else self._workers[-1].verdict()
        return Timestep(number, entering.step, verdict, TIMING)

    def close(self, last: Verdict) -> None:
        for worker, model in zip(self._workers, self.models, strict=True):
            self._sync(worker, model, last)


class WindowedStages(MarkedStages):
    """Every rank replays the same verdicts and rows in one order; only rank 0 learns a verdict some timesteps after it fell."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._results: deque[Verdict | None] = deque([None] * (len(self._workers) - 1))

    def advance(self, number: int, entering: Envelope, meanwhile: Callable[[], None]) -> Timestep:
        self._results.append(self._through(Envelope(self._enter(entering), entering.verdict)))
        meanwhile()
        return Timestep(number, entering.step, self._results.popleft(), TIMING)

    def close(self, last: Verdict) -> None:
        assert self._through(Envelope(verdict=last)) == last

    def _through(self, envelope: Envelope) -> Verdict | None:
        for worker, model in zip(self._workers, self.models, strict=True):
            verdict = envelope.verdict
            envelope = worker.advance(envelope)
            if verdict is not None:
                model.check_slots()
        return envelope.verdict
