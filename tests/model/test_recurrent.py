"""The gated delta rule over prediction trees is the plain recurrence along each row's path; a convolution sees its path alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.toy_dialects import END, IDS, sequence_of, toy
from torch import Tensor

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, Step
from pipedec.core.verdict import Accepted, Verdict
from pipedec.families import KVShape, RecurrentShape, StateCounts
from pipedec.model.attention import LaneRows
from pipedec.model.cache import KVCache, KVPool
from pipedec.model.recurrent import LaneRecurrence, Recurrence, normalised
from pipedec.model.row_tables import RowTables
from pipedec.model.states import StatePool
from pipedec.model.table_recurrence import TableRecurrence
from pipedec.stage.worker import Lane
from pipedec.threads import Sequence, State

SHAPES = (  # with as many key heads as heads and half as many, and with decays of heads and of each number of a key
    RecurrentShape(2, 2, 4, 3, 1, channels=5, kernel=4),
    RecurrentShape(4, 2, 4, 3, 1, channels=5, kernel=4),
    RecurrentShape(2, 2, 4, 3, 4, channels=5, kernel=2),
    RecurrentShape(4, 2, 4, 3, 4, channels=5, kernel=4),
)
WEIGHTS = [torch.randn(shape.channels, shape.kernel, generator=torch.Generator().manual_seed(0)) for shape in SHAPES]
ROWS = 300
TOKENS = [*(IDS[text] for text in "abc"), IDS["[Fork]"], END]
DIALECT = toy("apar", max_depth=3, max_children=4, max_child_tokens=7, no_opening_after=())
TOLERANCE = 1e-5


@dataclass
class Token:
    """The inputs of one token to each layer, and the plain recurrence and convolution after it, in float64.

    Attributes:
        fed: by layer: query, key, value, decays, rates, and the input of the convolution.
        states: by layer.
        inputs: by layer, those of the convolution up to this token's.
        out: by layer, of the convolution and of the rule.
    """

    fed: list[tuple[Tensor, ...]]
    states: list[Tensor] = field(default_factory=list)
    inputs: list[Tensor] = field(default_factory=list)
    out: list[tuple[Tensor, Tensor]] = field(default_factory=list)


New = Callable[[list[LaneRows]], Recurrence]
Enter = Callable[[tuple[int, int, int], Token], None]  # a row's token id, parent and thread, and what is before it


def next_token(before: Token | None, generator: torch.Generator) -> Token:
    """A token with random inputs, after another one or first."""
    token, normal = Token([]), partial(torch.randn, generator=generator)
    for layer, (shape, weight) in enumerate(zip(SHAPES, WEIGHTS, strict=True)):
        heads, key_heads, keys, values = shape.num_heads, shape.num_key_heads, shape.key_dim, shape.value_dim
        decays = -torch.rand(heads, shape.num_decays, generator=generator) * 2
        fed = (normal(key_heads, keys), normal(key_heads, keys), normal(heads, values), decays, 2 * normal(heads).sigmoid())
        token.fed.append((*fed, normal(shape.channels)))
        query, key, value, decay, rate, entering = (tensor.double() for tensor in token.fed[-1])
        query, key = (normalised(one).repeat_interleave(heads // key_heads, 0) for one in (query, key))
        state = torch.zeros(heads, keys, values, dtype=torch.float64) if before is None else before.states[layer]
        state = decay.exp()[:, :, None] * state
        update = rate[:, None] * (value - torch.einsum("hkv,hk->hv", state, key))
        token.states.append(state + key[:, :, None] * update[:, None])
        past = torch.zeros(shape.kernel - 1, shape.channels) if before is None else before.inputs[layer]
        token.inputs.append(torch.cat((past.double(), entering[None])))
        convolved = (token.inputs[-1][-shape.kernel :] * weight.double().t()).sum(0)
        token.out.append((convolved, torch.einsum("hkv,hk->hv", token.states[-1], query * keys**-0.5)))
    return token


class Grown:
    """A request whose rows enter, are accepted and pruned at random.

    Attributes:
        rows: in flight, in the order of the cache.
        accepted: by thread and index.
    """

    def __init__(self, pool: KVPool, seed: int, can_fork: bool) -> None:
        self._rng, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        length, tokens = self._rng.randrange(1, 150), self._rng.randrange(5, 60)
        self._prompt: list[Token] = []
        self._left = length  # of the prompt
        self._last: dict[int, int] = {}  # by thread: tokens of ended threads that have yet to enter
        new_sequence = partial(sequence_of, DIALECT, length, tokens) if can_fork else partial(Sequence, length, (END,), tokens)
        self.cache = KVCache(pool, ((0, pool.slots),))
        self.lane = Lane(NewRequest(length, SamplingParams()), new_sequence, self.cache, "cpu")
        self.rows: list[Token] = []
        self.accepted: dict[tuple[int, int], Token] = {}

    @property
    def sequence(self) -> Sequence:
        return self.lane.forest.sequence

    def entering(self) -> tuple[LaneRows, list[Token]] | None:
        """The rows that enter next, and what they are."""
        if self._left:
            return self._chunk()
        if not self.sequence.main.num_tokens:
            self._accept([Accepted(0, (self._rng.choice(TOKENS[:3]),))])
        return self._tree_rows()

    def _chunk(self) -> tuple[LaneRows, list[Token]]:
        count = self._rng.randint(1, self._left)
        self._left -= count
        for _ in range(count):
            self._prompt.append(next_token(self._prompt[-1] if self._prompt else None, self._generator))
        return self.lane.enter(Step(torch.zeros(count, dtype=torch.int64), torch.full((count,), -1))), self._prompt[-count:]

    def _tree_rows(self) -> tuple[LaneRows, list[Token]] | None:
        found: list[tuple[int, int, int]] = []
        tokens: list[Token] = []

        def enter(row: tuple[int, int, int], before: Token) -> None:
            found.append(row)
            tokens.append(next_token(before, self._generator))

        for number, token in self._last.items():
            self._enter_root(number, token, enter, tokens)
        self._last.clear()
        for number, tree in list(self.lane.forest.trees.items()):
            thread = self.sequence.threads[number]
            if thread.state is not State.RUNNING:
                continue
            if not tree.num_rows:
                if number == 0 or self._rng.random() < 0.7:
                    self._enter_root(number, thread.token_ids[-1], enter, tokens)
                continue
            own = [self.rows[row] for row in self.lane.forest.rows_of(number)]
            children: set[tuple[int, int]] = set()
            for _ in range(self._rng.randrange(5)):
                row, token = self._rng.randrange(len(own)), self._rng.choice(TOKENS[:4])
                if (row, token) not in children and (row >= tree.num_rows or tree.child(row, token) is None):
                    children.add((row, token))
                    enter((token, row, number), own[row])
                    own.append(tokens[-1])
        if not found:
            return None
        ids, parents, threads = (torch.tensor(column) for column in zip(*found, strict=True))
        self.rows += tokens
        return self.lane.enter(Step(ids, parents, threads=threads if self.sequence.can_fork else None)), tokens

    def _enter_root(self, number: int, token: int, enter: Enter, tokens: list[Token]) -> None:
        """Let the last token of a thread enter, unless the token before it has not."""
        thread = self.sequence.threads[number]
        context = self.sequence.sees(number, thread.num_tokens - 1)
        parts = sorted(context, key=lambda part: (part[0] == number, self.sequence.threads[part[0]].path))
        seen = [(other, index) for other, count in parts for index in range(count)]
        before = self.accepted.get(seen[-2]) if len(seen) > 1 else self._prompt[-1]
        if before is not None:
            enter((token, -1, number), before)
            self.accepted[seen[-1]] = tokens[-1]

    def judge(self) -> None:
        """Accept tokens of some threads, along rows and one further."""
        parts = []
        for number, tree in self.lane.forest.trees.items():
            is_running = self.sequence.threads[number].state is State.RUNNING and tree.num_rows
            if is_running and self._rng.random() < 0.5 and (path := self._path(number)):
                parts.append(Accepted(number, path))
        if parts:
            self._accept(parts)

    def _path(self, number: int) -> tuple[int, ...]:
        row: int | None = int(self.lane.forest.rows_of(number)[0])
        path: list[int] = []
        while row is not None:
            banned = self.sequence.banned(number, path)
            chosen = [token for token in TOKENS if token not in banned]
            in_tree = [token for token in chosen if self.lane.forest.child(row, token) is not None]
            token = self._rng.choice(in_tree if in_tree and self._rng.random() < 0.8 else chosen)
            if (row := self.lane.forest.child(row, token)) is not None:
                self.accepted[number, self.sequence.threads[number].num_tokens + len(path)] = self.rows[row]
            ends = self.sequence.ends_walk(number, token, path)
            path.append(token)
            if ends or self._rng.random() < 0.4:
                break
        return tuple(path)

    def _accept(self, parts: list[Accepted]) -> None:
        replayed = self.lane.sync(Verdict(tuple(parts)))
        assert replayed is not None
        advance, changes = replayed
        self.rows = [self.rows[row] for row in advance.kept.tolist()]
        self._last |= {number: token for number, token in changes.last.items() if not self.lane.forest.trees[number].num_rows}


def by_tables(lanes: list[LaneRows]) -> TableRecurrence:
    """As in a captured forward, with a chunk beside."""
    states = lanes[0].cache.pool.states
    assert states is not None
    return TableRecurrence(RowTables.of(lanes, (), False), states, lanes)


def computed(lanes: list[LaneRows], tokens: list[Token], new: New) -> list[tuple[Tensor, Tensor]]:
    """The convolution and the rule of a forward, by layer."""
    recurrence, found = new(lanes), []
    for layer, weight in enumerate(WEIGHTS):
        *rule, inputs = (torch.stack(column) for column in zip(*(token.fed[layer] for token in tokens), strict=True))
        found.append((recurrence.convolve(layer, inputs, weight), recurrence.mix(layer, *rule)))
    return found


def new_pool() -> KVPool:
    states = StatePool(SHAPES, torch.float32, StateCounts(states=60, rows=2000))
    return KVPool([KVShape(0, 0, 0)] * len(SHAPES), torch.float32, 4096, 16, states=states)


def forward(entering: list[tuple[LaneRows, list[Token]]], new: New = LaneRecurrence) -> None:
    """The rows of several requests: those of each alone, which is not appended, and then all together."""
    alone = [computed([lane], tokens, new) for lane, tokens in entering]
    together = computed([lane for lane, _ in entering], [token for _, tokens in entering for token in tokens], new)
    for lane, _ in entering:
        lane.append()
    for layer, found in enumerate(together):
        for index in range(2):
            expected = torch.cat([one[layer][index] for one in alone])
            tolerance = 0.0 if new is LaneRecurrence else TOLERANCE
            torch.testing.assert_close(found[index], expected, atol=tolerance, rtol=tolerance)
            expected = torch.stack([token.out[layer][index] for _, tokens in entering for token in tokens])
            torch.testing.assert_close(found[index].double(), expected, atol=TOLERANCE, rtol=TOLERANCE)


def requests(pool: KVPool, seed: int, threads: str) -> Iterator[Grown]:
    rng = random.Random(seed)
    while True:
        yield Grown(pool, rng.randrange(2**32), threads == "all" or (threads == "some" and rng.random() < 0.5))


@pytest.mark.fast_cases
@pytest.mark.parametrize("new", [LaneRecurrence, by_tables])
@examples(20)
@given(seed=st.integers(0, 2**32), threads=st.sampled_from(["none", "some", "all"]), company=st.integers(1, 4))
def test_rows_of_trees_follow_their_paths(new: New, seed: int, threads: str, company: int) -> None:
    """Requests come and go; their prompts enter in chunks, rows in any order, several at once; verdicts commit and prune them."""
    pool, rng, num_rows = new_pool(), random.Random(seed), 0
    assert pool.states is not None
    arriving = requests(pool, seed, threads)
    running = [next(arriving) for _ in range(company)]
    while num_rows < ROWS:
        entering = [found for one in running if rng.random() < 0.8 and (found := one.entering()) is not None]
        if entering:
            forward(entering, new)
        num_rows += sum(len(tokens) for lane, tokens in entering if lane.visibility is not None)
        for place, one in enumerate(running):
            if rng.random() < 0.6:
                one.judge()
            assert one.cache.tree_length == len(one.rows)
            if one.sequence.finished is not None:
                one.cache.close()
                running[place] = next(arriving)
    for one in running:
        one.cache.close()
    assert pool.states.free == (pool.states.counts.states, pool.states.counts.rows)


@pytest.mark.parametrize("seed", range(2))
def test_a_prompt_in_any_chunks_is_one_chunk(seed: int) -> None:
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    tokens: list[Token] = []
    for _ in range(150):
        tokens.append(next_token(tokens[-1] if tokens else None, generator))
    for most in (1, 20, 150):
        pool, first = new_pool(), 0
        cache = KVCache(pool, ((0, pool.slots),))
        while first < len(tokens):
            part = tokens[first : first + rng.randint(1, most)]
            forward([(LaneRows(torch.arange(first, first + len(part)), cache), part)])
            first += len(part)
        assert cache.states is not None and pool.states is not None
        for layer, expected in enumerate(tokens[-1].states):
            found = pool.states.layer(layer).states[cache.states.of_thread(0)]
            torch.testing.assert_close(found.double(), expected, atol=TOLERANCE, rtol=TOLERANCE)
