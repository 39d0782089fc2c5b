"""Rows of many threads in one timestep: how many, in what order, whose."""

from __future__ import annotations

import pytest
import torch
from toy_dialects import IDS, ids, sequence_of, toy

from pipedec.core import Part, Request, Step, TreeParams, Verdict
from pipedec.decoding import METHODS, Experience, Threaded, create_threaded
from pipedec.decoding.threaded import MAX_ROWS, MAX_THREADS
from pipedec.threads import State
from pipedec.tree import Advance, Candidates, PredictionTree

PROMPT = (1, 2, 3)
TREE = TreeParams(width=100, children=4, depth=2, forwards=1)
FORK, CHILD, CLOSE, JOIN = IDS["[Fork]"], IDS["[Child]"], IDS["</Path>"], IDS["<Conclusion>"]


class Lines:
    """A draft that proposes for every row of a thread the same tokens."""

    def __init__(self, default: list[tuple[str, float]] | None = None) -> None:
        self.of_thread: dict[int, list[tuple[str, float]]] = {}
        self.default = default or [("a", 0.5), ("b", 0.2), ("c", 0.1), ("d", 0.05)]
        self.asked: list[tuple[int, int, int]] = []  # thread, depth and token of each row

    def prefill(self, token_ids: torch.Tensor, prompt_length: int) -> None: ...
    def advance(self, number: int, advance: Advance) -> None: ...
    def threads_changed(self) -> None: ...

    def expand(self, asks: list[tuple[int, PredictionTree, torch.Tensor]], children: int) -> list[Candidates]:
        found = []
        for number, tree, rows in asks:
            depths = (tree.tree_mask.sum(1) - 1)[rows].tolist()
            self.asked += [(number, depth, token) for depth, token in zip(depths, tree.token_ids[rows].tolist(), strict=True)]
            line = self.of_thread.get(number, self.default)[:children]
            token_ids = torch.tensor([[IDS[text] for text, _ in line]]).expand(len(rows), -1)
            log_probs = torch.tensor([[chance for _, chance in line]]).log().expand(len(rows), -1)
            found.append(Candidates(rows, token_ids, log_probs))
        return found


class Team:
    """A threaded method that is told what to accept, and checked at every step."""

    def __init__(self, method: str, dialect: str = "apar", tree: TreeParams = TREE, draft: Lines | None = None) -> None:
        changes = {"max_children": 50, "max_depth": 2, "no_opening_after": ()}
        self.sequence = sequence_of(toy(dialect, **changes), len(PROMPT), 10_000)
        self.draft = draft or Lines()
        request = Request(0, PROMPT, method=method, tree=tree)
        self.method: Threaded = create_threaded(request, self.sequence, self.draft, Experience(2), "cpu", trained_masks=2)
        self.entered: list[tuple[int, int]] = []  # thread and token of all rows so far

    def accept(self, **texts: str) -> None:
        self.method.apply(Verdict.of_parts([Part(int(name[1:]), tuple(ids(text))) for name, text in texts.items()]))

    def step(self) -> Step | None:
        """The next rows, within their limits; whoever opened a thread that has rows is in the pipeline."""
        self.method.draft()
        step = self.method.propose()
        if step is None:
            return None
        assert step.threads is not None
        threads = step.threads.tolist()
        assert len(threads) <= MAX_ROWS and len(set(threads)) <= MAX_THREADS
        self.entered += zip(threads, step.token_ids.tolist(), strict=True)
        for number in set(threads):
            thread = self.sequence.threads[number]
            assert thread.parent is None or self.method._forest.entered(thread.parent) >= thread.opened_at
            for other, count in self.sequence.context(number):
                assert self.method._forest.entered(other) >= count, "a row must see tokens that have not entered"
        return step

    def settle(self, most: int = 10) -> int:
        """Steps until all running threads have their last tokens in the pipeline."""
        for count in range(1, most):
            self.step()
            if all(self.method._forest.has_root(t.number) for t in self.sequence.threads if t.state is State.RUNNING):
                return count
        raise AssertionError("some thread's last token never enters")


def wide(method: str, children: int = 40, tree: TreeParams = TREE) -> Team:
    """A main thread with many children, each with its forced token in the pipeline."""
    team = Team(method, tree=tree)
    team.accept(t0="a")
    team.settle()
    for _ in range(children):
        team.accept(t0="[Fork]")
        team.settle()
    return team


@pytest.mark.parametrize("method", METHODS)
def test_many_threads_share_the_rows_of_timesteps(method: str) -> None:
    """Every thread's last token enters soon, however many threads there are."""
    team = wide(method)
    for text in ("q", "w"):
        team.entered.clear()
        team.accept(**{f"t{number}": text for number in range(41)})
        assert team.settle() <= 4
        assert [team.entered.count((number, IDS[text])) for number in range(41)] == [1] * 41


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("width", [1, 8])
def test_a_child_never_enters_before_the_token_that_opened_it(method: str, width: int) -> None:
    """``Team.step`` checks it, here with more waiting rows than there is room for, and some threads always first in turn."""
    team = wide(method, 36, TreeParams(width=width, children=2, depth=1, forwards=1))
    for first in (1, 2):
        team.accept(**{f"t{number}": "[Fork]" if number in range(first, 37, 3) else "q" for number in range(37)})
        team.step()
        team.step()
        team.settle(200)


@pytest.mark.parametrize("method", METHODS)
def test_a_join_enters_behind_the_last_tokens_of_all_that_it_joins(method: str) -> None:
    team = Team(method, "parallel")
    team.accept(t0="a")
    team.settle()
    for _ in range(40):
        team.accept(t0="<Parallel>")
        team.settle()
    team.accept(t0="<Conclusion>")
    team.entered.clear()
    team.accept(**{f"t{number}": "</Path>" for number in range(1, 41)})
    steps = [team.step() for _ in range(3)]
    closing = [entry for entry in team.entered if entry[1] == CLOSE]
    assert sorted(number for number, _ in closing) == list(range(1, 41))
    assert team.entered.count((0, JOIN)) == 1 and team.entered.index((0, JOIN)) > max(map(team.entered.index, closing))
    assert steps[0] is not None and steps[0].num_rows == MAX_THREADS, "and nothing else comes before them"


def test_nothing_is_drafted_behind_a_token_that_ends_its_thread() -> None:
    team = Team("pipedec-bestfirst", draft=Lines([("[Fork]", 0.6), ("<|end|>", 0.2), ("a", 0.1)]))
    team.accept(t0="a")
    for _ in range(4):
        team.step()
    asked = {token for _, depth, token in team.draft.asked if depth}
    assert asked == {IDS["a"], FORK}
    assert (0, FORK) in team.entered, "but it may enter"
    team.accept(t0="[Fork]")
    team.step()
    assert (1, 0, CHILD) in team.draft.asked, "roots are certain"


def test_threads_share_the_width_by_chance() -> None:
    draft = Lines()
    team = Team("pipedec-bestfirst", tree=TreeParams(width=8, children=4, forwards=4), draft=draft)
    team.accept(t0="a")
    team.step()
    draft.of_thread = {
        0: [(text, 0.01) for text in "abcd"],
        1: [("a", 0.9), ("b", 0.04), ("c", 0.03), ("d", 0.02)],
    }
    team.accept(t0="[Fork]")
    team.entered.clear()
    step = team.step()
    assert step is not None and step.num_rows == 8
    assert step.threads is not None and (step.threads == 0).sum() == 1, "its root; every path of the sure child is likelier"
    assert {(0, FORK), (1, CHILD)} <= set(team.entered)


def test_one_methods_rows_are_shared_evenly() -> None:
    """BiTA trees of 64 rows do not fit beside each other."""
    team = Team("bita", tree=TreeParams(rows=64))
    team.accept(t0="a")
    team.step()
    team.accept(t0="[Fork]")
    team.step()
    forecast = tuple(tuple(ids("a b c d e f g h")) for _ in range(2))
    team.method.apply(Verdict.of_parts([Part(0, tuple(ids("q")), forecast), Part(1, tuple(ids("q")), forecast)]))
    step = team.step()
    assert step is not None and step.threads is not None
    counts = [(step.threads == number).sum().item() for number in (0, 1)]
    assert sum(counts) <= MAX_ROWS and abs(counts[0] - counts[1]) <= 3 and min(counts) > 30
    assert (step.token_ids < 0).int().diff().ge(0).all(), "masks come behind all other rows"


def test_a_threaded_method_counts_hits_and_misses_of_all_threads() -> None:
    team = Team("pp")
    team.accept(t0="a")
    assert (team.method.hits, team.method.misses) == (0, 1)
    team.step()
    team.accept(t0="[Fork]")
    team.step()
    team.accept(t0="b", t1="x")
    assert (team.method.hits, team.method.misses) == (0, 4)
    team.step()
    team.accept(t0="c", t1="<|end|>")
    assert (team.method.hits, team.method.misses) == (0, 5)
