"""Mask rows in the tree and in the cache, against groups that Python tuples name, under random growth and random verdicts."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.kv_caches import read_cache

from pipedec.families import KVShape
from pipedec.model import KVCache, KVPool
from pipedec.tree import PredictionTree, is_mask, mask_groups, visible_slots

TokenPath = tuple[int, ...]
Row = tuple[TokenPath, int]  # its tokens from the root on, and which mask behind them it is; 0 for the last token itself


def test_masks_are_the_negative_ids() -> None:
    assert is_mask(torch.tensor([0, 5, -1, -16, 63])).tolist() == [False, False, True, True, False]


def test_groups_follow_each_other_and_chain_inside() -> None:
    token_ids, parents = mask_groups(torch.tensor([0, 2]), 5, 3)
    assert token_ids.tolist() == [-1, -2, -3, -1, -2, -3]
    assert parents.tolist() == [0, 5, 6, 2, 8, 9]
    token_ids, parents = mask_groups(torch.tensor([1, 0]), 2, 1)
    assert (token_ids.tolist(), parents.tolist()) == ([-1, -1], [1, 0])


def test_no_rows_or_no_masks_give_no_groups() -> None:
    for rows, num_masks in ((torch.zeros(0, dtype=torch.int64), 3), (torch.tensor([0, 1]), 0)):
        token_ids, parents = mask_groups(rows, 2, num_masks)
        assert token_ids.dtype == parents.dtype == torch.int64
        assert (token_ids.tolist(), parents.tolist()) == ([], [])


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


@dataclass
class NaiveRows:
    """What a stage holds, row by row."""

    accepted: list[int] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def sees(self, row: Row, other: Row) -> bool:
        """A mask is seen by its own group alone; a token by all that continue it."""
        (path, mask), (other_path, other_mask) = row, other
        if other_mask:
            return path == other_path and mask >= other_mask
        return path[: len(other_path)] == other_path

    def position(self, row: Row) -> int:
        return len(self.accepted) + len(row[0]) - 1 + row[1]

    def accept(self, tokens: TokenPath) -> None:
        """The root and what ``tokens`` say after it; the last of them becomes the root if it is there."""
        said = (self.rows[0][0][0], *tokens)
        self.accepted += said[:-1]
        kept = [(path, mask) for path, mask in self.rows if path[: len(said)] == said]
        self.rows = [(path[len(said) - 1 :], mask) for path, mask in kept]


def label(naive: NaiveRows, row: Row) -> list[int]:
    """What the cache holds of a row: every token up to it and its mask, with the accepted ones told by their number."""
    return [len(naive.accepted) + len(row[0]), row[0][-1], row[1]]


def write(cache: KVCache, labels: list[list[int]], to_tree: bool) -> None:
    keys = torch.tensor(labels, dtype=torch.float64).view(-1, 1, 3)
    [slots] = cache.next_slots(len(labels))
    cache.pool.write(0, slice(slots.start, slots.stop), keys, -keys)
    cache.append(len(labels), to_past=not to_tree)


@examples(60)
@given(data=st.data(), num_prompt_tokens=st.integers(0, 3), num_masks=st.integers(1, 3))
def test_random_rows_masks_and_verdicts(data: st.DataObject, num_prompt_tokens: int, num_masks: int) -> None:
    """Tokens and groups enter in any order over many steps; every row sees, stands and stays as its path alone says."""
    prompt = torch.full((1, 2, 1, num_prompt_tokens, 3), 99.0, dtype=torch.float64)
    cache = KVCache(KVPool([KVShape(1, 3, 3)], torch.float64, 400, 4, prompt), ((0, 400),), with_prompt=True)
    naive, tree, held = NaiveRows([8, 9]), PredictionTree(block=4), [[1, 8, 0], [2, 9, 0]]
    tree.reset(2)
    write(cache, held, to_tree=False)
    for _ in range(data.draw(st.integers(1, 6))):
        new, token_ids, parents = drawn_rows(data, naive, num_masks)
        naive.rows += new
        tree.append(token_ids, parents)
        write(cache, [label(naive, row) for row in new], to_tree=True)
        held += [label(naive, row) for row in new]
        check(tree, naive, num_prompt_tokens)
        if data.draw(st.booleans()):
            walk = data.draw(st.sampled_from([path for path, mask in naive.rows if not mask]))[1:]
            tokens = (*walk, data.draw(st.integers(0, 4)))
            advance = tree.advance(tokens)
            cache.advance(advance.committed, advance.kept)
            past = len(naive.accepted)
            committed = [held[past + naive.rows.index((naive.rows[0][0] + tokens[:depth], 0))] for depth in range(len(tokens))]
            kept = [held[past + row] for row in advance.kept.tolist()]
            naive.accept(tokens)
            held = held[:past] + committed + kept
            assert cache.length == cache.past_length + len(advance.kept) == len(naive.accepted) + len(naive.rows)
            assert [entry[2] for entry in held[: cache.past_length]] == [0] * len(naive.accepted)
            assert [entry[1] for entry in held[: cache.past_length]] == naive.accepted
            assert held[cache.past_length :] == [label(naive, row) for row in naive.rows]
            check(tree, naive, num_prompt_tokens)
        keys, values = read_cache(cache, 0, with_prompt=True)
        assert keys[0].tolist() == [[99.0] * 3] * num_prompt_tokens + held
        assert torch.equal(values[0, num_prompt_tokens:], -keys[0, num_prompt_tokens:])


def drawn_rows(data: st.DataObject, naive: NaiveRows, num_masks: int) -> tuple[list[Row], torch.Tensor, torch.Tensor]:
    """The root if it is not there, some tokens, and groups behind some rows that have none, old or new."""
    new: list[Row] = [] if naive.rows else [((data.draw(st.integers(0, 3)),), 0)]
    for _ in range(data.draw(st.integers(0, 4))):
        paths = [path for path, mask in naive.rows + new if not mask]
        path = (*data.draw(st.sampled_from(paths)), data.draw(st.integers(0, 3)))
        new += [(path, 0)] if path not in paths else []
    present = naive.rows + new
    token_ids = torch.tensor([path[-1] for path, _ in new], dtype=torch.int64)
    parents = torch.tensor([present.index((path[:-1], 0)) if path[:-1] else -1 for path, _ in new], dtype=torch.int64)
    without = [index for index, (path, mask) in enumerate(present) if not mask and (path, 1) not in present]
    chosen = [index for index in without if data.draw(st.booleans())]
    mask_ids, behind = mask_groups(torch.tensor(chosen, dtype=torch.int64), len(present), num_masks)
    groups = [(present[index][0], mask) for index in chosen for mask in range(1, num_masks + 1)]
    return new + groups, torch.cat((token_ids, mask_ids)), torch.cat((parents, behind))


def check(tree: PredictionTree, naive: NaiveRows, num_prompt_tokens: int) -> None:
    past = len(naive.accepted)
    masked = [mask > 0 for _, mask in naive.rows]
    assert is_mask(tree.token_ids).tolist() == masked
    assert tree.positions.tolist() == [naive.position(row) for row in naive.rows]
    seen = visible_slots(tree.tree_mask, is_mask(tree.token_ids), num_prompt_tokens, past)
    expected = [
        [row[1] > 0] * num_prompt_tokens + [True] * past + [naive.sees(row, other) for other in naive.rows] for row in naive.rows
    ]
    assert seen.tolist() == expected
