"""Rows of many threads in one timestep: how many, in what order, whose."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import pytest
import torch
from support.drafters import Alone, IdleDrafter
from support.simulation import scheduler_of
from support.toy_dialects import END, IDS, ids, sequence_of, toy

from benchmarks.methods import applicable_options
from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import Step
from pipedec.core.verdict import Accepted, Verdict
from pipedec.decoding.method import ROWS_OF_SEVERAL_THREADS
from pipedec.methods import METHODS
from pipedec.threads import State
from pipedec.tree import Candidates, DraftRows, forest_of

PROMPT = (1, 2, 3)
TREE = {"width": 100, "children": 4, "depth": 2, "forwards": 1}
FORK, CHILD, CLOSE, JOIN = IDS["[Fork]"], IDS["[Child]"], IDS["</Path>"], IDS["<Conclusion>"]


class Lines(IdleDrafter):
    """A draft that proposes for every row of a thread the same tokens."""

    def __init__(self, default: list[tuple[str, float]] | None = None) -> None:
        self.of_thread: dict[int, list[tuple[str, float]]] = {}
        self.default = default or [("a", 0.5), ("b", 0.2), ("c", 0.1), ("d", 0.05)]
        self.asked: list[tuple[int, int, int]] = []  # thread, depth and token of each row
        self.forwards: list[set[int]] = []  # the threads of each

    def expand(self, requested: Iterable[DraftRows], prompts: Mapping[int, object]) -> list[Candidates]:
        found = []
        self.forwards.append({entry.thread for entry in requested})
        for entry in requested:
            number, tree, rows, children = entry.thread, entry.tree, entry.rows, entry.children
            depths = [len(tree.ancestors_of(row)) - 1 for row in rows]
            self.asked += [(number, depth, token) for depth, token in zip(depths, tree.tokens_of(rows), strict=True)]
            line = self.of_thread.get(number, self.default)[:children]
            token_ids = torch.tensor([[IDS[text] for text, _ in line]]).expand(len(rows), -1)
            log_probs = torch.tensor([[chance for _, chance in line]]).log().expand(len(rows), -1)
            found.append(Candidates(torch.tensor(rows), token_ids, log_probs))
        return found


class Answer:
    """An answer by a method that is told what to accept, and checked at every step.

    ``forest`` replays its steps and verdicts as every stage does: it knows what is in the pipeline.
    """

    def __init__(self, method: str, dialect: str = "apar", tree: dict[str, int] = TREE, draft: Lines | None = None) -> None:
        changes = {"max_children": 50, "max_depth": 3, "no_opening_after": ()}
        replayed, self.sequence = (sequence_of(toy(dialect, **changes), len(PROMPT), 10_000) for _ in range(2))
        self.forest = forest_of(self.sequence)
        self.draft = draft or Lines()
        request = TokenizedRequest(0, PROMPT, method=method, options=applicable_options(method, tree))
        self.method = Alone(scheduler_of(2, self.draft, trained_masks=2), request, replayed)
        self.room = max(1 + tree.get("width", 0) * tree.get("depth", 1), ROWS_OF_SEVERAL_THREADS)
        self.past: Counter[int] = Counter()  # by thread: its tokens that are no rows of a tree any more
        self.entered: list[tuple[int, int]] = []  # thread and token of all rows so far

    def accept(self, **texts: str) -> None:
        self.apply(*(Accepted(int(name[1:]), tuple(ids(text))) for name, text in texts.items()))

    def apply(self, *accepted: Accepted) -> None:
        self.method.apply(Verdict(accepted))
        threads = self.forest.threads
        assert threads is not None
        advance, _, _ = self.forest.replay(Verdict(accepted))
        self.past.update(threads[advance.committed].tolist())

    def has_root(self, number: int) -> bool:
        """Whether the thread's last certain token has entered."""
        return number in self.forest.trees and self.forest.trees[number].num_rows > 0

    def num_entered(self, number: int) -> int:
        """The number of the thread's certain tokens that have entered."""
        return self.past[number] + self.has_root(number)

    def step(self) -> Step | None:
        """The next rows, within their limits; whoever opened a thread that has rows is in the pipeline."""
        self.method.draft()
        step = self.method.propose()
        if step is None:
            return None
        assert step.threads is not None
        threads = step.threads.tolist()
        assert len(threads) <= self.room
        self.entered += zip(threads, step.token_ids.tolist(), strict=True)
        self.forest.append(step.token_ids, step.parents, step.threads)
        for number in set(threads):
            thread = self.sequence.threads[number]
            assert thread.parent is None or self.num_entered(thread.parent) >= thread.opened_at
            for other, count in self.sequence.threads[number].context():
                assert self.num_entered(other) >= count, "a row must see tokens that have not entered"
        return step

    def settle(self, most: int = 10) -> int:
        """Steps until all running threads have their last tokens in the pipeline."""
        for count in range(1, most):
            self.step()
            if all(self.has_root(t.number) for t in self.sequence.threads if t.state is State.RUNNING):
                return count
        raise AssertionError("some thread's last token never enters")


def wide(method: str, children: int = 40, tree: dict[str, int] = TREE) -> Answer:
    """A main thread with many children, each with its forced token in the pipeline."""
    answer = Answer(method, tree=tree)
    answer.accept(t0="a")
    answer.settle()
    for _ in range(children):
        answer.accept(t0="[Fork]")
        answer.settle()
    return answer


@pytest.mark.fast_cases
@pytest.mark.parametrize("method", METHODS)
def test_many_threads_share_the_rows_of_timesteps(method: str) -> None:
    """Every thread's last token enters soon, however many threads there are."""
    answer = wide(method)
    for text in ("q", "w"):
        answer.entered.clear()
        answer.accept(**{f"t{number}": text for number in range(41)})
        assert answer.settle() <= 4
        assert [answer.entered.count((number, IDS[text])) for number in range(41)] == [1] * 41


@pytest.mark.fast_cases
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [1, 8])
def test_a_child_never_enters_before_the_token_that_opened_it(method: str, width: int) -> None:
    """``Answer.step`` checks it, here with more waiting rows than there is room for, and some threads always first in turn."""
    answer = wide(method, 36, {"width": width, "children": 2, "depth": 1, "forwards": 1})
    for first in (1, 2):
        answer.accept(**{f"t{number}": "[Fork]" if number in range(first, 37, 3) else "q" for number in range(37)})
        answer.step()
        answer.step()
        answer.settle(200)


def test_a_child_that_is_first_in_turn_waits_for_its_opener() -> None:
    """Only 128 of 161 threads get a row, the last threads first: among them a child, but not its parent."""
    answer = wide("pp")
    for _ in range(3):
        answer.accept(**{f"t{number}": "[Fork]" for number in range(1, 41)})
        answer.settle()
    answer.accept(**{f"t{number}": "q" for number in range(161)})
    answer.settle()
    answer.accept(**{f"t{number}": "[Fork]" if number == 120 else "q" for number in range(161)})
    step = answer.step()
    assert step is not None and step.num_rows == 128 and not answer.has_root(120) and not answer.has_root(161)
    answer.settle()


@pytest.mark.fast_cases
@pytest.mark.parametrize("method", METHODS)
def test_a_join_enters_behind_the_last_tokens_of_all_that_it_joins(method: str) -> None:
    answer = Answer(method, "parallel")
    answer.accept(t0="a")
    answer.settle()
    for _ in range(40):
        answer.accept(t0="<Parallel>")
        answer.settle()
    answer.accept(t0="<Conclusion>")
    answer.entered.clear()
    answer.accept(**{f"t{number}": "</Path>" for number in range(1, 41)})
    steps = [answer.step() for _ in range(3)]
    closing = [entry for entry in answer.entered if entry[1] == CLOSE]
    assert sorted(number for number, _ in closing) == list(range(1, 41))
    assert answer.entered.index((0, JOIN)) > max(map(answer.entered.index, closing))
    assert method == "pipedec-bestfirst" or answer.entered.count((0, JOIN)) == 1, "its n-grams propose that it is repeated"
    assert steps[0] is not None and steps[0].token_ids.tolist()[:40] == [CLOSE] * 40, "and nothing else comes before them"


def test_nothing_is_drafted_behind_a_token_that_ends_its_thread() -> None:
    answer = Answer("pipedec-bestfirst", draft=Lines([("[Fork]", 0.6), ("<|end|>", 0.2), ("a", 0.1)]))
    answer.accept(t0="a")
    for _ in range(4):
        answer.step()
    asked = {token for _, depth, token in answer.draft.asked if depth}
    assert {IDS["a"], FORK} <= asked and END not in asked
    assert (0, FORK) in answer.entered, "but it may enter"
    answer.accept(t0="[Fork]")
    answer.step()
    assert (1, 0, CHILD) in answer.draft.asked, "roots are certain"


@pytest.mark.parametrize("method", ["stpp", "pipedec", "pipedec-bestfirst"])
def test_all_threads_share_one_draft_forward(method: str) -> None:
    answer = wide(method, 3)
    for _ in range(3):
        answer.accept(**{f"t{number}": "q" for number in range(4)})
        answer.draft.forwards.clear()
        answer.settle()
        answer.step()
        assert answer.draft.forwards and all(threads == {0, 1, 2, 3} for threads in answer.draft.forwards)


def test_threads_share_the_width_by_chance() -> None:
    draft = Lines()
    answer = Answer("pipedec-bestfirst", tree={"width": 8, "children": 4, "forwards": 4}, draft=draft)
    answer.accept(t0="a")
    answer.step()
    draft.of_thread = {
        0: [(text, 0.01) for text in "abcd"],
        1: [("a", 0.9), ("b", 0.04), ("c", 0.03), ("d", 0.02)],
    }
    answer.accept(t0="[Fork]")
    answer.entered.clear()
    step = answer.step()
    assert step is not None and step.num_rows == 8
    assert step.threads is not None and (step.threads == 0).sum() == 1, "its root; every path of the sure child is likelier"
    assert {(0, FORK), (1, CHILD)} <= set(answer.entered)


def test_one_methods_rows_are_shared_evenly() -> None:
    """BiTA trees of 100 rows do not fit beside each other."""
    answer = Answer("bita", tree={"rows": 100})
    answer.accept(t0="a")
    answer.step()
    answer.accept(t0="[Fork]")
    answer.step()
    forecast = tuple(tuple(ids("a b c d e f g h")) for _ in range(2))
    answer.apply(Accepted(0, tuple(ids("q")), forecast), Accepted(1, tuple(ids("q")), forecast))
    step = answer.step()
    assert step is not None and step.threads is not None
    counts = [(step.threads == number).sum().item() for number in (0, 1)]
    assert sum(counts) <= ROWS_OF_SEVERAL_THREADS and abs(counts[0] - counts[1]) <= 3 and min(counts) > 50
    assert (step.token_ids < 0).int().diff().ge(0).all(), "masks come behind all other rows"


def test_a_threaded_method_counts_hits_and_misses_of_all_threads() -> None:
    answer = Answer("pp")
    answer.accept(t0="a")
    assert (answer.method.hits, answer.method.misses) == (0, 1)
    answer.step()
    answer.accept(t0="[Fork]")
    answer.step()
    answer.accept(t0="b", t1="x")
    assert (answer.method.hits, answer.method.misses) == (0, 4)
    answer.step()
    answer.accept(t0="c", t1="<|end|>")
    assert (answer.method.hits, answer.method.misses) == (0, 5)
