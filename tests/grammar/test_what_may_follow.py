"""What may follow is a pure function of the tokens before it, and whoever goes where he may writes what the structure says."""

from __future__ import annotations

import json
import random
import re
from functools import lru_cache, partial
from typing import Any

import jsonschema_rs
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from msgspec.structs import replace
from support.examples import examples

from pipedec.core.errors import UserError
from pipedec.core.sampling import StructuredOutputs, ThoughtForm
from pipedec.directories import reference_pair
from pipedec.grammar import NOTHING, Bitmask, Grammar, Vocabulary
from pipedec.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer(reference_pair() / "target")
END, OTHER_END = 1, 2
MOST_TOKENS = 300


def _range(low: int, more: int) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": low + more}


def _enum(values: list[Any]) -> dict[str, Any]:
    return {"enum": values}


def _pair_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"$defs": {"it": schema}, "type": "array", "items": {"$ref": "#/$defs/it"}, "minItems": 2, "maxItems": 2}


names = st.sampled_from(["id", "name", "größe", "a b", "x/y", "~"])
leaves = st.one_of(
    st.builds(_range, st.integers(-50, 50), st.integers(0, 99)),
    st.lists(st.sampled_from(["red", "grün", 'say "hi"', 3, None, True, "re"]), min_size=1, max_size=3).map(_enum),
    st.sampled_from(
        [
            {"type": "boolean"}, {"type": "null"}, {"type": "string", "maxLength": 5}, {"const": {"a": [1, 2]}},
            {"type": "string", "pattern": "^[a-c]{1,3}-[0-9]+$"}, {"type": "string", "format": "date"},
            {"type": "number", "maximum": 1},
        ]
    ),
)  # fmt: skip


def _object(properties: dict[str, Any], num_required: int) -> dict[str, Any]:
    required = list(properties)[:num_required]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


without_references = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.builds(_object, st.dictionaries(names, inner, max_size=3), st.integers(0, 3)),
        st.builds(lambda of, most: {"type": "array", "items": of, "maxItems": most}, inner, st.integers(0, 3)),
        st.lists(inner, min_size=1, max_size=2).map(lambda of: {"anyOf": of}),
    ),
    max_leaves=4,
)
schemas = st.one_of(without_references, without_references.map(_pair_of))
patterns = st.recursive(
    st.sampled_from(["a", "bc", "[0-9]", "the ", "[a-f]{2,3}", "é", "\\."]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda both: f"({both[0]}|{both[1]})"),
        st.tuples(inner, st.sampled_from(["?", "*", "+", "{1,4}"])).map(lambda both: f"({both[0]}){both[1]}"),
    ),
    max_leaves=5,
)
texts = st.text(alphabet="ab eé\n\"'\\東", max_size=6)
of_schemas = schemas.map(lambda of: StructuredOutputs(json=of))
of_patterns = patterns.map(lambda of: StructuredOutputs(regex=of))
of_choices = st.lists(texts, min_size=1, max_size=4).map(lambda of: StructuredOutputs(choice=tuple(of)))
plain = st.one_of(of_schemas, of_patterns, of_choices)
thoughts = st.builds(
    ThoughtForm, st.sampled_from(["<Path>", "<think>", "a"]), st.sampled_from(["</Path>", "</think>", "aa\n"]), st.booleans(),
    st.booleans(), st.integers(0, 3), st.sampled_from(["", "<|user|>so<Path>"]), st.sampled_from([(), ("<async>",)]),
)  # fmt: skip
with_thoughts = st.builds(lambda of, thought: replace(of, thought=thought), plain, thoughts)
structures = st.one_of(plain, with_thoughts, thoughts.map(lambda thought: StructuredOutputs(thought=thought)))


@lru_cache(maxsize=1)
def vocabulary() -> Vocabulary:
    return Vocabulary(TOKENIZER, (END, OTHER_END))


def walked(grammar: Grammar, rng: random.Random) -> list[int]:
    """Tokens of an answer, drawn among those that are allowed, until it ends; it rather ends than goes on."""
    said: list[int] = []
    while len(said) < MOST_TOKENS and (allowed := list(grammar.allowed(said))):
        ends = [token for token in allowed if token in (END, OTHER_END)]
        said.append(rng.choice(ends) if ends and rng.random() < 0.7 else rng.choice(allowed))
    return said


def text_of(said: list[int]) -> str:
    return b"".join(TOKENIZER.token_bytes(token) for token in said[:-1]).decode()


def has_ended(said: list[int]) -> bool:
    return bool(said) and said[-1] in (END, OTHER_END)


@examples(200)
@given(structure=st.one_of(of_schemas, of_patterns), seed=st.integers(0, 10**6))
def test_any_walk_through_a_structure_is_what_it_says(structure: StructuredOutputs, seed: int) -> None:
    said = walked(vocabulary().grammar(structure), random.Random(seed))
    assume(has_ended(said))
    if structure.regex is not None:
        assert re.fullmatch(structure.regex, text_of(said))
    else:
        assert jsonschema_rs.validator_for(json.loads(str(structure.json))).is_valid(json.loads(text_of(said)))


@examples(100)
@given(choice=st.lists(texts, min_size=1, max_size=4), seed=st.integers(0, 10**6))
def test_a_choice_allows_what_begins_one_of_its_texts(choice: list[str], seed: int) -> None:
    grammar, said = vocabulary().grammar(StructuredOutputs(choice=tuple(choice))), list[int]()
    rng = random.Random(seed)
    while not has_ended(said):
        before = b"".join(map(TOKENIZER.token_bytes, said))
        begins = {token for token in _texts() if any(text.encode().startswith(before + _texts()[token]) for text in choice)}
        begins |= {END, OTHER_END} if before.decode(errors="replace") in choice else set()
        allowed = grammar.allowed(said)
        assert set(allowed) == begins or set(allowed) == set(grammar.forced(said, 1)) <= begins
        said.append(rng.choice(list(allowed)))
    assert text_of(said) in choice


@lru_cache(maxsize=1)
def _texts() -> dict[int, bytes]:
    """Of all tokens that are text."""
    own = range(len(TOKENIZER))
    return {token: TOKENIZER.token_bytes(token) for token in own if token not in TOKENIZER.all_special_ids}


@examples(60)
@given(structure=structures, seed=st.integers(0, 10**6), data=st.data())
def test_what_may_follow_depends_on_the_tokens_alone(structure: StructuredOutputs, seed: int, data: st.DataObject) -> None:
    said = walked(vocabulary().grammar(structure), random.Random(seed))
    one = vocabulary().grammar(structure)
    expected = {count: (one.allowed(said[:count]), one.forced(said[:count])) for count in range(len(said) + 1)}
    accepted = 0
    other = vocabulary().grammar(structure)
    for count in data.draw(st.lists(st.integers(0, len(said)), max_size=12)):
        if data.draw(st.booleans()) and accepted < count:
            step = data.draw(st.integers(accepted, count))
            other.consume(said[accepted:step])
            accepted = step
        if count >= accepted:
            stray = data.draw(st.integers(0, 4095))
            other.allowed([*said[accepted:count], stray, stray])
            assert (other.allowed(said[accepted:count]), other.forced(said[accepted:count])) == expected[count]
    resumed = vocabulary().grammar(structure)
    resumed.consume(said)
    assert (resumed.allowed(), resumed.forced()) == expected[len(said)]


@examples(60)
@given(structure=structures, seed=st.integers(0, 10**6))
def test_a_forced_chain_is_made_of_tokens_that_alone_may_follow(structure: StructuredOutputs, seed: int) -> None:
    grammar = vocabulary().grammar(structure)
    said = walked(grammar, random.Random(seed))
    for count in range(len(said) + 1):
        chain = grammar.forced(said[:count])
        for index, token in enumerate(chain):
            assert list(grammar.allowed([*said[:count], *chain[:index]])) == [token]
            assert grammar.forced([*said[:count], *chain[:index]], 1) == (token,)
        assert grammar.forced(said[:count], 2) == chain[:2]


def test_constants_of_a_schema_are_forced_with_the_blanks_of_json_dumps() -> None:
    grammar = vocabulary().grammar(StructuredOutputs(json=_object({"a": {"const": 1}, "b": {"const": [2, "x"]}}, 2)))
    chain = grammar.forced()
    assert chain[-1] == END
    assert text_of(list(chain)) == json.dumps({"a": 1, "b": [2, "x"]})
    assert grammar.forced(most=3) == chain[:3]


def test_behind_the_end_and_on_impossible_paths_nothing_is_allowed() -> None:
    grammar = vocabulary().grammar(StructuredOutputs(choice=("yes", "yes, sir", "no")))
    path = walked(grammar, random.Random(0))
    assert grammar.allowed(path) is NOTHING
    assert grammar.allowed([*path, END]) is NOTHING
    stray = next(token for token in range(4096) if token not in grammar.allowed())
    for wrong in ([stray], [stray, stray], [path[0], stray], [4096], [10**6]):
        assert (grammar.allowed(wrong), grammar.forced(wrong)) == (NOTHING, ())
    ended = vocabulary().grammar(StructuredOutputs(choice=("yes", "yes, sir", "no")))
    ended.consume(path)
    assert (ended.is_possible, ended.allowed(), ended.forced()) == (True, NOTHING, ())


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.failure_case("H30")
def test_an_answer_that_strays_from_its_structure_goes_on_no_further(is_known: bool) -> None:
    grammar = vocabulary().grammar(StructuredOutputs(choice=("yes", "yes, sir", "no")))
    stray = next(token for token in range(4096) if token not in grammar.allowed())
    if is_known:
        with pytest.raises(UserError, match="cannot go on"):
            grammar.consume([stray])
        return
    unasked = vocabulary().grammar(StructuredOutputs(choice=("yes", "yes, sir", "no")))
    unasked.consume([stray])
    assert not unasked.is_possible
    for ask in (unasked.allowed, unasked.forced):
        with pytest.raises(UserError, match="does not follow its structured_outputs"):
            ask()


@pytest.mark.failure_case("H30")
def test_where_a_structure_is_too_complex_the_answer_ends_with_an_error() -> None:
    words = " | ".join(f'"word" "{number} and more"' for number in range(12000))
    grammar = vocabulary().grammar(StructuredOutputs(grammar=f"start: {words}"))
    [word] = grammar.forced()
    assert TOKENIZER.decode([word]) == "word"
    assert grammar.allowed([word]) == NOTHING
    grammar.consume([word])
    for ask in (grammar.allowed, grammar.forced):
        with pytest.raises(UserError, match="too complex"):
            ask()
    with pytest.raises(UserError, match="too complex"):
        grammar.consume([END])


@pytest.mark.failure_case("H29")
def test_forced_text_is_tokenized_once() -> None:
    class Counted:
        calls = 0

        def __init__(self) -> None:
            self._matcher = vocabulary().matcher(StructuredOutputs(regex="a{10000}"))

        def compute_ff_tokens(self) -> list[int]:
            Counted.calls += 1
            return self._matcher.compute_ff_tokens()

        def __getattr__(self, name: str) -> Any:
            return getattr(self._matcher, name)

    grammar, said = Grammar(Counted, (END, OTHER_END)), list[int]()  # type: ignore[arg-type]
    while chain := grammar.forced():
        grammar.consume(chain)
        said += chain
    assert (text_of(said), said[-1]) == ("a" * 10000, END)
    assert Counted.calls <= 2


@pytest.mark.failure_case("H30")
def test_an_object_with_a_thousand_optional_properties_can_be_followed() -> None:
    schema = {"properties": {f"p{n}": {"const": n} for n in range(1000)}, "additionalProperties": False, "type": "object"}
    grammar = vocabulary().grammar(StructuredOutputs(json=schema))
    grammar.consume(TOKENIZER.encode('{"p7": 7, "p900": 900', add_special_tokens=False))
    assert grammar.is_possible and set(grammar.allowed(TOKENIZER.encode("}", add_special_tokens=False))) == {END}


@pytest.mark.parametrize("text", ["<|user|>", "a <|end|><b>", "[Fork]é"])
@pytest.mark.failure_case("H31")
def test_text_that_looks_like_a_special_token_is_written_as_text(text: str) -> None:
    for structure in (StructuredOutputs(choice=(text,)), StructuredOutputs(json={"const": text})):
        said = walked(vocabulary().grammar(structure), random.Random(0))
        assert has_ended(said)
        assert text_of(said) == (text if structure.choice else json.dumps(text, ensure_ascii=False))
        assert TOKENIZER.all_special_ids.isdisjoint(said[:-1])


def test_no_text_is_forced_as_a_token_that_the_model_lacks() -> None:
    """As "[Fork]", which was added to the tokenizer."""
    lacking = TOKENIZER.token_id("[Fork]")
    assert lacking is not None
    grammar = Vocabulary(TOKENIZER, (END,), vocab_size=lacking).grammar(StructuredOutputs(choice=("[Fork]é",)))
    forced = list(grammar.forced())
    assert text_of(forced) == "[Fork]é" and lacking not in forced


def test_a_model_with_several_end_tokens_may_end_with_any() -> None:
    grammar = vocabulary().grammar(StructuredOutputs(regex="a?"))
    assert {END, OTHER_END} < set(grammar.allowed())
    assert grammar.allowed([OTHER_END]) is NOTHING


def test_the_states_that_are_kept_are_bounded() -> None:
    matcher = partial(vocabulary().matcher, StructuredOutputs(regex="[ -~]*"))
    few, many = (Grammar(matcher, (END, OTHER_END), max_states) for max_states in (50, 10**6))
    paths = [[token, other] for token in list(few.allowed())[3:30] for other in (96, 97, 98)]
    for path in paths:
        assert few.allowed(path) == many.allowed(path)
        assert few.num_states <= 50 + 3
    assert many.num_states > 100


def test_nothing_is_parsed_before_somebody_asks() -> None:
    def refuse() -> Any:
        raise AssertionError("nobody has asked")

    Grammar(refuse, (END,)).consume([5, 6, 7])


@given(st.sets(st.integers(0, 5000), max_size=20), st.integers(0, 6000))
def test_a_bitmask_is_a_set(tokens: set[int], token: int) -> None:
    mask = Bitmask.of(*tokens)
    assert (list(mask), token in mask) == (sorted(tokens), token in tokens)
    assert -1 not in mask
