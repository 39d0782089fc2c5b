"""What verdicts do to threads and their trees, event by event."""

from __future__ import annotations

import pytest
from support.toy_dialects import IDS, at, ids, say, sequence_of, toy

from pipedec.core import Accepted, Verdict
from pipedec.threads import Sequence, Start, State
from pipedec.tree import Remaining, ThreadChanges, apply_verdict

CHILD, ASYNC, SYNC, CLOSE = IDS["[Child]"], IDS["<async>"], IDS["<sync/>"], IDS["</async>"]
PROMISE = '<promise : 2 "/>'


def told(sequence: Sequence, finished: str | None = None, **texts: str) -> ThreadChanges:
    """Follow a verdict that says ``t0="a b"`` of thread 0, and so on."""
    accepted = tuple(Accepted(int(name[1:]), tuple(ids(text))) for name, text in texts.items())
    return apply_verdict(sequence, Verdict(accepted, finished))


def test_text_keeps_what_was_guessed_behind_it() -> None:
    sequence = sequence_of(toy("apar"))
    changes = told(sequence, t0="a b")
    assert changes == ThreadChanges({0: tuple(ids("a b"))}, {0: Remaining.SUBTREE})
    assert not changes.affects_threads


def test_a_verdict_of_tokens_alone_is_the_main_threads() -> None:
    sequence = sequence_of(toy("apar"))
    assert apply_verdict(sequence, Verdict.of(*ids("a b"))).accepted == {0: tuple(ids("a b"))}
    assert sequence.main.token_ids == ids("a b")


def test_what_stands_behind_an_opener_stays_and_its_child_begins() -> None:
    sequence = sequence_of(toy("apar"))
    changes = told(sequence, t0="a [Fork]")
    assert changes.remaining == {0: Remaining.SUBTREE, 1: Remaining.NOTHING}
    assert changes.starts == [Start(1, CHILD)] and changes.last == {} and changes.affects_threads


def test_a_verdict_goes_on_behind_an_opener() -> None:
    sequence = sequence_of(toy("apar"))
    changes = told(sequence, t0="a [Fork] b")
    assert changes.accepted == {0: tuple(ids("a [Fork] b"))}
    assert changes.remaining == {0: Remaining.SUBTREE, 1: Remaining.NOTHING} and changes.starts == [Start(1, CHILD)]
    assert sequence.main.token_ids == ids("a [Fork] b") and at(sequence, (0,)).opened_at == 2


def test_a_child_begins_with_the_token_that_completes_a_tag() -> None:
    sequence = sequence_of(toy("pasta"))
    assert told(sequence, t0="<promise : 2").remaining == {0: Remaining.SUBTREE}
    changes = told(sequence, t0='"/> a')
    assert changes.remaining == {0: Remaining.SUBTREE, 1: Remaining.NOTHING} and changes.starts == [Start(1, ASYNC)]
    assert told(sequence, t0="b").remaining == {0: Remaining.SUBTREE}


def opened(dialect: str = "pasta", **changes: object) -> Sequence:
    """A main thread with one child, which has said ``x``."""
    sequence = sequence_of(toy(dialect, **changes))
    say(sequence, (), f"a {PROMISE} b" if dialect == "pasta" else "a [Fork] b")
    say(sequence, (0,), "x")
    return sequence


def test_a_closed_child_enters_its_last_token_for_those_who_join_it() -> None:
    sequence = opened()
    changes = told(sequence, t1="y </async>")
    assert changes.remaining == {1: Remaining.ROOT} and changes.last == {1: CLOSE} and changes.starts == []
    assert changes.affects_threads


def test_nobody_sees_the_last_token_of_a_thread_where_there_is_no_join() -> None:
    sequence = opened("apar")
    changes = told(sequence, t1="y <|end|>")
    assert changes.remaining == {1: Remaining.NOTHING} and changes.last == {} and changes.affects_threads


def test_a_child_that_its_opener_closes_enters_it_for_its_own_child() -> None:
    """A child reaches its most tokens with an opener: its own child sees that token, though no join ever will."""
    sequence = opened("apar", max_child_tokens=4)
    changes = told(sequence, t1="y [Fork]")
    assert at(sequence, (0,)).ended_by == "limit"
    assert changes.last == {1: IDS["[Fork]"]} and changes.remaining == {1: Remaining.ROOT, 2: Remaining.NOTHING}
    assert changes.starts == [Start(2, CHILD)]


def test_a_child_that_ends_when_nobody_can_join_it_enters_nothing() -> None:
    sequence = opened()
    say(sequence, (), "<|end|>")
    assert sequence.main.state is State.WAITING
    changes = told(sequence, t1="y </async>")
    assert changes.last == {} and changes.remaining[1] is Remaining.NOTHING
    assert sequence.finished == "stop"


def test_a_join_waits_without_rows_and_then_begins_anew() -> None:
    sequence = opened()
    changes = told(sequence, t0="c <sync/>")
    assert changes.remaining == {0: Remaining.NOTHING} and changes.starts == [] and changes.last == {}
    changes = told(sequence, t1="</async>")
    assert changes.remaining == {1: Remaining.ROOT, 0: Remaining.NOTHING} and changes.last == {1: CLOSE}
    assert changes.starts == [Start(0, SYNC)]


@pytest.mark.parametrize("order", [("t0", "t1"), ("t1", "t0")])
def test_a_join_and_what_it_joins_may_come_in_one_verdict(order: tuple[str, str]) -> None:
    sequence = opened()
    texts = {"t0": "<sync/>", "t1": "</async>"}
    changes = told(sequence, **{name: texts[name] for name in order})
    assert changes.starts == [Start(0, SYNC)] and changes.last == {1: CLOSE}
    assert changes.remaining == {0: Remaining.NOTHING, 1: Remaining.ROOT}


def test_a_join_without_children_is_text() -> None:
    sequence = sequence_of(toy("pasta"))
    assert told(sequence, t0="a <sync/> b").remaining == {0: Remaining.SUBTREE}


def test_the_end_of_an_answer_leaves_nothing() -> None:
    sequence = opened("apar")
    assert told(sequence, t0="<|end|>").remaining == {0: Remaining.NOTHING}
    changes = told(sequence, "stop", t1="<|end|>")
    assert sequence.finished == "stop" and changes.remaining == {1: Remaining.NOTHING}


@pytest.mark.parametrize("reason", ["stop", "cancelled"])
def test_an_answer_that_is_ended_from_outside_leaves_nothing(reason: str) -> None:
    """Not even what the same verdict opens."""
    sequence = opened("apar")
    changes = told(sequence, reason, t0="c [Fork]")
    assert sequence.finished == reason and changes.starts == [] and changes.last == {}
    assert changes.remaining == {0: Remaining.NOTHING, 1: Remaining.NOTHING}
    sequence = opened("apar")
    changes = apply_verdict(sequence, Verdict((), reason))
    assert changes.accepted == {} and changes.remaining == {0: Remaining.NOTHING, 1: Remaining.NOTHING}


def test_tokens_of_a_thread_that_the_same_verdict_has_cut_are_void() -> None:
    sequence = sequence_of(toy("apar"), max_tokens=6)
    say(sequence, (), "a [Fork]")
    changes = told(sequence, t1="x y z", t0="b")
    assert sequence.main.is_cut and sequence.main.token_ids == ids("a [Fork]")
    assert 0 not in changes.accepted and changes.remaining == {1: Remaining.NOTHING, 0: Remaining.NOTHING}
    assert sequence.finished == "length"


def test_a_child_that_is_cut_as_soon_as_it_is_opened_does_not_begin() -> None:
    sequence = sequence_of(toy("apar"), max_tokens=3)
    changes = told(sequence, t0="a [Fork]")
    assert changes.starts == [] and sequence.finished == "length"
    assert changes.remaining == {0: Remaining.NOTHING}


def test_a_thread_that_is_cut_while_it_waits_is_told_of() -> None:
    sequence = opened(max_child_tokens=100)
    say(sequence, (), "<|end|>")
    sequence.max_tokens = sum(thread.num_tokens for thread in sequence.threads) + 1
    changes = told(sequence, t1="y")
    assert sequence.main.is_cut and sequence.finished is None
    assert changes.remaining == {1: Remaining.SUBTREE, 0: Remaining.NOTHING} and changes.affects_threads


def test_nothing_stays_of_a_closed_thread_that_is_cut_while_it_waits() -> None:
    """It has reached its most tokens, and no pending token tells of it."""
    sequence = sequence_of(toy("parallel", max_depth=2, max_child_tokens=5, no_opening_after=()))
    say(sequence, (), "a <Parallel> b")
    say(sequence, (0,), "x <Parallel>")
    changes, closed = told(sequence, t1="y z"), at(sequence, (0,))
    assert closed.is_closing and closed.pending is None and changes.remaining[1] is Remaining.ROOT
    sequence.max_tokens = closed.opened_at + closed.num_tokens + at(sequence, (0, 0)).num_tokens + 1
    changes = told(sequence, t2="v")
    assert closed.is_cut and sequence.finished is None
    assert changes.remaining[1] is Remaining.NOTHING and changes.affects_threads


def test_tokens_of_a_verdict_are_those_of_all_its_threads() -> None:
    assert Verdict((Accepted(3, (1, 2), ((7, 8),)), Accepted(0, (5,))), "stop").tokens == (1, 2, 5)
    assert Verdict.of(4, 5, forecast=((7,),)) == Verdict((Accepted(0, (4, 5), ((7,),)),))
    assert Verdict.of() == Verdict() and Verdict().tokens == ()
