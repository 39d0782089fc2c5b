"""Dialect files, shipped and one's own, and what they become in a tokenizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.toy_dialects import IDS, TEXTS, toy
from tokenizers import Tokenizer

from pipedec.core.errors import UserError
from pipedec.directories import reference_pair
from pipedec.threads import DIALECTS, Dialect, Start, ThreadedSequence, bind, load_dialect

MINIMAL = {"name": "mine", "opener": "[Fork]", "child_start": "[Child]"}


def write(tmp_path: Path, content: dict[str, Any] | str) -> Path:
    path = tmp_path / "mine.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(reference_pair() / "target" / "tokenizer.json"))


@pytest.mark.parametrize("name", DIALECTS)
def test_the_shipped_tokenizer_has_the_tokens_of_the_shipped_dialects(name: str, tokenizer: Tokenizer) -> None:
    bound = bind(load_dialect(name), tokenizer.token_to_id, lambda token: tokenizer.decode([token], skip_special_tokens=False))
    assert bound.dialect.name == name
    assert tokenizer.id_to_token(bound.child_start) == bound.dialect.child_start
    assert bound.child_start in bound.never_sampled
    assert {tokenizer.id_to_token(token) for token in bound.control} == set(bound.dialect.control_tokens)


def test_a_promise_in_the_shipped_tokenizer_opens_at_its_last_token(tokenizer: Tokenizer) -> None:
    dialect = load_dialect("pasta")
    bound = bind(dialect, tokenizer.token_to_id, lambda token: tokenizer.decode([token], skip_special_tokens=False))
    sequence = ThreadedSequence(bound, 5, (1,), 100)
    tag = tokenizer.encode('<promise topic="the recipe" tokens="20"/>', add_special_tokens=False).ids
    assert [sequence.accept_token(0, token) for token in tag] == [*[[]] * (len(tag) - 1), [Start(1, bound.child_start)]]
    assert sequence.threads[1].positions == [5 + len(tag)]
    assert sequence.threads[0].next_position == 5 + len(tag) + 20


def test_published_names_are_a_file_away(tmp_path: Path) -> None:
    mine = {**MINIMAL, "name": "released", "opener": "[SplitMask]", "child_start": "[SplitSop]", "max_depth": 2}
    dialect = load_dialect(write(tmp_path, mine))
    assert (dialect.opener, dialect.child_start, dialect.max_depth) == ("[SplitMask]", "[SplitSop]", 2)
    with pytest.raises(UserError, match=r"no token '\[SplitMask\]', which dialect released needs"):
        bind(dialect, IDS.get, TEXTS.__getitem__)


def test_one_id_for_two_tokens_is_refused() -> None:
    with pytest.raises(UserError, match="two control tokens of dialect apar the same id"):
        bind(load_dialect("apar"), lambda text: 0, TEXTS.__getitem__)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"opner": "x"}, r"unknown key 'opner': did you mean opener\?"),
        ({"opener": 3}, r"opener: must be a string \(not empty\), not an integer: quote it"),
        ({"child_start": ""}, r"child_start: must be a string \(not empty\), not ''"),
        ({"max_depth": 0}, r"max_depth: must be an integer \(at least 1\), not 0"),
        ({"max_child_tokens": 1}, r"max_child_tokens: must be an integer \(at least 2\), not 1"),
        ({"max_children": True}, r"max_children: must be an integer \(at least 1\), not True"),
        ({"after_join": "back"}, "after_join: must be one of continue, longest, flat, not 'back'"),
        ({"child_start": "[Fork]"}, "must be different tokens"),
        ({"length_pattern": r"(\d+)"}, "length_pattern needs opener_end"),
        ({"opener_end": "/>", "length_pattern": "("}, "must be a regular expression with one group"),
        ({"opener_end": "/>", "length_pattern": r"\d+"}, "must be a regular expression with one group"),
        ({"opener_form": " {topic}/>"}, "opener_form must end with opener_end"),
        ({"opener_end": "/>", "opener_form": " {topic}"}, "opener_form must end with opener_end"),
        ({"opener_end": "/>", "opener_form": " {subject}/>"}, r"nothing in braces but \{topic\} and \{tokens\}"),
        ({"opener_end": "/>", "opener_form": " {/>"}, "opener_form must end with opener_end"),
        ({"default_length": 50, "max_length": 40}, "default_length must be at most max_length, which is 40"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", r"must be a mapping, not \[\]"),
        ('{"name": "a"}', "opener: missing"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_that_names_it(tmp_path: Path, change: Any, message: str) -> None:
    path = write(tmp_path, change if isinstance(change, str) else {**MINIMAL, **change})
    with pytest.raises(UserError, match=message) as raised:
        load_dialect(path)
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


def test_no_such_dialect_and_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown dialect 'aper': give one of apar, pasta, parallel, or the path"):
        load_dialect("aper")
    with pytest.raises(UserError, match="no such file"):
        load_dialect(tmp_path / "none.json")


def test_parts_of_tags_are_single_tokens_if_the_tokenizer_has_them() -> None:
    bound = toy("pasta", opener_tokens=(' topic="', '" tokens="30"/>'))
    assert bound.opener_tokens == {' topic="': IDS[' topic="']}, "the other one is spelled out"
    assert IDS[' topic="'] in bound.control, "outside of a tag it is no text either"


@pytest.mark.parametrize(
    ("text", "length"),
    [
        (' tokens="20"/>', 20), (" tokens = '7'/>", 7), (" tokens=12/>", 12), (' topic="x"/>', None), (' tokens=""/>', None),
        (' tokens="-3"/>', None), (' tokens="' + "9" * 5000 + '"/>', 10**9),
    ],
)  # fmt: skip
def test_the_length_that_a_promise_states(text: str, length: int | None) -> None:
    assert toy("pasta").stated_length(text) == length
    assert toy("pasta", length_scale=10).stated_length(' tokens="2"/>') == 20


@pytest.mark.parametrize("name", DIALECTS)
def test_a_dialect_arrives_in_files_and_other_processes_as_it_was(tmp_path: Path, name: str) -> None:
    dialect = replace(load_dialect(name), markers=("<x>",), max_children=3, show_control=True)
    assert Dialect.from_json(dialect.to_json()) == load_dialect(write(tmp_path, dialect.to_json())) == dialect


@pytest.mark.parametrize("text", ["", "[]", '{"name": "x"}', '{"name": "x", "opener": "a", "child_start": "a"}'])
def test_a_text_that_is_no_dialect_is_refused(text: str) -> None:
    with pytest.raises(UserError) as refused:
        Dialect.from_json(text)
    assert "\n" not in str(refused.value)
