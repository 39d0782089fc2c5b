"""The text of an answer: which special tokens it shows, where stop strings and end tokens end it, and what has ended it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.tiny_pair import CONTEXT
from test_tokenizer import KINDS, TEXTS, directories
from transformers import AutoTokenizer

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.text.answer_text import AnswerText
from pipedec.text.prompt import Prompter
from pipedec.text.tokenizer import Tokenizer

__all__ = ["directories"]  # a fixture
END, USER, ASSISTANT = 2, 3, 4
Told = tuple[str, int | None, str | int | None]  # the text, number of tokens if a stop string ended it, stop reason


@pytest.fixture(scope="module")
def prompter(tokenizer_files: Path) -> Prompter:
    return Prompter(tokenizer_files, CONTEXT)


@pytest.fixture(scope="module", params=[kind for kind in KINDS if kind != "cleaned"])  # which takes spaces back
def both(request: pytest.FixtureRequest, directories: dict[str, Path]) -> tuple[Tokenizer, Any]:
    """Ours, and that of transformers."""
    return Tokenizer(directories[request.param]), AutoTokenizer.from_pretrained(directories[request.param])


def told(tokenizer: Tokenizer, token_ids: Sequence[int], size: int = 1, ends: bool = False, **params: Any) -> Told:
    """The text when tokens arrive in bursts of ``size``. ``ends``: the last one is an end token or a stop token."""
    answer, text = AnswerText(tokenizer, SamplingParams(**params)), ""
    for start in range(0, len(token_ids), size):
        places = range(start, min(start + size, len(token_ids)))
        pieces = [(token_ids[place], answer.piece(token_ids[place], ends and place == len(token_ids) - 1)) for place in places]
        final, count = answer.add_pieces(pieces)
        text += final
        if count is not None:
            return text, start + count, answer.stop_reason
    return text + answer.finish(), None, answer.stop_reason


def shown(tokenizer: Tokenizer, token_ids: Sequence[int], skip: bool, names: Sequence[int]) -> str:
    """By the definition."""
    hidden = tokenizer.all_special_ids - set(names) if skip else frozenset()
    return tokenizer.decode([token for token in token_ids if token not in hidden], skip_special_tokens=False)


@examples(60)
@given(data=st.data(), skip=st.booleans(), size=st.integers(1, 4))
def test_special_tokens_are_text_where_they_are_shown(
    both: tuple[Tokenizer, Any], data: st.DataObject, skip: bool, size: int
) -> None:
    """In every tokenizer, streamed in bursts or decoded at once."""
    tokenizer, theirs = both
    special = st.sampled_from(sorted(tokenizer.all_special_ids))
    parts = data.draw(st.lists(special | TEXTS, max_size=6))
    token_ids = [token for part in parts for token in ([part] if isinstance(part, int) else tokenizer.encode(part, False))]
    names = data.draw(st.lists(special, max_size=3))
    text = told(tokenizer, token_ids, size, skip_special_tokens=skip, shown_special_tokens=tuple(names))[0]
    assert text == shown(tokenizer, token_ids, skip, names)
    if not (skip and names):
        assert text == theirs.decode(token_ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<|user|><|assistant|>b"),
        ({"shown_special_tokens": (USER,)}, "a<|user|>b"),
        ({"include_stop_str_in_output": True}, "ab"),
        ({"include_stop_str_in_output": True, "shown_special_tokens": (END, ASSISTANT)}, "a<|assistant|>b</s>"),
        ({"include_stop_str_in_output": True, "skip_special_tokens": False}, "a<|user|><|assistant|>b</s>"),
    ],
)
def test_the_end_token_is_text_if_the_output_includes_it_and_it_is_shown(
    prompter: Prompter, params: dict[str, Any], text: str
) -> None:
    token_ids = prompter.tokenizer.encode("a<|user|><|assistant|>b</s>")
    assert told(prompter.tokenizer, token_ids, ends=True, **params) == (text, None, None)
    whole = prompter.text(token_ids[:-1], SamplingParams(**params))
    assert whole == text.removesuffix("</s>")


@pytest.mark.parametrize(("includes", "text"), [(False, "ab"), (True, "abc")])
def test_a_stop_token_is_text_if_the_output_includes_it_and_the_reason_of_the_end(
    prompter: Prompter, includes: bool, text: str
) -> None:
    token_ids = prompter.tokenizer.encode("abc")
    params = {"stop_token_ids": (7, token_ids[-1]), "include_stop_str_in_output": includes}
    assert told(prompter.tokenizer, token_ids, ends=True, **params) == (text, None, token_ids[-1])


@pytest.mark.parametrize("size", [1, 2, 9])
@pytest.mark.parametrize(
    ("answer", "stop", "params", "expected"),
    [
        ("ab<|user|>cd", ["<|user|>"], {"skip_special_tokens": False}, ("ab", 3, "<|user|>")),
        ("ab<|user|>cd", ["b<|user|>c"], {"shown_special_tokens": (USER,)}, ("a", 4, "b<|user|>c")),
        ("ab<|user|>cd", ["bc", "user"], {"skip_special_tokens": False}, ("ab<|", 3, "user")),
        ("ab<|user|>cd", ["bc"], {"shown_special_tokens": (USER,)}, ("ab<|user|>cd", None, None)),
        ("a<|user|>b<|assistant|>", ["|>b<|assistant|>"], {"shown_special_tokens": (USER,)}, ("a<|user", 4, "|>b<|assistant|>")),
        ("ab<|user|>cd", ["d", "bc"], {}, ("a", 4, "bc")),
        ("ab<|user|>cd", ["bc"], {"include_stop_str_in_output": True}, ("abc", 4, "bc")),
        ("ab<|user|>cd", ["b<|user|>c"], {"include_stop_str_in_output": True}, ("ab<|user|>c", 4, "b<|user|>c")),
        ("abab<|user|>ab<|user|>", ["ab", "b<|user|>"], {"min_tokens": 3}, ("ab", 4, "ab")),
        ("abab<|user|>ab<|user|>", ["ab", "b<|user|>"], {"min_tokens": 4}, ("aba", 5, "b<|user|>")),
        ("abab<|user|>ab<|user|>", ["ab", "b<|user|>"], {"min_tokens": 5}, ("abab", 7, "ab")),
        ("abab<|user|>ab<|user|>", ["b<|user|>"], {"min_tokens": 7}, ("ababa", 8, "b<|user|>")),
        ("abab<|user|>ab<|user|>", ["ab", "b<|user|>"], {"min_tokens": 8}, ("ababab", None, None)),
    ],
)  # fmt: skip
def test_stop_strings_end_the_text_that_is_shown(
    prompter: Prompter, answer: str, stop: list[str], params: dict[str, Any], expected: Told, size: int
) -> None:
    assert told(prompter.tokenizer, prompter.tokenizer.encode(answer), size, stop=stop, **params) == expected


@examples(200)
@given(
    text=st.text("abé ", max_size=40), stop=st.lists(st.text("abé ", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 5), min_tokens=st.integers(0, 12), includes=st.booleans(),
)  # fmt: skip
def test_an_answer_ends_at_the_first_stop_string_that_is_complete_after_min_tokens(
    prompter: Prompter, text: str, stop: list[str], size: int, min_tokens: int, includes: bool
) -> None:
    token_ids = prompter.tokenizer.encode(text)
    heard = [prompter.text(token_ids[:count]).rstrip("\ufffd") for count in range(len(token_ids) + 1)]
    early = len(heard[min(min_tokens, len(token_ids))])
    expected: Told = text, None, None
    for count in range(min_tokens + 1, len(token_ids) + 1):
        ends = [
            (start, len(one), one)
            for one in stop
            for start in range(len(heard[count]))
            if heard[count].startswith(one, start) and start + len(one) > early
        ]
        if ends:
            start, length, found = min(ends)
            expected = heard[count][: start + length * includes], count, found
            break
    params = {"stop": stop, "min_tokens": min_tokens, "include_stop_str_in_output": includes}
    assert told(prompter.tokenizer, token_ids, size, **params) == expected


def test_shown_tokens_must_be_the_models(prompter: Prompter) -> None:
    prompter.check(SamplingParams(shown_special_tokens=(0, 299)))
    with pytest.raises(UserError, match="shown_special_tokens names token 300, but the vocabulary has 300 tokens"):
        prompter.check(SamplingParams(shown_special_tokens=(300,)))
    with pytest.raises(UserError, match="shown_special_tokens must have at most 300 tokens"):
        prompter.check(SamplingParams(shown_special_tokens=(5,) * 301))
