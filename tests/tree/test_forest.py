"""Rows of several trees in one order of entry: what they see, and which slots are set free."""

from __future__ import annotations

import pytest
import torch
from support.toy_dialects import IDS, ids, sequence_of, toy

from pipedec.core.verdict import Accepted, Verdict
from pipedec.tree import Forest, ThreadedForest

PROMPT = 3
CHILD = IDS["[Child]"]


def forest_of(dialect: str = "apar", max_tokens: int = 100) -> Forest:
    return ThreadedForest(sequence_of(toy(dialect), PROMPT, max_tokens))


def enter(forest: Forest, *rows: tuple[str, int, int]) -> slice:
    """Rows as (text, parent, thread)."""
    texts, parents, threads = zip(*rows, strict=True)
    return forest.append(torch.tensor([IDS[text] for text in texts]), torch.tensor(parents), torch.tensor(threads))


def accept(forest: Forest, **texts: str) -> list[int] | None:
    """Returns the slots of the past that remain; None if these are all."""
    _, _, past = forest.replay(Verdict(tuple(Accepted(int(name[1:]), tuple(ids(text))) for name, text in texts.items())))
    return None if past is None else past.tolist()


def seen(forest: Forest, rows: slice) -> list[str]:
    """Of each row, the slots behind the prompt that it sees, as digits."""
    visibility = forest.visibility(rows)
    assert visibility.shared == PROMPT
    return ["".join("01"[is_seen] for is_seen in row) for row in visibility.seen.tolist()]


def test_rows_of_two_threads_see_their_own_trees_and_what_came_before_the_child() -> None:
    forest = forest_of()
    accept(forest, t0="a")
    enter(forest, ("a", -1, 0), ("[Fork]", 0, 0))
    accept(forest, t0="[Fork]")
    rows = enter(forest, ("[Child]", -1, 1), ("c", 0, 0), ("x", 0, 1), ("y", 0, 1), ("z", 1, 1))
    # a, [Fork], then [Child], c, x, y, z
    assert seen(forest, rows) == ["11" + "10000", "11" + "01000", "11" + "10100", "11" + "10010", "11" + "10101"]
    assert forest.positions_of(slice(None)).tolist() == [4, 5, 5, 6, 6, 7]
    assert forest.parents.tolist() == [-1, -1, 0, 0, 0, 1]
    assert forest.visibility(rows).slot_positions().tolist() == [3, 4, 5, 5, 6, 6, 7]
    assert [forest.child(1, IDS[text]) for text in "xyz"] == [3, 4, None]


def test_rows_that_cannot_be_are_refused() -> None:
    forest = forest_of()
    with pytest.raises(ValueError, match="thread 1, which is not open"):
        enter(forest, ("a", -1, 1))
    accept(forest, t0="a")
    with pytest.raises(ValueError, match="after its parent"):
        enter(forest, ("a", 0, 0))
