"""Best-first injection with a draft that says what the test wants, step by step and in a simulated pipeline."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import islice, pairwise
from math import exp, log

import pytest
import torch
from support.drafters import PROMPT, RARE, Alone, Line, ScriptedDrafter, Switch, begun, rows

from pipedec.core import Request, Step, UserError, Verdict
from pipedec.decoding import Experience, TimestepTiming
from pipedec.decoding.acceptance import AcceptanceModel
from pipedec.decoding.acceptance import Line as AcceptedLine
from pipedec.decoding.injection import InjectionTree
from pipedec.methods import MAX_ROWS, BestFirstOptions
from pipedec.tree import DraftTree, PredictionTree

PASSAGE = 3
SURE = {token: ((token + 1, 0.99), (token + 50, 0.005)) for token in range(10, 40)}
UNSURE = {10: ((11, 0.4), (12, 0.35)), 11: ((13, 0.3), (14, 0.2)), 12: ((15, 0.3), (16, 0.2))}
DRAFT_ALONE = ("draft",)
NGRAMS_ALONE = ("ngrams",)


def best_first(
    drafter: ScriptedDrafter | None,
    width: int | None = 4,
    forwards: int | None = 3,
    proposers: tuple[str, ...] = DRAFT_ALONE,
    prompt: tuple[int, ...] = PROMPT,
    experience: Experience | None = None,
) -> Alone:
    """A method that has taken in the prompt."""
    request = Request(0, prompt, options=BestFirstOptions(width, 2, forwards=forwards, proposers=proposers))
    return begun(request, drafter, experience or Experience(PASSAGE))


def test_several_layers_enter_at_once_when_the_draft_is_sure() -> None:
    drafter = ScriptedDrafter(SURE)
    method = best_first(drafter, width=3)
    method.apply(Verdict.of(10))
    assert rows(method.propose()) == [(10, -1)]
    method.draft()
    assert (drafter.begun, drafter.prompt) == (1, list(PROMPT))
    assert [batch[0] for batch in drafter.expanded] == [10, 11, 12]
    assert rows(method.propose()) == [(11, 0), (12, 1), (13, 2)]


def test_siblings_enter_late_when_the_draft_is_unsure() -> None:
    method = best_first(ScriptedDrafter(UNSURE), width=1, forwards=2)
    method.apply(Verdict.of(10))
    assert rows(method.propose()) == [(10, -1)]
    method.draft()
    assert rows(method.propose()) == [(11, 0)]
    method.draft()
    assert rows(method.propose()) == [(12, 0)]


def test_a_drafted_row_enters_as_the_root_with_what_is_below_it() -> None:
    """Accepted before it entered: a miss, but what was drafted below it is not lost."""
    drafter = ScriptedDrafter({10: ((11, 0.5), (12, 0.4)), 12: ((13, 0.8), (14, 0.1))})
    method = best_first(drafter, width=3)
    method.apply(Verdict.of(10))
    method.propose()
    method.draft()
    method.apply(Verdict.of(12))
    assert (method.hits, method.misses) == (0, 2)
    assert rows(method.propose()) == [(12, -1), (13, 0), (14, 0)]
    assert drafter.skipped == 0


def test_hits_and_misses_of_verdicts_of_several_tokens() -> None:
    method = best_first(ScriptedDrafter(SURE))
    method.apply(Verdict.of(10))
    for _ in range(2):
        method.propose()
        method.draft()
    method.apply(Verdict.of(11, 12))
    assert (method.hits, method.misses) == (2, 1)
    method.apply(Verdict.of(13, 99))
    assert (method.hits, method.misses) == (3, 2)
    method.propose()
    method.apply(Verdict.of(98, finished="stop"))
    assert (method.hits, method.misses) == (3, 2)


def test_every_verdict_teaches() -> None:
    """A draft that is never right is believed less and less, and what is learned serves the next answer."""
    experience = Experience(PASSAGE)
    for _ in range(3):
        method = best_first(ScriptedDrafter(SURE), experience=experience)
        request = Request(0, PROMPT, options=BestFirstOptions(4, 2, forwards=3, proposers=DRAFT_ALONE))
        weights = experience.learned(request, AcceptanceModel, (9.0, 9.0)).weights
        before = weights.clone()
        for _ in range(10):
            method.apply(Verdict.of(20))
            method.propose()
            method.draft()
        assert weights[0] < before[0]
        assert weights[-1] > before[-1]


def test_without_speculation_it_is_the_plain_pipeline() -> None:
    experience, drafter = Experience(PASSAGE), ScriptedDrafter(SURE)
    request = Request(0, PROMPT)
    experience.controller = Switch(PASSAGE)
    ours, plain = begun(request, drafter, experience), begun(Request(0, PROMPT, method="pp"))
    assert ours.propose() is None
    for token in (10, 11, 12):
        for method in (ours, plain):
            method.apply(Verdict.of(token))
            assert rows(method.propose()) == [(token, -1)]
            for _ in range(2):
                method.draft()
                assert method.propose() is None
        assert (ours.hits, ours.misses) == (plain.hits, plain.misses)
    assert drafter.expanded == []


def test_ngrams_alone_find_the_continuation() -> None:
    method = best_first(None, width=8, proposers=NGRAMS_ALONE, prompt=(1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2))
    method.apply(Verdict.of(3))
    assert rows(method.propose()) == [(3, -1)]
    method.draft()
    assert rows(method.propose()) == [(4, 0), (5, 1), (6, 2), (7, 3), (8, 4), (9, 5), (1, 6), (2, 7)]
    method.apply(Verdict.of(4, 5))
    method.draft()
    assert rows(method.propose())[:3] == [(3, 6), (4, 7), (5, 8)]


def test_a_copied_chain_enters_without_a_forward_and_is_drafted_later() -> None:
    """The draft model reaches only the root in the first timestep, and is sure of something else."""
    drafter = ScriptedDrafter({3: ((11, 0.9), (12, 0.05))})
    method = best_first(drafter, width=8, proposers=("draft", "ngrams"), forwards=1, prompt=(*range(1, 10), 1, 2))
    method.apply(Verdict.of(2))
    method.apply(Verdict.of(3))
    method.draft()
    assert [token for token, _ in rows(method.propose()) if token < 10] == [3, 4, 5, 6, 7]
    asked = len(drafter.expanded)
    method.draft()
    assert 4 in drafter.expanded[asked], "drafted when there is time"


def test_what_was_copied_gives_way_to_what_the_draft_says() -> None:
    """A copied token that no source proposes any more is not probable; rows that entered stay, whatever their chance."""
    tree = InjectionTree()
    tree.plant(1)
    assert tree.undrafted(1) == [0]
    tree.add([0], [AcceptedLine([2, 3], [log(0.9), log(0.05)], None, 0)])
    (row,) = tree.without_choices(1, log(0.5))
    tree.guess([row], [AcceptedLine([7], [log(0.8)], None, 0)])
    assert tree.enter(3) == ([1, 2, 7], [-1, 0, 1])
    assert tree.undrafted(1) == [row]
    tree.add([row], [AcceptedLine([5, 6], [log(0.6), log(0.3)], None, 0)])
    chances = [round(exp(each), 3) for each in islice(tree.entering_chances(), 3)]
    assert chances == [0.54, 0.27, 0.05]
    (undrafted, *_) = tree.undrafted_chances()
    assert exp(undrafted) == pytest.approx(0.54), "not the copied token"
    changes, hit, _ = tree.advance([2, 7])
    assert hit and changes.committed == [0, row], "it was right all the same"


def test_ngrams_alone_leave_the_draft_alone() -> None:
    drafter = ScriptedDrafter(SURE)
    method = best_first(drafter, proposers=NGRAMS_ALONE)
    method.apply(Verdict.of(10))
    method.draft()
    assert (drafter.begun, drafter.prompt, drafter.expanded) == (0, [], [])


def test_ngrams_and_draft_together() -> None:
    """The draft knows nothing of 4 after 3, the text nothing of what the draft says."""
    method = best_first(
        ScriptedDrafter({3: ((11, 0.3), (12, 0.1))}), proposers=("draft", "ngrams"), forwards=1, prompt=PROMPT, width=16
    )
    method.apply(Verdict.of(2))
    method.apply(Verdict.of(3))
    method.propose()
    method.draft()
    assert {token for token, parent in rows(method.propose()) if parent == 0} == {4, 11, 12}


@pytest.mark.parametrize("length", [1, 2, 3, 4, 40])
@pytest.mark.parametrize("proposers", [NGRAMS_ALONE, ("draft", "ngrams")])
def test_prompts_of_any_length(length: int, proposers: tuple[str, ...]) -> None:
    answer = [7] * 12
    drafter = KnowingDrafter(answer, lambda index: index + 1)
    method = best_first(drafter, width=8, proposers=proposers, prompt=(7,) * length)
    assert simulate(method, answer, 2) < 2 * len(answer)


def test_no_proposer_is_refused() -> None:
    with pytest.raises(UserError, match=r"^method pipedec-bestfirst has no proposer: give --draft DIR, or .*$"):
        best_first(None, proposers=DRAFT_ALONE)


def test_a_width_that_no_tree_holds_is_refused() -> None:
    with pytest.raises(UserError, match=rf"^width: must be between 1 and {MAX_ROWS}, not {MAX_ROWS + 1}$"):
        best_first(ScriptedDrafter(SURE), width=MAX_ROWS + 1)
    best_first(ScriptedDrafter(SURE), width=MAX_ROWS)


class KnowingDrafter(ScriptedDrafter):
    """Knows which answer is wanted: names what stands at ``recall`` of the index of a row, if anything does."""

    def __init__(self, answer: list[int], recall: Callable[[int], int | None]) -> None:
        super().__init__({})
        self._answer = answer
        self._recall = recall

    def line(self, tree: DraftTree, row: int) -> Line:
        place = self._recall(tree.positions_of([row])[0] - len(self.prompt))
        if place is None or not 0 <= place < len(self._answer):
            return RARE
        return ((self._answer[place], 0.97), RARE[0])


def simulate(method: Alone, answer: list[int], groups: int, observe: Callable[[int], None] = lambda rows: None) -> int:
    """Timesteps until a pipeline of ``groups`` whose target gives ``answer`` has said it all.

    Checks on the way that every step is one that a stage's tree takes, that speculation costs no timestep, and that hits and
    misses add up.

    Args:
        observe: called after each timestep with the number of rows that entered.
    """
    tree = PredictionTree()
    in_flight = [torch.zeros(0, dtype=torch.int64)] * groups  # rows in each group
    is_computed = torch.zeros(0, dtype=torch.bool)
    verdict, said, timesteps = Verdict.of(answer[0]), 1, 0
    while True:
        if verdict.tokens:
            method.apply(verdict)
            advance = tree.advance(verdict.tokens)
            in_flight = [advance.renumber(group)[1] for group in in_flight]
            is_computed = is_computed[advance.kept]
            if verdict.finished:
                assert method.hits + method.misses == said - 1
                return timesteps
        timesteps += 1
        assert timesteps <= groups * said
        in_flight = [enter(tree, method.propose()), *in_flight[:-1]]
        is_computed = torch.cat((is_computed, is_computed.new_zeros(len(in_flight[0]))))
        method.draft()
        observe(len(in_flight[0]))
        is_computed[in_flight[-1]] = True
        tokens = walk(tree, is_computed, answer[said:])
        said += len(tokens)
        verdict = Verdict.of(*tokens, finished="length" if said == len(answer) else None)


def enter(tree: PredictionTree, step: Step | None) -> torch.Tensor:
    """The rows of a step in the tree of a stage."""
    where = slice(0, 0) if step is None else tree.append(step.token_ids, step.parents)
    return torch.arange(where.start, where.stop)


def walk(tree: PredictionTree, is_computed: torch.Tensor, coming: list[int]) -> tuple[int, ...]:
    """What computed rows yield, from the root on."""
    row, tokens = 0 if tree.num_rows else None, 0
    while row is not None and is_computed[row] and tokens < len(coming):
        row, tokens = tree.child(row, coming[tokens]), tokens + 1
    return tuple(coming[:tokens])


def random_answer(length: int, seed: int) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(40) for _ in range(length)]


@pytest.mark.fast_cases
@pytest.mark.parametrize("groups", [1, 2, 5])
@pytest.mark.parametrize("seed", range(5))
def test_any_answer_completes(groups: int, seed: int) -> None:
    """With a draft that is right at random places, by any width and number of forwards; never slower than row by row."""
    chooser = random.Random(seed)
    answer = random_answer(25, seed)
    right = chooser.random()
    known = [index + 1 if chooser.random() < right else None for index in range(len(answer))]
    drafter = KnowingDrafter(answer, lambda index: known[index] if index < len(known) else None)
    proposers = chooser.choice((DRAFT_ALONE, ("draft", "ngrams")))
    method = best_first(drafter, chooser.randint(1, 12), chooser.randint(1, 4), proposers)
    simulate(method, answer, groups)


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_a_draft_that_is_never_right_costs_no_timestep(groups: int) -> None:
    answer = random_answer(20, 1)
    method = best_first(KnowingDrafter(answer, lambda index: None))
    assert simulate(method, answer, groups) == groups * (len(answer) - 1)
    assert method.hits == 0


@pytest.mark.parametrize("groups", [1, 2, 5])
def test_a_draft_that_is_always_right_gives_several_tokens_a_timestep(groups: int) -> None:
    answer = random_answer(60, 2)
    method = best_first(KnowingDrafter(answer, lambda index: index + 1), width=8, forwards=3)
    assert simulate(method, answer, groups) <= len(answer) / 2 + groups


def test_an_answer_completes_while_speculation_ends_and_begins_again() -> None:
    """Every row costs, and the draft is never right."""
    answer, experience, groups = random_answer(100, 5), Experience(8), 8
    drafter = KnowingDrafter(answer, lambda index: None)
    method = best_first(drafter, width=None, forwards=1, experience=experience)
    drafted: list[int] = []

    def observe(num_rows: int) -> None:
        drafted.append(len(drafter.expanded))
        method.observe(TimestepTiming(float(max(num_rows, 1)), 0.9, (0.1,)))

    simulate(method, answer, groups, observe)
    assert drafted[-1] < len(drafted) / 2
    pauses = [after == before for before, after in pairwise(drafted)]
    assert not all(pauses[pauses.index(True) :])
