"""Threads of the shipped dialects, token by token."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.toy_dialects import END, IDS, at, ids, say, sequence_of, toy, written

from pipedec.threads import Sequence, Start, State, ThreadedSequence
from recipes.thread_models.one_thread import NO_DIALECT

FORK, CHILD, ASYNC, SYNC = IDS["[Fork]"], IDS["[Child]"], IDS["<async>"], IDS["<sync/>"]


def ended(sequence: Sequence) -> list[str | None]:
    """Of each thread, why it has ended; None if it goes on."""
    return [thread.ended_by if thread.state is State.ENDED else None for thread in sequence.threads]


def test_apar_forks_and_ends_each_thread_by_itself() -> None:
    sequence = sequence_of(toy("apar"), prompt_length=10)
    assert say(sequence, (), "a [Fork] b [Fork]") == [Start(1, CHILD), Start(2, CHILD)]
    assert say(sequence, (0,), "x y") == []
    say(sequence, (), "c <|end|>")
    say(sequence, (1,), "z <|end|>")
    assert ended(sequence) == ["stop", None, "stop"] and sequence.finished is None
    assert [thread.context() for thread in sequence.threads[1:]] == [((0, 2),), ((0, 4),)]
    assert say(sequence, (0,), "<|end|>") == []
    assert sequence.finished == "stop" and sequence.anomalies == {}
    assert written(sequence) == "a [Fork] [Child] x y <|end|> b [Fork] [Child] z <|end|> c <|end|>"
    assert [thread.positions for thread in sequence.threads] == [[*range(10, 16)], [*range(12, 16)], [*range(14, 17)]]


def test_an_ended_child_is_released_when_nothing_below_it_goes_on() -> None:
    sequence = sequence_of(toy("apar"))
    say(sequence, (), "a [Fork] b")
    say(sequence, (0,), "x [Fork] y <|end|>")
    assert at(sequence, (0, 0)).inherited == ((0, 2), (1, 3))
    assert sequence.sees(at(sequence, (0, 0)).number, 0) == ((0, 2), (1, 3), (2, 1))
    assert sequence.needed() == [3, 3, 1], "a grandchild still sees the child's first three tokens, not its last two"
    assert sequence.released() == ()
    say(sequence, (0, 0), "z <|end|>")
    assert sequence.released() == (1, 2)
    assert sequence.needed() == [3, 0, 0]


def test_pasta_promises_wait_and_join() -> None:
    sequence = sequence_of(toy("pasta"), prompt_length=10)
    assert say(sequence, (), 'a <promise : 20 "/> <promise : 2 "/>') == [Start(1, ASYNC), Start(2, ASYNC)]
    assert [thread.positions[0] for thread in sequence.threads[1:]] == [15, 39]
    assert sequence.threads[2].context() == ((0, 9),), "the second child sees both promises and no body"
    say(sequence, (1,), "x </async>")
    assert say(sequence, (), "<sync/>") == []
    assert ended(sequence) == [None, None, "close"] and sequence.main.state is State.WAITING
    assert sequence.main.num_tokens == 9, "the join token has not entered"
    assert sequence.released() == () == sequence.threads[0].context()
    assert say(sequence, (0,), "y z </async>") == [Start(0, SYNC)]
    assert (sequence.main.positions[-1], sequence.threads[0].context()) == (41, ((1, 4), (2, 3)))
    assert sequence.threads[0].context(8) == ()
    assert say(sequence, (), '<promise : 1 "/>') == [Start(3, ASYNC)]
    assert at(sequence, (2,)).inherited == ((1, 4), (2, 3), (0, 14)), "children after a join see what was joined"
    say(sequence, (), "b <|end|>")
    assert sequence.released() == () and sequence.finished is None
    say(sequence, (2,), "</async>")
    assert ended(sequence) == ["stop", "close", "close", "close"] and sequence.finished == "stop"
    assert written(sequence) == (
        'a <promise tokens=" 20 "/> <async> y z </async> <promise tokens=" 2 "/> <async> x </async> <sync/> '
        '<promise tokens=" 1 "/> <async> </async> b <|end|>'
    )
    assert sequence.anomalies == {"length_exceeded": 2, "end_without_join": 1}


def test_bodies_are_released_when_only_the_end_waits_for_them() -> None:
    sequence = sequence_of(toy("pasta"))
    say(sequence, (), '<promise : 20 "/> <promise : 20 "/>')
    say(sequence, (0,), "x </async>")
    assert sequence.released() == (), "a later join may see it"
    say(sequence, (), "<|end|>")
    assert sequence.main.state is State.WAITING and sequence.released() == (1,)
    say(sequence, (1,), "y </async>")
    assert ended(sequence) == ["stop", "close", "close"]


def test_what_is_banned_where() -> None:
    sequence = sequence_of(toy("apar", max_depth=1, max_children=2))
    assert sequence.banned(0) == {CHILD}
    assert sequence.banned(0, [FORK]) == {CHILD, FORK}
    say(sequence, (), "a [Fork]")
    assert sequence.banned(0) == {CHILD, FORK}, "right behind a fork"
    assert sequence.banned(1) == {CHILD, FORK}, "too deep"
    say(sequence, (), "b")
    assert sequence.banned(0) == {CHILD}
    say(sequence, (), "[Fork] c")
    assert sequence.banned(0) == {CHILD, FORK}, "it has two children"


def test_no_promise_inside_a_promise() -> None:
    sequence = sequence_of(toy("pasta"))
    promise = IDS["<promise"]
    assert promise not in sequence.banned(0)
    assert promise in sequence.banned(0, ids("<promise :"))
    say(sequence, (), "<promise :")
    assert promise in sequence.banned(0)
    say(sequence, (), '2 "/>')
    assert promise not in sequence.banned(0)
    assert promise in sequence.banned(1)


def test_where_a_walk_ends() -> None:
    sequence = sequence_of(toy("pasta", max_child_tokens=5), max_tokens=12)
    assert not sequence.ends_walk(0, IDS["a"])
    assert not sequence.ends_walk(0, IDS['"/>'])
    assert not sequence.ends_walk(0, IDS['"/>'], ids("<promise : 2")), "what comes behind an opener is known"
    assert sequence.ends_walk(0, SYNC, ids('<promise : 2 "/>'))
    assert not sequence.ends_walk(0, SYNC), "nothing to join"
    assert sequence.ends_walk(0, END)
    assert not sequence.ends_walk(0, IDS["a"], ids("a") * 10)
    assert sequence.ends_walk(0, IDS["a"], ids("a") * 11), "the answer is full"
    say(sequence, (), '<promise : 2 "/>')
    assert sequence.ends_walk(0, SYNC)
    assert sequence.ends_walk(1, IDS["</async>"])
    assert not sequence.ends_walk(0, IDS["</async>"])
    assert not sequence.ends_walk(1, IDS["a"], ids("a a"))
    assert sequence.ends_walk(1, IDS["a"], ids("a a a")), "the child is as long as it may be"


def test_the_answer_is_cut_in_document_order() -> None:
    sequence = sequence_of(toy("apar"), max_tokens=8)
    say(sequence, (), "a [Fork] b c d")
    say(sequence, (0,), "x")
    assert ended(sequence) == [None, None]
    say(sequence, (0,), "y")
    assert ended(sequence) == ["length", None], "two of the document, three of the child, three of the rest"
    assert say(sequence, (), "e") == [], "void: the other thread cut it in the same timestep"
    say(sequence, (0,), "z z z")
    assert ended(sequence) == ["length", "length"] and sequence.finished == "length"
    assert written(sequence) == "a [Fork] [Child] x y z z z"


def test_an_answer_that_just_fits_is_not_cut() -> None:
    for max_tokens, reason in ((7, "stop"), (6, "length")):
        sequence = sequence_of(toy("apar"), max_tokens=max_tokens)
        say(sequence, (), "a [Fork]")
        say(sequence, (0,), "x <|end|>")
        say(sequence, (), "b <|end|>")
        assert sequence.finished == reason
        assert len(sequence.document()) == max_tokens


def test_an_end_that_falls_behind_the_cut_later_is_cut_all_the_same() -> None:
    sequence = sequence_of(toy("apar"), max_tokens=6)
    say(sequence, (), "a [Fork] b <|end|>")
    say(sequence, (0,), "x y <|end|>")
    assert written(sequence) == "a [Fork] [Child] x y <|end|>"
    assert sequence.finished == "length"


def test_a_token_for_a_thread_that_waits_or_has_ended_is_a_mistake() -> None:
    sequence = sequence_of(toy("pasta"))
    say(sequence, (), '<promise : 2 "/> <sync/>')
    with pytest.raises(ValueError, match="thread 0, which is waiting"):
        sequence.accept_token(0, IDS["a"])
    say(sequence, (0,), "</async>")
    with pytest.raises(ValueError, match="thread 1, which is ended"):
        sequence.accept_token(1, IDS["a"])


def test_end_all_ends_what_goes_on_and_hands_out_what_was_held_back() -> None:
    sequence = sequence_of(toy("pasta"))
    reader = sequence.reader()
    say(sequence, (), 'a <promise : 2 "/> <sync/>')
    say(sequence, (0,), "x")
    for reason in ("cancelled", "stop"):
        sequence.end_all(reason)
        assert ended(sequence) == ["cancelled"] * 2 and sequence.finished == "cancelled", "it has ended already"
    assert [token.token_id for token in reader.pop_ready()] == ids('a <promise : 2 "/> <async> x')
    assert sequence.accept_token(1, IDS["a"]) == []
    assert sequence.anomalies == {}


@pytest.mark.parametrize("forks", [False, True])
def test_end_tokens_of_the_main_thread_are_banned_before_min_tokens(forks: bool) -> None:
    """Also after tokens that are not accepted yet. Nothing else changes."""
    bound, ends, a = toy("apar"), {END, IDS["z"]}, IDS["a"]
    new: Any = partial(ThreadedSequence, bound, 3, ends, 9) if forks else partial(Sequence, 3, ends, 9)
    sequence, usual = new(min_tokens=3), new()
    for said in range(5):
        for ahead in range(5):
            early = ends if said + ahead < 3 else set()
            assert sequence.banned(0, iter([a] * ahead)) == usual.banned(0, [a] * ahead) | early
        assert sequence.is_free == (not forks and said >= 3)
        for one in (sequence, usual):
            one.accept_token(0, a)


def test_a_child_may_end_before_min_tokens() -> None:
    sequence = ThreadedSequence(toy("apar"), 3, (END,), 9, min_tokens=9)
    say(sequence, (), "a [Fork]")
    assert END in sequence.banned(0) and END not in sequence.banned(1)


def test_end_tokens_are_the_callers() -> None:
    sequence = ThreadedSequence(toy("apar"), 3, (), 5)
    assert sequence.accept_token(0, END) == []
    assert sequence.finished is None


@examples(40)
@given(
    tokens=st.lists(st.integers(0, 9), min_size=1, max_size=8), max_tokens=st.integers(1, 9), ahead=st.lists(st.integers(0, 8))
)
def test_text_of_an_answer_that_cannot_fork_has_no_effects(tokens: list[int], max_tokens: int, ahead: list[int]) -> None:
    """The shortcut says what the rules say of a dialect that never opens a thread."""
    alone = Sequence(5, (9,), max_tokens)
    general = ThreadedSequence(replace(NO_DIALECT), 5, (9,), max_tokens)
    assert general.can_fork and not alone.can_fork
    for token in tokens:
        if alone.finished is not None:
            break
        assert alone.ends_walk(0, token) == general.ends_walk(0, token)
        assert alone.ends_walk(0, token, ahead) == general.ends_walk(0, token, ahead)
        assert alone.accept_token(0, token) == general.accept_token(0, token)
        assert alone.threads == general.threads and alone.finished == general.finished
        assert alone.anomalies == general.anomalies == {}
