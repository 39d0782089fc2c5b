"""What readers get, and when."""

from __future__ import annotations

from support.toy_dialects import IDS, say, sequence_of, texts, toy

from pipedec.threads import DocumentToken, ReorderBuffer, Sequence


def taken(reader: ReorderBuffer) -> str:
    return texts(token.token_id for token in reader.take())


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


def test_nothing_is_handed_out_behind_the_cut() -> None:
    sequence = sequence_of(toy("apar"), max_tokens=5)
    reader = sequence.reader()
    say(sequence, (), "a [Fork] b c")
    say(sequence, (0,), "x <|end|>")
    assert taken(reader) == "a [Fork] [Child] x <|end|>"


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


def test_tokens_of_a_tag_become_certain_together() -> None:
    sequence = sequence_of(toy("pasta"))
    reader = sequence.reader()
    say(sequence, (), "a <promise :")
    assert taken(reader) == "a"
    say(sequence, (), '20 "/>')
    assert taken(reader) == '<promise tokens=" 20 "/> <async>'


def test_a_tag_that_the_cut_divides_is_not_text_whatever_comes_behind_it() -> None:
    for rest in ('20 "/>', "20 <|end|>", ""):
        sequence = sequence_of(toy("pasta"), max_tokens=8)
        reader = sequence.reader()
        say(sequence, (), '<promise : 2 "/> <promise : ' + rest)
        assert taken(reader) == '<promise tokens=" 2 "/> <async>'
        say(sequence, (0,), "x </async>")
        assert [token.is_control for token in sequence.document()] == [*[True] * 5, False, True, True], rest


def test_a_tag_that_is_none_is_text_up_to_the_cut() -> None:
    sequence = sequence_of(toy("pasta"), max_tokens=4)
    reader = sequence.reader()
    say(sequence, (), "<promise : 2 <sync/>")
    assert [token.is_control for token in reader.take()] == [True, False, False, True]
