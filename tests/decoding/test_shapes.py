"""Shapes of static trees against their definitions: exhaustive search where they are optimal, another implementation else."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.drafters import PROMPT, Alone, ScriptedDrafter, begun, rows
from support.examples import examples

from benchmarks.methods import registered
from benchmarks.policy.opponents import OPPONENTS
from benchmarks.policy.shapes import Node, PositionalAcceptance, best_tree
from pipedec.core.request import TokenizedRequest
from pipedec.core.verdict import Verdict
from pipedec.methods import make_options
from pipedec.tree import Candidates, DraftTree

TokenPath = tuple[int, ...]  # the tokens of a row and its ancestors, or the ranks of a node below the root


def trees(most: int, depth: int, branches: int) -> Iterator[Node]:
    """Every tree with exactly ``most`` nodes below its root."""
    if most == 0:
        yield ()
    elif depth and branches:
        for first in range(most):  # nodes below the last child
            for last in trees(first, depth - 1, _BRANCHES):
                for before in trees(most - 1 - first, depth, branches - 1):
                    yield (*before, last)


_BRANCHES = 4


def expected(tree: Node, chances: Sequence[float]) -> float:
    """The expected number of accepted nodes below the root."""
    return sum(chance * (1 + expected(child, chances)) for child, chance in zip(tree, chances, strict=False))


def size(tree: Node) -> int:
    return sum(1 + size(child) for child in tree)


def height(tree: Node) -> int:
    return max((1 + height(child) for child in tree), default=0)


@cache
def topologies(nodes: int, depth: int) -> list[Node]:
    return list(trees(nodes, depth, _BRANCHES))


@examples(25)
@given(st.integers(0, 2**32), st.integers(1, 7), st.integers(1, 4))
def test_the_positional_tree_is_the_best_of_all_topologies(seed: int, count: int, depth: int) -> None:
    """Also where the second child is likelier than the first."""
    chooser = random.Random(seed)
    parts = [chooser.random() for _ in range(_BRANCHES)]
    chances = [part / sum(parts) for part in parts]
    found = best_tree(chances, count, depth)
    assert size(found) <= count and height(found) <= depth
    best = max(expected(one, chances) for nodes in range(count + 1) for one in topologies(nodes, depth))
    assert expected(found, chances) == pytest.approx(best)


def test_positional_acceptance_is_learned_from_ranks() -> None:
    """A draft whose third choice is always right needs three children in every layer; whose first is right, a chain."""
    third, first = PositionalAcceptance(12, 4, 5), PositionalAcceptance(4, 4, 5)
    for _ in range(2000):
        third.observe(2)
        first.observe(0)
    assert [len(layer) for layer in layers_of(third.tree)] == [3, 3, 3, 3]
    assert [len(layer) for layer in layers_of(first.tree)] == [1, 1, 1, 1]
    for _ in range(20_000):
        first.observe(5)  # none of the choices
    assert [len(layer) for layer in layers_of(first.tree)] == [2, 1, 1], "a fourth layer is worth less than a second child"


def layers_of(tree: Node) -> list[list[Node]]:
    found, layer = list[list[Node]](), list(tree)
    while layer:
        found.append(layer)
        layer = [child for node in layer for child in node]
    return found


def paths_of(tree: Node, above: TokenPath = ()) -> Iterator[TokenPath]:
    for rank, child in enumerate(tree):
        yield (*above, rank)
        yield from paths_of(child, (*above, rank))


class RandomDrafter(ScriptedDrafter):
    """Draws what may follow a path when it is first drafted: distinct tokens with distinct probabilities."""

    def __init__(self, seed: int) -> None:
        super().__init__({})
        self._seed = seed

    def line(self, tree: DraftTree, row: int) -> list[tuple[int, float]]:
        return self.after(tuple(tree.tokens_of(tree.ancestors_of(row)[::-1])))

    def after(self, path: TokenPath) -> list[tuple[int, float]]:
        chooser = random.Random(hash((self._seed, path)))
        parts = sorted((chooser.random() ** 3 for _ in range(8)), reverse=True)
        return [(token, 0.9 * part / sum(parts)) for token, part in zip(chooser.sample(range(100), 8), parts, strict=True)]


def eagle2(drafter: RandomDrafter, root: int, top_k: int, depth: int, total: int) -> dict[TokenPath, float]:
    """EAGLE-2 (§4.1 and §4.2), from its definition: expansion, then reranking of everything that was drafted."""
    drafted: dict[TokenPath, float] = {}
    expanded: dict[TokenPath, float] = {(root,): 1.0}
    for _ in range(depth):
        layer = {
            (*path, token): value * chance for path, value in expanded.items() for token, chance in drafter.after(path)[:top_k]
        }
        drafted |= layer
        expanded = dict(sorted(layer.items(), key=lambda item: item[1], reverse=True)[:top_k])
    return dict(sorted(drafted.items(), key=lambda item: (-item[1], len(item[0])))[:total])


def begun_with(
    drafter: ScriptedDrafter, shape: str = "stpp", text: tuple[int, ...] = PROMPT, token: int = 10, **options: Any
) -> Alone:
    """A static tree of the method ``shape`` whose target has said ``token``."""
    with registered(*OPPONENTS):
        method = begun(TokenizedRequest(0, text, method=shape, options=make_options(shape, options)), drafter)
    method.apply(Verdict.of(token))
    return method


@examples(25)
@given(st.integers(0, 2**32), st.integers(1, 5), st.integers(1, 4), st.integers(1, 40))
def test_eagle2_is_what_its_paper_defines(seed: int, top_k: int, depth: int, total: int) -> None:
    drafter = RandomDrafter(seed)
    method = begun_with(drafter, "eagle2", children=top_k, depth=depth, rows=total)
    assert set(entered(method)) == {(10,), *eagle2(drafter, 10, top_k, depth, total)}
    assert len(drafter.expanded) == depth and all(len(layer) <= top_k for layer in drafter.expanded)


def entered(method: Alone) -> list[TokenPath]:
    """The paths of the tree that enters, the root's token first."""
    method.draft()
    paths = list[TokenPath]()
    for token, parent in rows(method.propose()):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return paths


def likeliest(layer: dict[TokenPath, float], count: int | None) -> dict[TokenPath, float]:
    return dict(sorted(layer.items(), key=lambda item: -item[1])[:count])


def layers_below(
    drafter: RandomDrafter, root: int, width: int | None = None, depth: int = 3, children: int = 4
) -> dict[TokenPath, float]:
    """Of each layer the likeliest ``width`` rows are kept."""
    found, layer = dict[TokenPath, float](), {(root,): 1.0}
    for _ in range(depth):
        choices = {path: drafter.after(path)[:children] for path in layer}
        below = {(*path, token): layer[path] * chance for path, line in choices.items() for token, chance in line}
        layer = likeliest(below, width)
        found |= layer
    return found


@examples(50)
@given(st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 60))
def test_an_opt_tree_is_the_best_one_of_layers_that_bring_enough(seed: int, count: int, min_gain: int) -> None:
    """Every drafted layer before the last one brought ``min_gain`` percent of a token at the least."""
    drafter = RandomDrafter(seed)
    method = begun_with(drafter, "opt-tree", children=3, depth=4, rows=count, min_gain=min_gain)
    found, layers, tree = entered(method), len(drafter.expanded), layers_below(drafter, 10, depth=4, children=3)

    def best(depth: int) -> dict[TokenPath, float]:
        return likeliest({path: chance for path, chance in tree.items() if len(path) <= depth + 1}, count)

    assert set(found) == {(10,), *best(layers)}
    gains = [sum(best(depth).values()) - sum(best(depth - 1).values()) for depth in range(1, 5)]
    assert all(gain >= min_gain / 100 for gain in gains[: layers - 1])
    assert layers == 4 or gains[layers - 1] < min_gain / 100 or max(map(len, best(4))) <= layers


def test_a_positional_tree_enters_whole_and_is_drafted_below_nodes_with_children() -> None:
    drafter = RandomDrafter(3)
    method = begun_with(drafter, "sequoia", children=3, depth=3, rows=6)
    ranks, named = list(paths_of(PositionalAcceptance(6, 3, 3).tree)), {(): (10,)}
    for path in ranks:
        above = named[path[:-1]]
        named[path] = (*above, drafter.after(above)[path[-1]][0])
    assert sorted(entered(method)) == sorted(named.values()) and len(ranks) == 6
    assert sum(map(len, drafter.expanded)) == len({path[:-1] for path in ranks})


@pytest.mark.parametrize("width", [1, 3, 64])
def test_without_a_limit_every_layer_is_as_wide_as_allowed(width: int) -> None:
    drafter = RandomDrafter(width)
    method = begun_with(drafter, width=width, children=4, depth=3)
    assert sorted(entered(method)) == sorted([(10,), *layers_below(drafter, 10, width)])


@pytest.mark.parametrize(
    ("shape", "limit"),
    [*(("stpp", rows) for rows in (1, 3, 13, 84, 100)), *((name, 6) for name in ("eagle2", "opt-tree", "sequoia"))],
)
def test_rounds_follow_each_other(shape: str, limit: int) -> None:
    """The next tree begins below the token that was accepted last, also if its row was drafted but has not entered. Without
    another shape the likeliest rows of all are kept.
    """
    drafter, token = RandomDrafter(5), 10
    method = begun_with(drafter, shape, children=4, depth=3, rows=limit, width=1)
    for depth in (3, 1, 3, 0, 3):
        paths = entered(method)
        assert paths[0] == (token,) and 1 < len(paths) <= limit + 1
        assert shape != "stpp" or set(paths[1:]) == set(likeliest(layers_below(drafter, token), limit))
        deepest = max((path for path in paths if len(path) <= depth + 1), key=len)
        token = next(each for each, _ in [*drafter.after(deepest), (99, 0.0)] if (*deepest, each) not in paths)
        method.apply(Verdict.of(*deepest[1:], token))


def test_ngrams_add_what_the_draft_does_not_say() -> None:
    text = (7, 31, 32, 33, 34) * 3 + (7,)
    both: dict[str, Any] = {"children": 2, "depth": 4, "min_gain": 1, "proposers": ("draft", "ngrams")}
    method = begun_with(ScriptedDrafter({}), "opt-tree", text, 31, rows=12, **both)
    assert (31, 32, 33, 34) in entered(method)
    alone = begun_with(ScriptedDrafter({}), "opt-tree", text, 31, rows=12)
    assert all(token in (31, 60, 61) for path in entered(alone) for token in path)


def test_candidates_need_not_be_sorted() -> None:
    """A drafter may return its candidates in any order."""

    class Unsorted(ScriptedDrafter):
        def _expand(self, tree: DraftTree, rows: Sequence[int], children: int) -> Candidates:
            found = super()._expand(tree, rows, children)
            return Candidates(found.rows, found.token_ids.flip(1), found.log_probs.flip(1))

    method = begun_with(Unsorted({10: ((11, 0.7), (12, 0.2))}), "opt-tree", children=2, depth=1, rows=1)
    assert entered(method) == [(10,), (10, 11)]
