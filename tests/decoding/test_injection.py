"""The tree of best-first injection against a naive model of Python paths, a stage's tree beside both."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples

from pipedec.decoding.acceptance import Choices, Line
from pipedec.decoding.injection import InjectionTree
from pipedec.tree import PredictionTree

TokenPath = tuple[int, ...]
NO_CHOICES = Choices(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, 1, 1))
VOCABULARY = 6
CHILDREN = 3


@dataclass
class Naive:
    """Every row and choice is the tuple of token ids on its path from the root.

    Attributes:
        chances: log of the chance of each row and choice, from the root on.
        rows: those that are rows.
        entered: in the order in which they entered.
    """

    chances: dict[TokenPath, float] = field(default_factory=dict)
    rows: set[TokenPath] = field(default_factory=set)
    drafted: set[TokenPath] = field(default_factory=set)
    entered: list[TokenPath] = field(default_factory=list)

    def check_likeliest(self, taken: list[TokenPath], done: set[TokenPath], count: int) -> None:
        """``taken`` are the likeliest ``count`` of what is not ``done``, and come after their parents."""
        left = [path for path in self.chances if path not in done]
        assert len(taken) == len(set(taken)) == min(count, len(left))
        assert not set(taken) & done
        untaken = [self.chances[path] for path in left if path not in taken]
        assert not taken or not untaken or min(self.chances[path] for path in taken) >= max(untaken) - 5e-5
        for index, path in enumerate(taken):
            assert len(path) == 1 or path[:-1] in done or path[:-1] in taken[:index]
        self.rows |= set(taken)

    def plant(self, token: int) -> None:
        self.chances[(token,)] = 0.0
        self.rows.add((token,))

    def advance(self, tokens: list[int]) -> None:
        root = (self.entered[0][0], *tokens) if self.entered else (*tokens,)
        offset = self.chances.get(root, 0.0)
        depth = len(root) - 1
        self.chances = {
            path[depth:]: chance - offset
            for path, chance in self.chances.items()
            if path[: depth + 1] == root and (root in self.rows)
        }
        self.rows, self.drafted = (
            {path[depth:] for path in paths if path[: depth + 1] == root} for paths in (self.rows, self.drafted)
        )
        self.entered = [path[depth:] for path in self.entered if path[: depth + 1] == root]


def line_of(choices: list[tuple[int, float]]) -> Line:
    """What was proposed below a row: tokens with the chance of each."""
    best = sorted(choices, key=lambda pair: -pair[1])
    return Line([token for token, _ in best], [math.log(chance) for _, chance in best], NO_CHOICES, 0)


def injected(injection: InjectionTree) -> list[TokenPath]:
    """The paths of all rows, the root's token first."""
    return [(*injection.tokens_of([0]), *injection.path(row)) for row in range(injection.num_rows)]


def paths_of(tree: PredictionTree) -> list[TokenPath]:
    return [(*tree.tokens_of([0]), *tree.path(row)) for row in range(tree.num_rows)]


class Trio:
    """The injection tree, the naive one, and the tree of a stage that sees the steps and the verdicts alone."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._naive = Naive()
        self._stage = PredictionTree(block=4)
        self._stage.reset(9)
        self._injection = InjectionTree()
        self._injection.set_root_position(9, 0)
        self._accept([self._random.randrange(VOCABULARY)])

    def run(self, operations: int) -> None:
        for _ in range(operations):
            self._random.choice((self._draft, self._enter, self._enter, self._verdict))()
            self._check()

    def _draft(self) -> None:
        count = self._random.randint(1, 4)
        taken = self._injection.undrafted(count)
        assert taken == sorted(set(taken))
        paths = injected(self._injection)
        new = [paths[row] for row in taken]
        self._naive.check_likeliest(new, self._naive.drafted, count)
        self._naive.drafted |= set(new)
        self._injection.add(taken, [line_of(self._line(path)) for path in new])

    def _line(self, path: TokenPath) -> list[tuple[int, float]]:
        """Some distinct tokens that may follow, the first one sometimes for sure."""
        tokens = self._random.sample(range(VOCABULARY), self._random.randint(1, CHILDREN))
        chances = [self._random.uniform(0.01, 0.9) for _ in tokens]
        if self._random.random() < 0.2:
            chances[0] = 1.0
        for token, chance in zip(tokens, chances, strict=True):
            self._naive.chances[(*path, token)] = self._naive.chances[path] + min(math.log(chance), -1e-4)
        return list(zip(tokens, chances, strict=True))

    def _enter(self) -> None:
        count = self._random.randint(1, 5)
        expected = list(islice(self._injection.entering_chances(), count + self._random.randint(0, 4)))[:count]
        token_ids, parents = self._injection.enter(count)
        new: list[TokenPath] = []
        if token_ids:
            where = self._stage.append(torch.tensor(token_ids), torch.tensor(parents))
            new = paths_of(self._stage)[where]
        self._naive.check_likeliest(new, set(self._naive.entered), count)
        self._naive.entered += new
        assert expected == pytest.approx(sorted((self._naive.chances[path] for path in new), reverse=True), abs=1e-4)

    def _verdict(self) -> None:
        """Some rows that have entered, and one token more: in the pipeline, drafted, a choice, or nothing of these."""
        if self._naive.entered:
            walk = self._random.choice(self._naive.entered)
            self._accept([*walk[1:], self._random.randrange(VOCABULARY)])

    def _accept(self, tokens: list[int]) -> None:
        root = self._naive.entered[0][:1] if self._naive.entered else ()
        has_entered = (*root, *tokens) in self._naive.entered
        is_row = (*root, *tokens) in self._naive.rows
        self._naive.advance(tokens)
        self._stage.advance_to(tokens)
        _, hit, _ = self._injection.advance_to(tokens)
        assert (hit, self._injection.num_entered > 0) == (is_row, has_entered)
        if not hit:
            self._injection.plant(tokens[-1])
            self._naive.plant(tokens[-1])

    def _check(self) -> None:
        assert set(injected(self._injection)) == self._naive.rows
        assert paths_of(self._stage) == self._naive.entered
        if self._naive.entered:
            root = self._stage.root_position
            assert self._injection.positions_of([0]) == [root]
            depths = [len(path) - 1 for path in injected(self._injection)]
            assert self._injection.positions_of(range(len(depths))) == [root + depth for depth in depths]


@examples(150)
@given(st.integers(0, 2**32), st.integers(5, 30))
def test_random_drafts_entries_and_verdicts_match_a_naive_model(seed: int, operations: int) -> None:
    Trio(seed).run(operations)


def planted(token: int = 1) -> InjectionTree:
    injection = InjectionTree()
    injection.advance_to([token])
    injection.plant(token)
    return injection


def draft(injection: InjectionTree, count: int, table: dict[int, list[tuple[int, float]]]) -> list[int]:
    """Draft the likeliest rows; returns their tokens. What follows a token is looked up in ``table``."""
    taken = injection.undrafted(count)
    tokens = injection.tokens_of(taken)
    injection.add(taken, [line_of(table[token]) for token in tokens])
    return tokens


TABLE = {
    1: [(2, 0.6), (3, 0.3)],
    2: [(4, 0.9), (5, 0.05)],
    3: [(6, 0.5), (7, 0.4)],
    4: [(8, 0.9), (9, 0.05)],
    6: [(10, 0.9), (11, 0.05)],
    8: [(12, 0.9), (13, 0.05)],
}


def test_only_rows_that_are_probable_enough_are_drafted() -> None:
    injection = planted()
    assert draft(injection, 1, TABLE) == [1]
    taken = injection.undrafted(4, math.log(0.5))
    assert injection.tokens_of(taken) == [2]


def test_what_was_chosen_is_learned() -> None:
    """After every committed row that was drafted, whether the token was among its choices or not."""
    injection = planted()
    for _ in range(2):
        draft(injection, 1, TABLE)
    injection.enter(3)
    _, hit, lessons = injection.advance_to([2, 5])
    assert hit is False and [lesson.token for lesson in lessons] == [2, 5]


def test_a_verdict_on_another_tree_is_refused() -> None:
    injection = planted()
    with pytest.raises(ValueError, match="does not follow the tree"):
        injection.advance_to([7, 8])


def test_choices_become_rows_by_name() -> None:
    """10 has the choices 11, 12 and 13; 12 has 14 and 15. The last choices are dropped, so that rows alone enter."""
    tree = InjectionTree()
    tree.plant(10)
    tree.add([0], [line_of([(11, 0.5), (12, 0.3), (13, 0.1)])])
    assert tree.choices_below(0) == pytest.approx([math.log(0.5), math.log(0.3), math.log(0.1)])
    assert [tree.add_best_below(0), tree.add_best_below(0)] == [[1], [2]] and tree.choices_below(0) == pytest.approx(
        [math.log(0.1)]
    )
    tree.add([2], [line_of([(14, 0.8), (15, 0.1)])])
    assert tree.choices_below(2) == pytest.approx([math.log(0.24), math.log(0.03)])
    assert tree.add_best_below(2) == [3]
    tree.drop_choices()
    assert len(list(tree.entering_chances())) == 4
    assert tree.enter(9) == ([10, 11, 12, 14], [-1, 0, 0, 2])
