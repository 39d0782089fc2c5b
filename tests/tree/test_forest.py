"""Rows of several trees in one order of entry: what they see, and which slots are set free."""

from __future__ import annotations

import pytest
import torch
from support.toy_dialects import IDS, ids, sequence_of, toy

from pipedec.core import Accepted, Verdict
from pipedec.tree import Forest, ThreadedForest
from pipedec.tree.forest import Slots

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
    _, _, past = forest.advance(Verdict(tuple(Accepted(int(name[1:]), tuple(ids(text))) for name, text in texts.items())))
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


def test_rows_behind_a_promise_stand_behind_the_predicted_length() -> None:
    forest = forest_of("pasta")
    accept(forest, t0="<promise")
    enter(forest, ("<promise", -1, 0), (' tokens="', 0, 0), ("2", 1, 0), ('"/>', 2, 0), ("a", 3, 0), ("b", 4, 0), ("x", 0, 0))
    first = PROMPT
    expected = [first, first + 1, first + 2, first + 3, first + 6, first + 7, first + 1]
    assert forest.positions_of(slice(None)).tolist() == expected
    accept(forest, t0='tokens 2 "/> a'.replace("tokens", ":"))
    assert forest.positions_of(slice(None)).tolist() == [first + 6, first + 7] and forest.token_ids.tolist() == ids("a b")
    assert forest.sequence.main.positions == [*expected[:4], first + 6]


def test_rows_that_cannot_be_are_refused() -> None:
    forest = forest_of()
    with pytest.raises(ValueError, match="thread 1, which is not open"):
        enter(forest, ("a", -1, 1))
    accept(forest, t0="a")
    with pytest.raises(ValueError, match="after its parent"):
        enter(forest, ("a", 0, 0))


def test_rows_may_come_before_those_of_other_threads_that_they_see() -> None:
    """A join token and the last token of what it joins enter in one step, in any order."""
    forest = forest_of("parallel")
    accept(forest, t0="a")
    enter(forest, ("a", -1, 0))
    accept(forest, t0="<Parallel>")
    enter(forest, ("<Parallel>", -1, 0), ("<Path>", -1, 1))
    accept(forest, t0="<Conclusion>", t1="</Path>")
    rows = enter(forest, ("<Conclusion>", -1, 0), ("</Path>", -1, 1))
    assert seen(forest, rows) == ["111" + "11", "111" + "01"]


def test_a_childs_slots_are_free_once_nobody_sees_them() -> None:
    forest = forest_of()
    accept(forest, t0="a")
    enter(forest, ("a", -1, 0))
    accept(forest, t0="[Fork]")
    enter(forest, ("[Fork]", -1, 0), ("[Child]", -1, 1), ("x", 0, 1))
    assert accept(forest, t0="b", t1="x") is None
    kept = accept(forest, t1="<|end|>")
    # the prompt, a, then [Fork] and [Child] in the order in which they left their trees, x
    assert kept == [0, 1, 2, 3, 4] and forest.num_rows == 0


def test_tokens_behind_the_last_opener_are_free_when_the_parent_has_ended() -> None:
    sequence = sequence_of(toy("apar"), PROMPT)
    for token in ids("a [Fork] b c"):
        sequence.accept(0, token)
    slots = Slots(sequence)
    numbers, indices = torch.tensor([0, 0, 1, 0, 0]), torch.tensor([0, 1, 0, 2, 3])
    slots.commit(numbers, indices, torch.arange(5) + PROMPT)
    assert slots.seen(torch.tensor([0, 1]), torch.zeros(0).long(), torch.zeros(0).long()).int().tolist() == [
        [1, 1, 0, 1, 1],
        [1, 1, 1, 0, 0],
    ]
    assert slots.release() is None
    sequence.accept(0, IDS["<|end|>"])
    kept = slots.release()
    assert kept is not None and kept.tolist() == [0, 1, 2, 3, 4, 5], "what the child sees of its parent, and itself"
    assert slots.past[2].tolist() == [3, 4, 5]


def test_nothing_of_an_ended_thread_stays_when_nobody_can_join_it() -> None:
    forest = forest_of("parallel")
    accept(forest, t0="a")
    enter(forest, ("a", -1, 0))
    accept(forest, t0="<Parallel>")
    enter(forest, ("<Parallel>", -1, 0), ("<Path>", -1, 1))
    accept(forest, t0="<Parallel>", t1="</Path>")
    enter(forest, ("<Parallel>", -1, 0), ("<Path>", -1, 2), ("</Path>", -1, 1))
    assert forest.trees[1].num_rows == 1, "the main thread may join it"
    kept = accept(forest, t0="<|end|>")
    assert [forest.trees[number].num_rows for number in range(3)] == [0, 0, 1]
    assert kept is not None and len(kept) == PROMPT + 3, "a and the two openers, which the second child sees"
