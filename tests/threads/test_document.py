"""What readers get, and when; and answers in document order, read back into their threads; the papers' metrics."""

from __future__ import annotations

import pytest
from support.toy_dialects import IDS, ids, say, sequence_of, texts, toy

from pipedec.threads import DocumentToken, ReorderBuffer, Sequence, ThreadMetrics, measure, replay
from recipes.thread_models.figures import theoretical_speedup


def taken(reader: ReorderBuffer) -> str:
    return texts(token.token_id for token in reader.pop_ready())


def test_text_behind_an_open_child_is_held_back() -> None:
    sequence = sequence_of(toy("apar"))
    reader = sequence.reader()
    say(sequence, (), "a [Fork] b [Fork] c")
    assert taken(reader) == "a [Fork] [Child]"
    say(sequence, (1,), "y <|end|>")
    assert taken(reader) == ""
    say(sequence, (0,), "x")
    assert taken(reader) == "x"
    say(sequence, (0,), "<|end|>")
    assert taken(reader) == "<|end|> b [Fork] [Child] y <|end|> c"
    say(sequence, (), "d <|end|>")
    assert taken(reader) == "d <|end|>"
    assert taken(reader) == ""


def promised() -> Sequence:
    sequence = sequence_of(toy("pasta"))
    say(sequence, (), 'a <promise : 20 "/>!')
    say(sequence, (0,), "x </async>")
    say(sequence, (), "b <|end|>")
    return sequence


def test_readers_see_text_and_what_stands_behind_a_tag_in_its_last_token() -> None:
    sequence = promised()
    document = sequence.document()
    assert [token.is_control for token in document] == [False, *[True] * 5, False, True, False, True]
    assert document[4] == DocumentToken(thread=0, token_id=IDS['"/>!'], ordinal=4, is_control=True, tail="!")
    shown = "".join(texts([token.token_id]) if sequence.is_shown(token) else token.tail for token in document)
    assert shown == "a!xb"


def test_a_dialect_may_show_its_control_tokens() -> None:
    sequence = sequence_of(toy("apar", show_control=True))
    say(sequence, (), "a [Fork] b")
    assert all(sequence.is_shown(token) for token in sequence.document())


def test_a_tag_that_the_cut_divides_is_not_text_whatever_comes_behind_it() -> None:
    for rest in ('20 "/>', "20 <|end|>", ""):
        sequence = sequence_of(toy("pasta"), max_tokens=8)
        reader = sequence.reader()
        say(sequence, (), '<promise : 2 "/> <promise : ' + rest)
        assert taken(reader) == '<promise tokens=" 2 "/> <async>'
        say(sequence, (0,), "x </async>")
        assert [token.is_control for token in sequence.document()] == [*[True] * 5, False, True, True], rest


def test_reading_back_stops_at_the_cut_and_may_stop_anywhere() -> None:
    for max_tokens, said, expected in (
        (4, "a [Fork] [Child] x y <|end|> b <|end|>", "a [Fork] [Child] x"),
        (100, "a [Fork]", "a [Fork] [Child]"),
    ):
        sequence = sequence_of(toy("apar"), max_tokens=max_tokens)
        replay(sequence, ids(said))
        assert [token.token_id for token in sequence.document()] == ids(expected)
    for said, message in (("a [Fork] b", "instead of the forced token"), ("a <|end|> b", "follow the end")):
        with pytest.raises(ValueError, match=message):
            replay(sequence_of(toy("apar")), ids(said))


def test_the_metrics_of_apar() -> None:
    sequence = sequence_of(toy("apar"), prompt_length=10)
    say(sequence, (), "a [Fork] b c d <|end|>")  # steps 1 to 6
    say(sequence, (0,), "x y z <|end|>")  # [Child] at step 2, then 3 to 6
    # Attended, besides the prompt: a 0, x 3, y 4, z 5, b 2, c 3, d 4.
    # Before step 6 all is cached but what nobody sees any more: a [Fork] b c d, [Child] x y z.
    assert measure(sequence) == ThreadMetrics(
        threads=2, tokens=11, text_tokens=7, longest_chain=6, parallelism=7 / 6,
        attended_tokens=pytest.approx(10 + 21 / 7), attended_tokens_flat=10 + 3,
        max_cached_tokens=10 + 9, max_cached_tokens_flat=10 + 7,
    )  # fmt: skip


def test_in_the_metrics_pasta_joins_lie_on_the_chain() -> None:
    sequence = sequence_of(toy("pasta"), prompt_length=0)
    say(sequence, (), '<promise : 20 "/> <promise : 20 "/> <sync/>')  # steps 1 to 9
    say(sequence, (0,), "a b c d e f g </async>")  # <async> at step 4, then 5 to 12
    say(sequence, (1,), "h </async>")  # <async> at step 8, then 9 and 10
    say(sequence, (), "i <|end|>")  # the join enters at step 12, then 13 and 14
    metrics = measure(sequence)
    assert metrics.longest_chain == 14
    assert metrics.parallelism == 9 / 14
    assert metrics.max_cached_tokens == 8 + 9 + 3 + 2, "before the end token everything"
    assert theoretical_speedup(metrics, 28) == 2.0


def test_the_metrics_of_nothing() -> None:
    metrics = measure(sequence_of(toy("apar"), prompt_length=3))
    assert (metrics.threads, metrics.tokens, metrics.parallelism, metrics.max_cached_tokens) == (1, 0, 0.0, 3)
    assert theoretical_speedup(metrics, 5) == 0.0
