"""Whatever the method, the number of stages and the dispatch: rows see what they should, slots hold what may be seen.

The answer is the naive one.
"""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from marked import Rehearsal
from support.toy_dialects import toy

from pipedec.methods import METHODS
from pipedec.threads import Sequence

SMALL = {"max_child_tokens": 9, "max_children": 3}
DIALECTS = {
    "one thread": None,
    "apar": toy("apar", **SMALL),
    "apar, three deep": toy("apar", max_depth=3, max_children=2, no_opening_after=()),
    "pasta": toy("pasta", **SMALL, max_opener_tokens=6, default_length=5, max_length=8),
    "pasta, nested": toy(
        "pasta", max_depth=3, max_child_tokens=12, max_children=2, max_opener_tokens=5, default_length=5, max_length=8
    ),
    "parallel": toy("parallel", **SMALL),
    "parallel, nested and flat": toy("parallel", max_depth=2, max_children=3, after_join="flat"),
}
SETTINGS = settings(max_examples=4, deadline=None)


def said(sequence: Sequence) -> list[tuple[tuple[int, ...], int, int]]:
    """The document: of each token its thread, itself, where it stands."""
    threads = sequence.threads
    return [
        (threads[token.thread].path, token.token_id, threads[token.thread].positions[token.ordinal])
        for token in sequence.document()
    ]


@pytest.mark.fast_cases("one thread-stpp", "apar-pipedec", "pasta-pipedec-bestfirst", "parallel-bita")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", DIALECTS)
@SETTINGS
@given(
    seed=st.integers(0, 2**32), stages=st.integers(1, 4), windows=st.booleans(), max_tokens=st.integers(4, 70),
    width=st.sampled_from([1, 2, 6]), accuracy=st.sampled_from([0.3, 0.9]), waits=st.lists(st.integers(0, 9), max_size=3),
    knee=st.sampled_from([4, 64]), slots=st.sampled_from([300, 4096]),
)  # fmt: skip
def test_every_rank_sees_and_holds_the_same(
    name, method, seed, stages, windows, max_tokens, width, accuracy, waits, knee, slots
) -> None:
    tree = {"width": width, "children": 3, "depth": 2, "forwards": 2}
    arrivals = tuple(accumulate(waits, initial=1))
    rehearsal = Rehearsal(
        DIALECTS[name], seed, method, stages, windows, max_tokens, tree, accuracy, arrivals=arrivals, knee=knee, slots=slots
    )
    for answer, expected in zip(rehearsal.run(), rehearsal.expected(), strict=True):
        assert said(answer) == said(expected)
        assert answer.finished == expected.finished


@pytest.mark.slow
def test_a_step_of_200_rows_and_40_threads() -> None:
    """As wide as a step gets is what the method's options say, and no number of threads is too large."""
    dialect = toy("apar", max_depth=6, max_children=64, max_child_tokens=400, no_opening_after=())
    tree = {"width": 240, "children": 6, "forwards": 6}
    rehearsal = Rehearsal(dialect, 3, "pipedec-bestfirst", 2, True, 330, tree, accuracy=0.9, chatter=1.5, knee=240)
    [answer], [expected] = rehearsal.run(), rehearsal.expected()
    assert said(answer) == said(expected) and answer.finished == expected.finished
    assert rehearsal.stages.widest >= 200 and rehearsal.stages.most_threads >= 40


@pytest.mark.fast_cases
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["one thread", "apar"])
def test_requests_that_are_paused_say_what_they_would_have_said(name: str, method: str) -> None:
    """Those that arrive later are served first."""
    arrivals = (1, 1, 4, 5, 8, 10)
    rehearsal = Rehearsal(DIALECTS[name], 7, method, 3, True, 60, arrivals=arrivals, knee=16, slots=200, prefers_later=True)
    assert [said(answer) for answer in rehearsal.run()] == [said(answer) for answer in rehearsal.expected()]
    assert rehearsal.scheduler.tally.pauses > 0 and rehearsal.kv.adopted_tokens > 0
