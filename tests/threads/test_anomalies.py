"""Broken structure: every anomaly, what becomes of the answer, and that it still ends."""

from __future__ import annotations

from typing import Any

import pytest
from support.toy_dialects import IDS, at, ids, say, sequence_of, texts, toy, written

from pipedec.threads import Anomaly, Sequence, Start, State

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


def gap(sequence: Sequence) -> int:
    """How far behind the beginning of its first child the main thread goes on."""
    return sequence.threads[0].next_position - at(sequence, (0,)).positions[0]


LONG = '<promise : 20 "/>'
APAR: dict[str, Any] = {"name": "apar"}
#: by anomaly: the dialect, what the main thread and its first child say, how often others enter, what is shown in the end
ANOMALIES: dict[str, tuple[dict[str, Any], list[str], int, str]] = {
    "unclosed_child": ({"max_child_tokens": 4}, [f"{LONG} <sync/>", "x y z"], 2, "x y z"),
    "length_missing": ({"default_length": 40}, ['<promise rolls "/>', "x </async>", "<sync/>"], 2, "x"),
    "length_clamped": ({"max_length": 100}, ['<promise : 99999999999 "/>', "x </async>", "<sync/>"], 2, "x"),
    "length_exceeded": ({}, [PROMISE, "x y z </async>", "<sync/> a"], 2, "x y z a"),
    "opener_not_completed": ({"max_opener_tokens": 4}, ['a <promise : 2 b c "/> d'], 0, 'a tokens=" 2 b c "/> d'),
    "opener_too_deep": ({}, [LONG, PROMISE + " </async>", "<sync/>"], 2, 'tokens=" 2 "/>'),
    "opener_out_of_place": (APAR, ["a [Fork] [Fork]"], 1, "a"),
    "too_many_children": (APAR | {"max_children": 1}, ["a [Fork] b [Fork] c"], 1, "a b c"),
    "join_without_children": ({}, ["a <sync/> b"], 0, "a b"),
    "end_without_join": ({}, [PROMISE + " a <|end|>"], 1, "a"),
    "close_outside_child": ({}, ["a </async> b"], 0, "a b"),
    "end_token_in_child": ({}, [LONG, "x <|end|>", "<sync/>"], 2, "x"),
    "forced_token_sampled": (APAR, ["a [Child] b"], 0, "a b"),
}


@pytest.mark.parametrize("name", [name for name in Anomaly if name != "cache_full"])
def test_an_anomaly_is_counted_and_the_answer_ends(name: str) -> None:
    changes, said, entered, text = ANOMALIES[name]
    sequence = sequence_of(toy(**({"name": "pasta"} | changes)))
    starts = [start for index, words in enumerate(said) for start in say(sequence, ((), (0,))[index % 2], words)]
    assert len(starts) == entered
    finish(sequence)
    assert sequence.anomalies == {name: 1}
    assert shown(sequence) == text


def test_a_child_that_does_not_end_is_joined_where_it_is_cut() -> None:
    sequence = pasta(max_child_tokens=4, default_length=40)
    say(sequence, (), f"{LONG} <sync/>")
    assert say(sequence, (0,), "x y z") == [Start(0, IDS["<sync/>"])], "the parent goes on behind what there is"
    assert at(sequence, (0,)).ended_by == "limit" and sequence.threads[0].context() == ((1, 4),)


@pytest.mark.parametrize(
    ("changes", "tag", "length"),
    [({"default_length": 40}, "rolls", 40), ({"max_length": 100}, ": 99999999999", 100), ({}, ": 0", 1), ({}, ": 2", 2)],
)
def test_the_parent_goes_on_behind_the_predicted_length(changes: dict[str, Any], tag: str, length: int) -> None:
    """Where a child is longer, positions of child and parent collide; each thread's own stay in order."""
    sequence = pasta(**changes)
    say(sequence, (), f'<promise {tag} "/>')
    assert gap(sequence) == length
    say(sequence, (0,), "x y z </async>")
    say(sequence, (), "<sync/> a")
    first = at(sequence, (0,)).positions[0]
    assert at(sequence, (0,)).positions == [*range(first, first + 5)]
    assert sequence.main.positions[-2:] == [first + length, first + length + 1]


def test_an_end_or_a_token_of_the_end_waits_for_children_and_ends_its_own_thread_alone() -> None:
    sequence = pasta()
    say(sequence, (), PROMISE + " a <|end|>")
    assert sequence.main.state is State.WAITING
    sequence = pasta()
    say(sequence, (), LONG)
    say(sequence, (0,), "x <|end|>")
    assert at(sequence, (0,)).ended_by == "stop" and sequence.main.state is State.RUNNING


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
    reader = sequence.reader()
    assert say(sequence, (), "a <promise :") == [] and texts(token.token_id for token in reader.pop_ready()) == "a"
    assert say(sequence, (), breaker) == []
    assert sequence.anomalies["opener_not_completed"] == 1 and sequence.main.tag is None


def test_a_promise_inside_a_promise_begins_anew() -> None:
    sequence = pasta()
    assert len(say(sequence, (), "<promise : 20 " + PROMISE)) == 1
    assert sequence.anomalies == {"opener_not_completed": 1} and gap(sequence) == 2, "the second promise's length"
    assert shown(sequence) == 'tokens=" 20'


def test_a_tag_at_the_end_of_a_child_is_not_completed() -> None:
    sequence = pasta(max_depth=2, max_child_tokens=3)
    say(sequence, (), '<promise : 20 "/>')
    say(sequence, (0,), "<promise :")
    assert sequence.anomalies == {"unclosed_child": 1, "opener_not_completed": 1}


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
