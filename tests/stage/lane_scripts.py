"""Requests that propose rows on their own, whatever else is in the pipeline: what rank 0 does for one request, at random."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle

import pytest
import torch
from msgspec.structs import replace
from support.slot_books import SlotAllocator
from support.toy_dialects import IDS, TEXTS, behind, toy

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, RequestUpdate, SlotRuns, StageMessage, Step, TokenLogprobs
from pipedec.core.verdict import Verdict
from pipedec.stage import StageWorker
from pipedec.threads import NewSequence, Sequence, State, ThreadedSequence
from pipedec.tree import forest_of

MASKS, TOKENS_PER_MASK = 2, 3
WORDS = [IDS[word] for word in "abc"]
END = IDS["<|end|>"]
LIKELY = {**{token: 100.0 for token in WORDS}, END: 96.0}
DIALECT = toy("apar", max_children=3, max_depth=2, max_child_tokens=6)
OPENERS = {IDS["[Fork]"]: 99.0}


def sequences(opening: NewRequest) -> NewSequence:
    if opening.threads is None:
        return lambda: behind(opening.output_token_ids, Sequence(opening.prompt_length, (END,), opening.sampling.max_tokens))
    return lambda: ThreadedSequence(DIALECT, opening.prompt_length, (END,), opening.sampling.max_tokens)


@dataclass
class Script:
    """One request. What it proposes depends only on its seed and on its own verdicts.

    Attributes:
        arrival: the timestep in which it is opened.
        chunks: sizes of the chunks in which its prompt, what it said before, or what of both it does not adopt, enters.
        delay: timesteps after which rank 0 learns a verdict.
        patience: timesteps after which it is cancelled, or paused.
        prompt: None for a random one.
        slots, cached, copied: of its opening; further slots come from the books.
        reason: why it ends when its patience does.
        known: for each timestep, how many tokens of prompt and answer are in its slots behind it, as far as rank 0 knows.
    """

    number: int
    seed: int
    arrival: int
    chunks: list[int]
    sampling: SamplingParams
    has_masks: bool
    has_threads: bool
    delay: int
    patience: int
    prompt: tuple[int, ...] | None = None
    said: tuple[int, ...] = ()
    slots: SlotRuns = ()
    cached: int = 0
    copied: tuple[int, int] = (0, 0)
    reason: str = "cancelled"
    known: list[int] = field(default_factory=list)
    seen: list[object] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        if self.prompt is None:
            self.prompt = tuple(self._rng.randrange(len(TEXTS)) for _ in range(sum(self.chunks)))
        self._prefill = (*self.prompt, *self.said)[self.cached :]
        assert len(self._prefill) == sum(self.chunks)
        self._opening = NewRequest(
            len(self.prompt),
            self.sampling,
            TOKENS_PER_MASK if self.has_masks else 0,
            "apar" if self.has_threads else None,
            output_token_ids=self.said,
            slots=self.slots,
            cached=self.cached,
            copied=self.copied,
        )
        self._forest = forest_of(sequences(self._opening)())
        self._last: dict[int, int] = {}  # by thread: tokens of ended threads that have yet to enter
        self._results: deque[Verdict | None] = deque([None] * self.delay)
        self._entered = 0  # chunks
        self._has_begun = False
        self.is_over = False

    @property
    def num_slots(self) -> int:
        """Slots of the books that its rows need at most: for its prompt and all that it has said or that is in flight."""
        sequence, given = self._forest.sequence, sum(count for _, count in self.slots)
        said = sum(thread.num_tokens for thread in sequence.threads)
        return sequence.prompt_length + MASKS + said + self._forest.num_rows - given

    @property
    def answer(self) -> tuple[int, ...]:
        """The tokens of an answer in one thread, those that it said before among them."""
        return (*self.said, *(token for verdict in self.verdicts for token in verdict.tokens))

    @property
    def logprobs(self) -> TokenLogprobs:
        """Those of the tokens of ``verdicts``, and of tokens that came too late for them."""
        updates = (entry for entry in self.seen if isinstance(entry, RequestUpdate))
        return tuple(token for update in updates if update.verdict and update.verdict.tokens for token in update.logprobs)

    def update(self, timestep: int) -> RequestUpdate | None:
        """What enters of it in this timestep."""
        update = self._update(timestep)
        said = len(self.answer)
        entered = self.cached + sum(self.chunks[: self._entered]) if timestep >= self.arrival else 0
        self.known.append(len(self.prompt or ()) + said - 1 if said > len(self.said) else entered)
        return update

    def _update(self, timestep: int) -> RequestUpdate | None:
        if self.is_over or timestep < self.arrival:
            return None
        verdict = self._results.popleft() if self._results else None
        if timestep == self.arrival + self.patience:
            verdict = self._impatient(verdict or Verdict())
        if verdict is not None:
            self._replay(verdict)
        step: Step | None = None
        if self._entered < len(self.chunks) and not self.is_over:
            step = self._chunk()
        elif self._has_begun and not self.is_over:
            step = self._rows()
        opening = self._opening if timestep == self.arrival else None
        if opening is None and verdict is None and step is None:
            return None
        return RequestUpdate(self.number, opening, verdict, step)

    def _impatient(self, verdict: Verdict) -> Verdict:
        """A pause is said with the tokens accepted before it, and not to an answer that these end."""
        if self.reason == "cancelled":
            return Verdict(finished=self.reason)
        return verdict if verdict.finished else replace(verdict, finished=self.reason)

    def take(self, timestep: int, result: RequestUpdate | None) -> None:
        """The last stage's result of this timestep."""
        if timestep >= self.arrival and not self.is_over:
            self._results.append(None if result is None else result.verdict)
            self.seen.append(result)

    def _chunk(self) -> Step:
        first, count = sum(self.chunks[: self._entered]), self.chunks[self._entered]
        self._entered += 1
        token_ids = list(self._prefill[first : first + count])
        if self._entered == len(self.chunks) and self.has_masks:
            token_ids = [*token_ids, *range(-1, -MASKS - 1, -1)]
        return Step(torch.tensor(token_ids), torch.full((len(token_ids),), -1))

    def _replay(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)
        self._has_begun = True
        if verdict.finished is not None:
            self.is_over = True
            return
        _, changes, _ = self._forest.replay(verdict)
        self._last |= {number: token for number, token in changes.last.items() if not self._forest.trees[number].num_rows}

    def _rows(self) -> Step | None:
        """Roots that are missing, and children of random rows, with masks behind some of the new rows."""
        rows = [(token, -1, number) for number, token in self._last.items()]
        self._last.clear()
        for number, tree in list(self._forest.trees.items()):
            thread = self._forest.sequence.threads[number]
            if thread.state is State.RUNNING and not tree.num_rows:
                rows.append((thread.token_ids[-1], -1, number))
            elif thread.state is State.RUNNING:
                rows += self._children(number)
        if not rows:
            return None
        first = {number: tree.num_rows for number, tree in self._forest.trees.items()}
        rows += self._masks(rows, first) if self.has_masks else []
        token_ids, parents, threads = (torch.tensor(column) for column in zip(*rows, strict=True))
        self._forest.append(token_ids, parents, threads)
        return Step(token_ids, parents, threads=threads if self.has_threads else None)

    def _children(self, number: int) -> list[tuple[int, int, int]]:
        tree = self._forest.trees[number]
        plain = [row for row, token in enumerate(tree.token_ids.tolist()) if token >= 0]
        found = list[tuple[int, int, int]]()
        for _ in range(self._rng.randrange(5)):
            row = self._rng.choice([*plain, *range(tree.num_rows, tree.num_rows + len(found))])
            child = (self._rng.choice(WORDS), row, number)
            if child not in found and (row >= tree.num_rows or tree.child(row, child[0]) is None):
                found.append(child)
        return found

    def _masks(self, rows: list[tuple[int, int, int]], first: dict[int, int]) -> list[tuple[int, int, int]]:
        """A group behind each of ``rows``; ``first`` is the number of rows of each thread's tree before them."""
        taken, places, masks = dict(first), list[tuple[int, int]](), list[tuple[int, int, int]]()
        for _, _, number in rows:
            places.append((taken[number], number))
            taken[number] += 1
        for row, number in places:
            for mask in range(MASKS):
                masks.append((-1 - mask, row if mask == 0 else taken[number] - 1, number))
                taken[number] += 1
        return masks


def run(
    workers: list[StageWorker],
    scripts: list[Script],
    allocator: SlotAllocator | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Play the scripts at the same time; each records what leaves every stage of it, and its results.

    Args:
        books: who has which slots; None for one run of slots behind the other.
    """
    timestep, allocator = 0, allocator or SlotAllocator(workers[0].cache_slots, workers[0]._pool.block)
    while not all(script.is_over for script in scripts):
        updates = (script.update(timestep) for script in scripts)
        message = StageMessage(tuple(with_slots(update, scripts, allocator) for update in updates if update is not None))
        for worker in workers[:-1]:
            message = worker.advance(message)
            for update in message.updates:
                if update.step is not None:
                    script_of(scripts, update.number).seen += [update.step.token_ids, update.step.parents, update.step.hidden]
        results = {update.number: update for update in workers[-1].advance(message).updates}
        for script in scripts:
            script.take(timestep, results.get(script.number))
        check()
        timestep += 1


def with_slots(update: RequestUpdate, scripts: list[Script], allocator: SlotAllocator) -> RequestUpdate:
    """The update with the slots that its rows need; those of a request that ends are free for the next ones."""
    if update.verdict is not None and update.verdict.finished is not None:
        allocator.free(update.number)
        return update
    slots = allocator.take(update.number, script_of(scripts, update.number).num_slots)
    if update.opening is None:
        return replace(update, slots=slots)
    return replace(update, opening=replace(update.opening, slots=(*update.opening.slots, *slots)))


def script_of(scripts: list[Script], number: int) -> Script:
    return next(script for script in scripts if script.number == number)


def chunks_of(count: int, sizes: list[int]) -> list[int]:
    """Sizes of chunks, which recur until there are ``count`` tokens."""
    chunks = list[int]()
    for size in cycle(sizes):
        if not count:
            return chunks
        chunks.append(min(size, count))
        count -= chunks[-1]
    raise AssertionError


def assert_close(found: TokenLogprobs, expected: TokenLogprobs) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [value for _, value in one] == pytest.approx([value for _, value in other], abs=1e-9)
