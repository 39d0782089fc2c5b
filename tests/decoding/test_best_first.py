"""Best-first injection with a draft that says what the test wants, step by step and in a simulated pipeline."""

from __future__ import annotations

from itertools import islice
from math import exp, log

import pytest
from support.drafters import PROMPT, Alone, ScriptedDrafter, begun, rows

from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.verdict import Verdict
from pipedec.decoding import Experience
from pipedec.decoding.acceptance import AcceptanceModel
from pipedec.decoding.acceptance import Line as AcceptedLine
from pipedec.decoding.injection import InjectionTree
from pipedec.methods import MAX_ROWS, BestFirstOptions

PASSAGE = 3
SURE = {token: ((token + 1, 0.99), (token + 50, 0.005)) for token in range(10, 40)}
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
    request = TokenizedRequest(0, prompt, options=BestFirstOptions(width, 2, forwards=forwards, proposers=proposers))
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
        request = TokenizedRequest(0, PROMPT, options=BestFirstOptions(4, 2, forwards=3, proposers=DRAFT_ALONE))
        weights = experience.learned(request, AcceptanceModel, (9.0, 9.0)).weights
        before = weights.clone()
        for _ in range(10):
            method.apply(Verdict.of(20))
            method.propose()
            method.draft()
        assert weights[0] < before[0]
        assert weights[-1] > before[-1]


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
    changes, hit, _ = tree.advance_to([2, 7])
    assert hit and changes.committed == [0, row], "it was right all the same"


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


def test_no_proposer_is_refused() -> None:
    with pytest.raises(UserError, match=r"^method pipedec-bestfirst has no proposer: give --draft DIR, or .*$"):
        best_first(None, proposers=DRAFT_ALONE)


def test_a_width_that_no_tree_holds_is_refused() -> None:
    with pytest.raises(UserError, match=rf"^width: must be an integer \(1 to {MAX_ROWS}\), not {MAX_ROWS + 1}$"):
        best_first(ScriptedDrafter(SURE), width=MAX_ROWS + 1)
    best_first(ScriptedDrafter(SURE), width=MAX_ROWS)
