"""An answer thinks in free text, for as many tokens as it may; then comes what its structure asks for, and nothing else."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from pipedec.core.errors import UserError
from pipedec.core.sampling import StructuredOutputs, ThoughtForm
from pipedec.directories import reference_pair
from pipedec.grammar import NOTHING, Grammar, Vocabulary, check
from pipedec.grammar.apart import check_apart
from pipedec.grammar.thought import MAX_NEWLINES
from pipedec.text.tokenizer import Tokenizer

TARGET = reference_pair() / "target"
END = 1
THINK, END_THINK = 4096, 4097  # where a tokenizer has them
ADDED = ("<think>", "</think>")
TEXT_MARKS = ThoughtForm("<think>", "</think>", is_open=True)  # the target has no such tokens
HARMONY = ThoughtForm(
    "<|system|>analysis<|pad|>", "<Path>", is_optional=False, max_tokens=3, before="<|begin|>assistant<|system|>final<|pad|>"
)


@pytest.fixture(params=["special", "not special"])
def added(request: pytest.FixtureRequest, tmp_path: Path) -> Tokenizer:
    """The target's tokenizer with tokens for the marks."""
    shutil.copytree(TARGET, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors"))
    document = json.loads((tmp_path / "tokenizer.json").read_text())
    flags = {**document["added_tokens"][0], "special": request.param == "special"}
    document["added_tokens"] += [flags | {"id": THINK + index, "content": mark} for index, mark in enumerate(ADDED)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    return Tokenizer(tmp_path)


@cache
def target() -> Tokenizer:
    return Tokenizer(TARGET)


@cache
def vocabulary() -> Vocabulary:
    return Vocabulary(target(), (END,))


def ids(text: str, tokenizer: Tokenizer | None = None) -> list[int]:
    return (tokenizer or target()).encode(text, add_special_tokens=False)


def text_of(token_ids: list[int] | tuple[int, ...], tokenizer: Tokenizer | None = None) -> str:
    return (tokenizer or target()).decode(token_ids, skip_special_tokens=False)


def grammar_of(thought: ThoughtForm, among: Vocabulary | None = None, **structure: Any) -> Grammar:
    return (among or vocabulary()).grammar(StructuredOutputs(thought=thought, **structure))


def random_answers(grammar: Grammar, count: int = 20, most: int = 60) -> Iterator[list[int]]:
    rng = random.Random(0)
    for _ in range(count):
        answer: list[int] = []
        while len(answer) < most and (allowed := list(grammar.allowed(answer))):
            answer.append(rng.choice(allowed))
        yield answer


def test_marks_that_are_tokens_are_written_as_these_and_in_no_other_way(added: Tokenizer) -> None:
    among = Vocabulary(added, (END,))
    grammar = grammar_of(ThoughtForm(*ADDED, max_tokens=3), among, choice=("yes",))
    assert THINK in grammar.allowed() and ids("yes")[0] in grammar.allowed()
    for answer in random_answers(grammar):
        thought = re.fullmatch(r"(<think>(.*)</think>(\n{0,2}))?yes<\|end\|>", text_of(answer, added), re.DOTALL)
        assert thought is not None
        if thought[1]:
            assert answer[0] == THINK and answer.index(END_THINK) <= 4
            assert THINK not in answer[answer.index(END_THINK) :]
    pieces = ids("</think>")
    assert END_THINK not in pieces
    inside = [THINK, *pieces[:-1]]
    wide = grammar_of(ThoughtForm(*ADDED), among, choice=("yes",))
    assert END_THINK in wide.allowed(inside) and pieces[-1] not in wide.allowed(inside)


def naive(said: bytes, token: int, end: str) -> bool:
    """Whether a token may follow in a thought that text ends."""
    text = target().token_bytes(token)
    if token in target().all_special_ids or text == b"\xff":  # which is no part of any character
        return False
    _, mark, rest = (said + text).partition(end.encode())
    return not mark or rest in (b"", b"\n", b"\n\n")


@pytest.mark.parametrize("said", ["", "so", "so <", "so </", "</thi", "</think", "<</think", "</ think", "é"])
def test_in_a_thought_any_text_may_follow_up_to_its_end(said: str) -> None:
    grammar = grammar_of(TEXT_MARKS, choice=("yes",))
    allowed = grammar.allowed(ids(said))
    assert set(allowed) == {token for token in range(4096) if naive(said.encode(), token, "</think>")}
    assert END not in allowed
    grammar.consume(ids(said))
    assert grammar.allowed() == allowed


def test_a_few_newlines_may_stand_before_the_structure() -> None:
    grammar, [no], [newline] = grammar_of(TEXT_MARKS, choice=("no",)), ids("no"), ids("\n")
    for count in range(MAX_NEWLINES + 2):
        path = [*ids("so</think>"), *[newline] * count]
        assert (no in grammar.allowed(path)) == (count <= MAX_NEWLINES)
        assert (newline in grammar.allowed(path)) == (count < MAX_NEWLINES)


def test_a_token_may_have_the_last_of_a_mark_and_newlines_after_it() -> None:
    form, [no], [newline], [both] = ThoughtForm("x", "Done.\n", is_open=True), ids("no"), ids("\n"), ids("\n\n")
    grammar = grammar_of(form, choice=("no",))
    done = ids("So. Done.")
    assert set(grammar.allowed([*done, both])) == {no, newline}
    assert [newline in grammar.allowed([*done, both, *more]) for more in ([], [newline])] == [True, False]
    assert both not in grammar_of(replace(form, before="So:"), choice=("no",)).allowed(done)


@pytest.mark.parametrize("budget", [0, 1, 5])
@pytest.mark.parametrize("marks", [("<Path>", "</Path>"), ADDED])
def test_when_the_budget_is_used_up_the_end_of_the_thought_is_forced(budget: int, marks: tuple[str, str]) -> None:
    grammar = grammar_of(ThoughtForm(*marks, is_optional=False, max_tokens=budget), json={"const": 1})
    begin, end = map(ids, marks)
    assert list(grammar.forced(most=len(begin))) == begin
    for answer in random_answers(grammar):
        assert re.fullmatch(rf"{marks[0]}.*{marks[1]}\n{{0,2}}1<\|end\|>", text_of(answer), re.DOTALL)
        assert len(answer) <= len(begin) + budget + len(end) + MAX_NEWLINES + 2
    words = ids(" a b c d e f g h")[:budget]
    assert list(grammar.forced([*begin, *words])) == end
    assert grammar.allowed([*begin, *words, 100]) is NOTHING


def test_a_forced_end_goes_on_where_the_text_of_the_mark_has_begun() -> None:
    grammar = grammar_of(ThoughtForm(*ADDED, is_open=True, max_tokens=2), choice=("yes",))
    begun = [*ids("</"), *ids("th")]
    assert len(begun) == 2
    assert text_of(grammar.forced(begun)) == "ink>"
    assert ids("yes")[0] in grammar.allowed([*begun, *grammar.forced(begun)])


def test_what_stands_before_the_structure_is_forced_with_its_tokens() -> None:
    grammar = grammar_of(HARMONY, choice=("yes",))
    thought = ids(" a b c")
    opening = grammar.forced()
    assert text_of(opening) == HARMONY.begin
    closing = grammar.forced([*opening, *thought])
    assert text_of(closing) == f"{HARMONY.end}{HARMONY.before}yes<|end|>"
    names = [target().token_id(name) for name in ("<Path>", "<|begin|>", "<|system|>", "<|pad|>")]
    assert [token for token in closing if token in target().all_special_ids] == [*names, END]
    chosen = [*opening, thought[0], closing[0]]
    assert grammar.forced(chosen) == closing[1:]


def test_an_optional_thought_may_be_left_out_whichever_tokens_its_mark_shares_with_the_structure() -> None:
    thought = ThoughtForm("<think>", "</think>", max_tokens=2)
    mark = ids("<think>")
    assert len(mark) > 1
    shared = grammar_of(thought, choice=("<thanks>", "<th"))
    assert shared.allowed(mark[:1]) and mark[1] in shared.allowed(mark[:1])
    assert END in shared.allowed(ids("<th"))
    shared.consume(mark[:1])
    assert shared.is_possible and set(shared.allowed()) > {mark[1]}
    alone = grammar_of(thought, choice=("<a",))
    assert alone.forced(mark[:1]) == ()
    assert alone.forced(mark[:2]) == tuple(mark[2:])


def test_a_newline_that_begins_the_structure_belongs_to_it() -> None:
    grammar = grammar_of(ThoughtForm("<Path>", "</Path>", is_open=True), regex="\n\n?a")
    end, newline = ids("</Path>"), ids("\n")
    assert set(grammar.allowed([*end, *newline])) == set(ids("\n") + ids("a"))
    assert set(grammar.allowed([*end, *newline, *newline])) == set(ids("a"))


def test_after_a_thought_with_a_budget_free_text_follows_with_the_marks_that_it_may_have() -> None:
    form = ThoughtForm("<Path>", "</Path>", max_tokens=1, marks=("<async>", "</async>", "[Fork]", "no token"))
    grammar = grammar_of(form)
    texts = set(range(4096)) - target().all_special_ids
    marks = {target().token_id(name) for name in form.marks[:-1]}
    begin, end = ids("<Path></Path>")
    assert set(grammar.allowed()) <= texts | marks | {END, begin}
    assert {*ids("Hello, world!"), *marks, END, begin} < set(grammar.allowed())
    after = [begin, 100, end]
    assert begin not in grammar.allowed(after)
    assert grammar.allowed([*after, *ids("Hi"), *ids("<async>")]) == grammar.allowed(after)
    without = grammar_of(ThoughtForm("<Path>", "</Path>", max_tokens=1))
    assert set(without.allowed(after)) == set(grammar.allowed(after)) - marks
    without.consume([*after, *ids("Hi"), END])
    assert without.is_possible and without.allowed() is NOTHING


def test_what_strays_from_the_form_of_a_thought_goes_on_no_further() -> None:
    wrong = [[100], [*ids("<Path>"), 100, 100], [*ids("<Path>"), END], [*ids("<Path>"), *ids("<Path>")]]
    for path in wrong:
        grammar = grammar_of(ThoughtForm("<Path>", "</Path>", max_tokens=1, is_optional=False), choice=("yes",))
        assert (grammar.allowed(path), grammar.forced(path)) == (NOTHING, ())
        with pytest.raises(UserError, match="cannot go on"):
            grammar.consume(path)
        assert not grammar.is_possible
        with pytest.raises(UserError, match="does not follow its structured_outputs"):
            grammar.allowed()


def test_nothing_is_read_before_the_first_question_and_a_thought_keeps_no_states() -> None:
    grammar = grammar_of(ThoughtForm("<Path>", "</Path>", is_open=True, max_tokens=10**6), choice=("yes",))
    grammar.consume([100] * 5000)
    assert {id(grammar.allowed([100] * length)) for length in range(50)} == {id(grammar.allowed())}
    assert grammar.num_states == 0


CHECKED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"end": "<|end|>"}, {}, "structured_outputs.thought.end: this mark has an end token of the model"),
    ({"before": "x<|end|>"}, {}, "structured_outputs.thought.before: this mark"),
    ({}, {"regex": "(a"}, "structured_outputs.regex: invalid regex"),
]


@pytest.mark.parametrize(("form", "structure", "message"), CHECKED)
def test_thoughts_are_checked_with_their_structures(form: dict[str, Any], structure: dict[str, Any], message: str) -> None:
    thought = ThoughtForm(**{"begin": "<Path>", "end": "</Path>", "max_tokens": 3} | form)
    for checked in (vocabulary().check, lambda structure: check_apart(structure, TARGET)):
        with pytest.raises(UserError) as caught:
            checked(StructuredOutputs(thought=thought, **structure))
        assert str(caught.value).startswith(message)
    right = StructuredOutputs(thought=ThoughtForm("<Path>", "</Path>", max_tokens=3))
    check(right)
    vocabulary().check(right)
    check_apart(right, TARGET)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_tokens": -1}, "structured_outputs.thought.max_tokens: must be an integer"),
        ({"begin": ""}, "structured_outputs.thought.begin: must be a string (length at most 256, not empty)"),
        ({"end": "x" * 257}, "structured_outputs.thought.end: must be a string"),
        ({"before": "x" * 257}, "structured_outputs.thought.before: must be a string"),
        ({"marks": ("",)}, "structured_outputs.thought.marks[0]: must be a string"),
        ({"marks": ("x",) * 65}, "structured_outputs.thought.marks: must be a list"),
    ],
)
def test_the_form_of_a_thought_has_limits(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as caught:
        ThoughtForm(**{"begin": "<think>", "end": "</think>"} | given)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_without_a_structure_a_thought_has_a_budget() -> None:
    with pytest.raises(UserError, match="must have one of"):
        StructuredOutputs(thought=ThoughtForm("<think>", "</think>"))
    assert StructuredOutputs(thought=ThoughtForm("<think>", "</think>", max_tokens=0)).kind == "thought"
