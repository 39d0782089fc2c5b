"""Broken structure: every anomaly, what becomes of the answer, and that it still ends."""

from __future__ import annotations

from typing import Any

import pytest
from support.toy_dialects import IDS, Joined, ThreadOpened, at, ids, say, sequence_of, texts, toy, written

from pipedec.threads import Anomaly, Sequence, State

PROMISE = '<promise : 2 "/>'


def finish(sequence: Sequence) -> None:
    """End what goes on as a model would: children first, with their own token."""
    for thread in reversed(sequence.threads):
        if thread.state is State.RUNNING:
            close = "</async>" if thread.path and sequence.threads[1].token_ids[0] == IDS["<async>"] else "<|end|>"
            say(sequence, thread.path, close)
    assert sequence.finished == "stop"


def pasta(**changes: Any) -> Sequence:
    return sequence_of(toy("pasta", **changes))


def shown(sequence: Sequence) -> str:
    return texts(token.token_id for token in sequence.document() if sequence.is_shown(token))


def unclosed_child() -> Sequence:
    sequence = pasta(max_child_tokens=4, default_length=40)
    say(sequence, (), '<promise : 20 "/> <sync/>')
    events = say(sequence, (0,), "x y z")
    assert at(sequence, (0,)).ended_by == "limit"
    assert isinstance(events[0], Joined), "the parent goes on behind what there is"
    assert sequence.threads[0].context() == ((1, 4),)
    return sequence


def length_missing() -> Sequence:
    sequence = pasta(default_length=40)
    for token in (IDS["<promise"], IDS[' topic="'], IDS["rolls"], IDS['"/>']):
        sequence.accept(0, token)
    assert sequence.threads[0].next_position == at(sequence, (0,)).positions[0] + 40
    say(sequence, (0,), "x </async>")
    say(sequence, (), "<sync/>")
    return sequence


def length_clamped() -> Sequence:
    sequence = pasta(max_length=100)
    say(sequence, (), '<promise : 99999999999 "/>')
    assert sequence.threads[0].next_position == at(sequence, (0,)).positions[0] + 100
    say(sequence, (0,), "x </async>")
    say(sequence, (), "<sync/>")
    return sequence


def length_exceeded() -> Sequence:
    sequence = pasta()
    say(sequence, (), PROMISE)
    say(sequence, (0,), "x y z </async>")
    say(sequence, (), "<sync/> a")
    assert at(sequence, (0,)).positions == [14, 15, 16, 17, 18]
    assert sequence.main.positions[-2:] == [16, 17], "positions of child and parent collide, each thread's own stay in order"
    return sequence


def opener_not_completed() -> Sequence:
    sequence = pasta(max_opener_tokens=4)
    reader = sequence.reader()
    say(sequence, (), "a <promise : 2")
    assert texts(token.token_id for token in reader.take()) == "a", "a tag is held back until it is one"
    say(sequence, (), 'b c "/> d')
    assert len(sequence.threads) == 1
    assert texts(token.token_id for token in reader.take() if sequence.is_shown(token)) == 'tokens=" 2 b c "/> d'
    return sequence


def opener_too_deep() -> Sequence:
    sequence = pasta()
    say(sequence, (), '<promise : 20 "/>')
    assert say(sequence, (0,), PROMISE) == [], "a nested promise is text"
    say(sequence, (0,), "</async>")
    say(sequence, (), "<sync/>")
    assert len(sequence.threads) == 2
    return sequence


def opener_out_of_place() -> Sequence:
    sequence = sequence_of(toy("apar"))
    assert len(say(sequence, (), "a [Fork] [Fork]")) == 1
    return sequence


def too_many_children() -> Sequence:
    sequence = sequence_of(toy("apar", max_children=1))
    assert len(say(sequence, (), "a [Fork] b [Fork] c")) == 1
    return sequence


def join_without_children() -> Sequence:
    sequence = pasta()
    assert say(sequence, (), "a <sync/> b") == []
    assert shown(sequence) == "a b"
    return sequence


def end_without_join() -> Sequence:
    sequence = pasta()
    say(sequence, (), PROMISE + " a <|end|>")
    assert sequence.main.state is State.WAITING
    return sequence


def close_outside_child() -> Sequence:
    sequence = pasta()
    assert say(sequence, (), "a </async> b") == []
    assert shown(sequence) == "a b"
    return sequence


def end_token_in_child() -> Sequence:
    sequence = pasta()
    say(sequence, (), '<promise : 20 "/>')
    say(sequence, (0,), "x <|end|>")
    assert at(sequence, (0,)).ended_by == "stop"
    assert sequence.main.state is State.RUNNING, "it ends its thread alone"
    say(sequence, (), "<sync/>")
    return sequence


def forced_token_sampled() -> Sequence:
    sequence = sequence_of(toy("apar"))
    assert say(sequence, (), "a [Child] b") == []
    assert shown(sequence) == "a b"
    return sequence


@pytest.mark.parametrize("name", [name for name in Anomaly if name != "cache_full"])
def test_an_anomaly_is_counted_and_the_answer_ends(name: str) -> None:
    sequence = globals()[name]()
    finish(sequence)
    assert sequence.anomalies == {name: 1}


def test_a_full_cache_ends_all_threads() -> None:
    sequence = pasta()
    say(sequence, (), PROMISE + " a <sync/>")
    say(sequence, (0,), "x")
    sequence.end_all("cache_full")
    assert sequence.finished == "cache_full"
    assert sequence.anomalies == {"cache_full": 1}
    assert written(sequence) == '<promise tokens=" 2 "/> <async> x a'


def test_an_answer_ends_when_more_has_to_be_kept_than_the_dialect_allows() -> None:
    def said(limit: int) -> Sequence:
        sequence = pasta(max_cached_tokens=limit)
        say(sequence, (), PROMISE)
        say(sequence, (0,), "x")
        say(sequence, (), "a")
        return sequence

    whole = said(limit=1000)
    kept = whole.prompt_length + sum(thread.num_tokens for thread in whole.threads)
    assert said(kept).finished is None
    full = said(kept - 1)
    assert (full.finished, full.anomalies) == ("cache_full", {"cache_full": 1})


def test_released_threads_do_not_fill_the_cache() -> None:
    sequence = sequence_of(toy("apar"))
    sequence = sequence_of(toy("apar", max_cached_tokens=sequence.prompt_length + 8))
    say(sequence, (), "a [Fork]")
    say(sequence, (0,), "x x x <|end|>")
    say(sequence, (), "b c d e")
    assert sequence.finished is None


@pytest.mark.parametrize("breaker", ["<sync/>", "</async>", "<|end|>"])
def test_control_tokens_end_a_tag(breaker: str) -> None:
    sequence = pasta()
    events = say(sequence, (), f"<promise : {breaker}")
    assert not any(isinstance(event, ThreadOpened) for event in events)
    assert sequence.anomalies["opener_not_completed"] == 1
    assert sequence.main.tag is None


def test_a_promise_inside_a_promise_begins_anew() -> None:
    sequence = pasta()
    opened = say(sequence, (), "<promise : 20 " + PROMISE)
    assert [type(event) for event in opened] == [ThreadOpened]
    assert sequence.anomalies == {"opener_not_completed": 1}
    assert sequence.threads[0].next_position == at(sequence, (0,)).positions[0] + 2, "the second promise's length"
    assert shown(sequence) == 'tokens=" 20'


def test_a_tag_at_the_end_of_a_child_is_not_completed() -> None:
    sequence = pasta(max_depth=2, max_child_tokens=3)
    say(sequence, (), '<promise : 20 "/>')
    say(sequence, (0,), "<promise :")
    assert sequence.anomalies == {"unclosed_child": 1, "opener_not_completed": 1}


def test_a_length_of_nothing_is_one() -> None:
    sequence = pasta()
    say(sequence, (), '<promise : 0 "/>')
    assert sequence.threads[0].next_position == at(sequence, (0,)).positions[0] + 1
    assert sequence.anomalies["length_clamped"] == 1


def test_a_child_that_ends_with_open_children_waits_for_them() -> None:
    sequence = pasta(max_depth=2)
    say(sequence, (), '<promise : 20 "/>')
    say(sequence, (0,), '<promise : 20 "/> </async>')
    say(sequence, (), "<sync/>")
    assert [thread.state for thread in sequence.threads] == [State.WAITING, State.WAITING, State.RUNNING]
    say(sequence, (0, 0), "x </async>")
    assert sequence.threads[0].context() == ((1, 6), (2, 3)), "the join sees both, each with its closing token"
    assert written(sequence).endswith("<async> x </async> </async> <sync/>")


def test_a_join_waits_only_once() -> None:
    sequence = pasta()
    say(sequence, (), '<promise : 20 "/>')
    say(sequence, (0,), "</async>")
    say(sequence, (), "<sync/> a <sync/>")
    assert sequence.anomalies == {"join_without_children": 1}
    assert sequence.main.token_ids[-1] == ids("<sync/>")[0]
