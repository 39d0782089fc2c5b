"""The tree against a naive tree of Python paths, under random growth and random verdicts."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pipedec.tree import Advance, Candidates, PredictionTree, Visibility, is_mask, mask_groups, visible_slots


class NaiveTree:
    """Every row is the tuple of token ids on its path from the root."""

    def __init__(self) -> None:
        self.paths: list[tuple[int, ...]] = []

    def advance(self, tokens: list[int]) -> list[tuple[int, ...]]:
        path = (self.paths[0][0], *tokens)
        kept = [row for row in self.paths if row[: len(path)] == path]
        self.paths = [row[len(path) - 1 :] for row in kept]
        return kept


def check_same(tree: PredictionTree, naive: NaiveTree) -> None:
    assert tree.num_rows == len(naive.paths)
    for index, path in enumerate(naive.paths):
        assert tree.token_ids[index] == path[-1]
        assert tree.positions[index] == tree.root_position + len(path) - 1
        parent = int(tree.parents[index])
        assert (naive.paths[parent] == path[:-1]) if parent >= 0 else len(path) == 1
        ancestors = [naive.paths.index(path[:depth]) for depth in range(1, len(path) + 1)]
        assert torch.nonzero(tree.tree_mask[index])[:, 0].tolist() == sorted(ancestors)


@given(st.data())
def test_random_growth_and_verdicts_match_a_naive_tree(data: st.DataObject) -> None:
    tree, naive = PredictionTree(block=4), NaiveTree()
    tree.reset(root_position=7)
    position = 7
    for _ in range(data.draw(st.integers(1, 8))):
        if not naive.paths:
            root = data.draw(st.integers(0, 3))
            tree.append(torch.tensor([root]), torch.tensor([-1]))
            naive.paths = [(root,)]
        token_ids, parents = [], []
        for _ in range(data.draw(st.integers(0, 6))):  # rows of mixed depth, parents in the same step allowed
            parent = data.draw(st.integers(0, len(naive.paths) - 1))
            path = (*naive.paths[parent], data.draw(st.integers(0, 3)))
            if path not in naive.paths:
                token_ids.append(path[-1])
                parents.append(parent)
                naive.paths.append(path)
        tree.append(torch.tensor(token_ids, dtype=torch.int64), torch.tensor(parents, dtype=torch.int64))
        check_same(tree, naive)
        if data.draw(st.booleans()):
            walked = data.draw(st.sampled_from(naive.paths))[1:]
            tokens = [*walked, data.draw(st.integers(0, 4))]
            before = list(naive.paths)
            path = [before.index(tuple(before[0][:1] + walked[:depth])) for depth in range(len(walked) + 1)]
            kept = naive.advance(tokens)
            advance = tree.advance_to(tokens)
            position += len(tokens)
            assert advance.committed.tolist() == path
            assert [before[row] for row in advance.kept] == kept
            assert advance.hit == bool(kept)
            assert tree.root_position == position
            check_same(tree, naive)
            assert advance.committed_ids.tolist() == [before[row][-1] for row in path]
            check_renumbering(advance, len(before))
        if naive.paths and data.draw(st.booleans()):
            rows = closed_rows(data, tree)
            naive.paths = [naive.paths[row] for row in rows]
            advance = tree.keep(torch.tensor(rows))
            assert (advance.kept.tolist(), len(advance.committed), len(advance.committed_ids)) == (rows, 0, 0)
            assert tree.root_position == position
            check_same(tree, naive)
            check_renumbering(advance, advance.num_rows)


def check_renumbering(advance: Advance, num_rows: int) -> None:
    is_kept, renumbered = advance.renumber(torch.arange(num_rows))
    assert torch.equal(torch.nonzero(is_kept)[:, 0], advance.kept)
    assert renumbered.tolist() == list(range(len(advance.kept)))


def closed_rows(data: st.DataObject, tree: PredictionTree) -> list[int]:
    """The root and some rows, all with their parents."""
    rows: list[int] = [0]
    for row, parent in enumerate(tree.parents.tolist()):
        if parent in rows and data.draw(st.booleans()):
            rows.append(row)
    return rows


@pytest.mark.parametrize("rows", [[], [1], [0, 2], [0, 2, 1], [0, 1, 1], [0, 1, 3], [-1, 0]])
def test_rows_to_keep_that_are_no_tree_are_refused(rows: list[int]) -> None:
    tree = PredictionTree()
    tree.append(torch.tensor([1, 2, 3]), torch.tensor([-1, 0, 1]))
    with pytest.raises(ValueError, match="begin with the root"):
        tree.keep(torch.tensor(rows, dtype=torch.int64))
    assert tree.token_ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize("width", [1, 3, 5, 30])
def test_a_layer_is_the_likeliest_paths_of_all_candidates(width: int) -> None:
    """The paper's §3.3.3: cumulative log-probabilities, and the min(w, n·c) best of a layer in the order of their parents."""
    generator = torch.Generator().manual_seed(width)
    tree, chances = PredictionTree(block=4), {(9,): 0.0}
    tree.plant(9)
    for _ in range(5):
        paths = [path_of(tree, row) for row in range(tree.num_rows)]
        layer = [row for row, path in enumerate(paths) if len(path) == len(paths[-1])]
        log_probs = torch.rand(len(layer), 3, generator=generator).log()
        offered = {
            (*paths[row], token): chances[paths[row]] + log_probs[place, token].item()
            for place, row in enumerate(layer)
            for token in range(3)
        }
        best = sorted(offered, key=lambda path: offered[path])[-width:]
        grown = tree.grow(Candidates(torch.tensor(layer), torch.arange(3).expand(len(layer), -1), log_probs), width)
        paths += [path for path in offered if path in best]
        assert [path_of(tree, row) for row in range(tree.num_rows)] == paths and grown.stop == len(paths)
        chances |= offered
        if len(paths[-1]) == 4:  # a verdict: the probabilities that are left are relative to the new root
            hit = paths[-1][:2]
            tree.advance_to(hit[1:])
            paths = [path[1:] for path in paths if path[:2] == hit]
            chances = {path: chances[hit[:1] + path] - chances[hit] for path in paths}
        torch.testing.assert_close(tree.cumulative_log_probs, torch.tensor([chances[path] for path in paths]))


def path_of(tree: PredictionTree, row: int) -> tuple[int, ...]:
    """The tokens from the root to ``row``."""
    return (tree.tokens_of([0])[0], *tree.path(row))


def test_a_chain_of_rows_in_one_step() -> None:
    tree = PredictionTree(block=4)
    tree.append(torch.tensor([1, 2]), torch.tensor([-1, 0]))
    tree.append(torch.arange(3, 12), torch.arange(1, 10))
    assert torch.equal(tree.tree_mask, torch.ones(11, 11, dtype=torch.bool).tril())


@pytest.mark.parametrize(
    ("token_ids", "parents", "message"),
    [([1, 2], [-1, -1], "one root"), ([1], [0], "after its parent"), ([1, 2], [-1, 1], "after its parent")],
)
def test_impossible_rows_are_refused(token_ids: list[int], parents: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PredictionTree().append(torch.tensor(token_ids), torch.tensor(parents))


def test_a_verdict_of_another_tree_is_refused() -> None:
    tree = PredictionTree()
    tree.append(torch.tensor([1, 2]), torch.tensor([-1, 0]))
    with pytest.raises(ValueError, match="does not follow"):
        tree.advance_to([5, 6])


def test_all_rows_can_be_dropped_and_the_tree_planted_anew() -> None:
    tree = PredictionTree()
    tree.reset(10)
    tree.append(torch.tensor([1, 2]), torch.tensor([-1, 0]))
    advance = tree.clear()
    assert (len(advance.committed), len(advance.kept), advance.num_rows, advance.hit) == (0, 0, 2, False)
    assert (tree.num_rows, tree.root_position) == (0, 10)
    is_kept, rows = advance.renumber(torch.tensor([0, 1]))
    assert not is_kept.any() and not len(rows)
    tree.plant(7)
    assert tree.token_ids.tolist() == [7] and tree.tree_mask.tolist() == [[True]]


def test_visibility_of_some_rows_without_the_last_slots() -> None:
    visibility = Visibility(torch.arange(15).view(3, 5) % 2 == 0, 2, lambda: torch.arange(5) * 10)
    part = visibility.of(slice(1, 3), num_slots=5)
    assert torch.equal(part.seen, visibility.seen[1:3, :3])
    assert part.slot_positions().tolist() == [0, 10, 20, 30, 40] and part.shared == 2
    assert torch.equal(visibility.of(slice(0, 3), 7).seen, visibility.seen)


def test_groups_follow_each_other_and_chain_inside() -> None:
    token_ids, parents = mask_groups(torch.tensor([0, 2]), 5, 3)
    assert token_ids.tolist() == [-1, -2, -3, -1, -2, -3]
    assert parents.tolist() == [0, 5, 6, 2, 8, 9]
    token_ids, parents = mask_groups(torch.tensor([1, 0]), 2, 1)
    assert (token_ids.tolist(), parents.tolist()) == ([-1, -1], [1, 0])


def test_figure_3_of_the_paper() -> None:
    """Three prompt tokens, five of the sentence (one of them the root), three masks."""
    tree = PredictionTree()
    tree.reset(4)
    tree.plant(7)
    tree.append(*mask_groups(torch.tensor([0]), 1, 3))
    seen = visible_slots(tree.tree_mask, is_mask(tree.token_ids), 3, 4)
    rows = ["".join("01"[value] for value in row) for row in seen.tolist()]
    assert rows == ["000" "1111" "1000", "111" "1111" "1100", "111" "1111" "1110", "111" "1111" "1111"]  # fmt: skip
    assert tree.positions.tolist() == [4, 5, 6, 7]
