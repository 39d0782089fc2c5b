"""The methods with a draft that says what the test wants: what they propose, keep and count."""

from __future__ import annotations

from functools import partial

import pytest
from support.drafters import PROMPT, Alone, ScriptedDrafter, begun, rows
from support.simulation import begin, scheduler_of, updates

from pipedec.core.errors import UserError
from pipedec.core.request import TokenizedRequest
from pipedec.core.stage_message import NO_MASKS
from pipedec.core.verdict import Verdict
from pipedec.decoding import Request
from pipedec.methods import METHODS, PipeDecOptions, StaticTreeOptions
from pipedec.threads import Sequence

#: after each token: the likeliest next tokens with their probabilities
BIGRAMS = {
    10: [(11, 0.6), (12, 0.3)],
    11: [(13, 0.5), (14, 0.4)],
    12: [(15, 0.9), (16, 0.05)],
    13: [(17, 0.5), (18, 0.5)],
    14: [(10, 0.7), (11, 0.2)],
    15: [(17, 0.7), (18, 0.2)],
    20: [(21, 0.7), (22, 0.2)],
    21: [(23, 0.5), (24, 0.4)],
    22: [(25, 0.1), (26, 0.1)],
    40: [(41, 0.8), (42, 0.1)],
    41: [(43, 0.8), (44, 0.1)],
}


@pytest.fixture
def drafter() -> ScriptedDrafter:
    return ScriptedDrafter(BIGRAMS)


def pipedec(drafter: ScriptedDrafter, width: int = 3, children: int = 2, token: int = 10) -> Alone:
    """A method that has taken in the prompt and whose target has said ``token``."""
    method = begun(TokenizedRequest(0, PROMPT, method="pipedec", options=PipeDecOptions(width, children)), drafter)
    method.apply(Verdict.of(token))
    return method


def test_the_tree_grows_by_one_layer_a_timestep(drafter: ScriptedDrafter) -> None:
    method = pipedec(drafter)
    assert (drafter.begun, drafter.prompt) == (1, list(PROMPT))
    assert rows(method.propose()) == [(10, -1)]
    method.draft()
    assert rows(method.propose()) == [(11, 0), (12, 0)]
    method.draft()
    # 12-15: 0.27, 11-13: 0.30, 11-14: 0.24, 12-16: 0.015; the three likeliest paths in the order of their parents
    assert rows(method.propose()) == [(13, 1), (14, 1), (15, 2)]
    assert drafter.expanded == [[10], [11, 12]]
    assert (method.hits, method.misses) == (0, 1)


def test_a_hit_prunes_the_candidates_before_the_next_layer_is_chosen(drafter: ScriptedDrafter) -> None:
    method = pipedec(drafter)
    for _ in range(2):
        method.propose()
        method.draft()
    # Without the verdict 13, 14 and 15 would enter; now 15 cannot come true and 16 of the same branch neither.
    method.apply(Verdict.of(11))
    assert rows(method.propose()) == [(13, 0), (14, 0)]
    method.draft()
    assert drafter.expanded[-1] == [13, 14]
    assert rows(method.propose()) == [(17, 1), (18, 1), (10, 2)]
    assert (method.hits, method.misses) == (1, 1)
    assert drafter.skipped == 0


def test_an_empty_frontier_proposes_nothing_until_the_miss(drafter: ScriptedDrafter) -> None:
    """The width limit can cut every path behind a row that then turns out true."""
    method = pipedec(drafter, width=2, token=20)
    assert rows(method.propose()) == [(20, -1)]
    method.draft()
    assert rows(method.propose()) == [(21, 0), (22, 0)]
    method.draft()
    assert rows(method.propose()) == [(23, 1), (24, 1)]
    method.draft()
    method.apply(Verdict.of(22))
    assert (method.hits, method.misses) == (1, 1)
    for _ in range(2):
        assert method.propose() is None
        method.draft()
    assert drafter.expanded == [[20], [21, 22], [23, 24]]
    method.apply(Verdict.of(25))
    assert rows(method.propose()) == [(25, -1)]
    assert (method.hits, method.misses) == (1, 2)


def test_a_static_tree_enters_whole_and_waits_for_its_verdict(drafter: ScriptedDrafter) -> None:
    method = begun(TokenizedRequest(0, PROMPT, method="stpp", options=StaticTreeOptions(3, 2, 2)), drafter)
    method.apply(Verdict.of(10))
    assert (drafter.begun, drafter.prompt) == (1, list(PROMPT))
    assert method.propose() is None  # nothing is drafted yet
    method.draft()
    assert drafter.expanded == [[10], [11, 12]]
    assert rows(method.propose()) == [(10, -1), (11, 0), (12, 0), (13, 1), (14, 1), (15, 2)]
    for _ in range(2):
        method.draft()
        assert method.propose() is None
    assert len(drafter.expanded) == 2
    method.apply(Verdict.of(11, 14, 40))
    assert (method.hits, method.misses, drafter.drafted) == (2, 2, set()), "no row outlives the verdict"
    assert method.propose() is None
    method.draft()
    assert rows(method.propose()) == [(40, -1), (41, 0), (42, 0), (43, 1), (44, 1), (60, 2)]
    method.apply(Verdict.of(41, 43, finished="length"))
    assert (method.hits, method.misses) == (3, 2), "an answer may end in the middle of the tree"
    method.draft()
    assert method.propose() is None


@pytest.mark.parametrize("name", METHODS)
def test_the_last_verdict_proposes_and_counts_nothing(name: str, drafter: ScriptedDrafter) -> None:
    method = begun(TokenizedRequest(0, PROMPT, method=name), drafter, trained_masks=3)
    method.apply(Verdict.of(10))
    method.propose()
    method.draft()
    method.apply(Verdict.of(99, finished="stop"))
    assert method.propose() is None
    assert (method.hits, method.misses) == (0, 1)


def test_what_a_batch_can_run(drafter: ScriptedDrafter) -> None:
    def opened(name: str, drafter: ScriptedDrafter | None) -> Request:
        scheduler = scheduler_of(2, drafter)
        request = begin(scheduler, TokenizedRequest(0, PROMPT, method=name))
        assert updates(scheduler)[0].opening is not None
        return request

    for count, name in enumerate(("pp", "pipedec", "stpp", "pipedec-bestfirst")):
        assert opened(name, drafter).method.masks == NO_MASKS
        assert drafter.begun == count, "a method that drafts opens a lane of the draft model; pp does not"
    opened("pipedec-bestfirst", None)
    for name in ("stpp", "pipedec"):
        remedy = "give --draft DIR, or use --method pipedec-bestfirst"
        with pytest.raises(UserError, match=rf"^method {name} needs a draft model: {remedy}$"):
            scheduler_of(2).prepare(TokenizedRequest(0, PROMPT, method=name), partial(Sequence, 5, (), 10))
    with pytest.raises(UserError, match=r"^unknown method 'best': choose one of pp, stpp, pipedec, pipedec-bestfirst, bita$"):
        scheduler_of(2, drafter).prepare(TokenizedRequest(0, PROMPT, method="best"), partial(Sequence, 5, (), 10))
    assert drafter.begun == 3, "a check opens nothing"
