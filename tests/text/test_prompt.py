"""Tokenizing prompts and streaming text: chat templates, stop strings, limits, and tokenizers that differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import examples
from support.tiny_pair import CHAT_TEMPLATE, CONTEXT, foreign_tokenizer
from transformers import AutoTokenizer

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams
from pipedec.text.prompt import Prompter, end_token_ids, fits_vocabulary, same_tokenizer
from pipedec.text.stream import StopStrings

TEXT = "Größe: naïve café, Ελλάδα, 東京, \U0001f680\U0001f468\u200d\U0001f469\u200d\U0001f467 — twice: 12 + 12 = 24.\n\n  Done."


@pytest.fixture(scope="session")
def prompter(tokenizer_files: Path) -> Prompter:
    return Prompter(tokenizer_files, CONTEXT)


def streamed(prompter: Prompter, token_ids: list[int], sizes: list[int]) -> list[str]:
    """The pieces of text when tokens arrive in bursts of these sizes, repeated."""
    stream, pieces, start = prompter.stream(), [], 0
    while start < len(token_ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream.add(token_ids[start : start + size]))
        start += size
    return [*pieces, stream.finish()]


@given(text=st.text(max_size=60), sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_streamed_text_never_splits_a_character(prompter: Prompter, text: str, sizes: list[int]) -> None:
    token_ids = prompter.tokenizer.encode(text)
    pieces = streamed(prompter, token_ids, sizes)
    assert "".join(pieces) == prompter.text(token_ids)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@given(token_ids=st.lists(st.integers(0, 299), max_size=40), sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_the_pieces_of_any_tokens_make_the_whole_text(prompter: Prompter, token_ids: list[int], sizes: list[int]) -> None:
    """Including incomplete characters and special tokens in any order."""
    assert "".join(streamed(prompter, token_ids, sizes)) == prompter.text(token_ids)


def test_text_is_returned_as_soon_as_it_is_final(prompter: Prompter) -> None:
    pieces = streamed(prompter, prompter.tokenizer.encode(TEXT), [1])
    assert "".join(pieces) == TEXT and pieces[-1] == ""
    held_back = sum(piece == "" for piece in pieces[:-1])
    assert 0 < held_back < len(pieces) / 2, "only text that may end in an incomplete character"
    assert streamed(prompter, prompter.tokenizer.encode("a\U0001f680")[:-1], [1])[-1].endswith("\ufffd"), (
        "at the end it is returned"
    )


def test_the_chat_template_wraps_the_prompt_unless_it_is_raw(prompter: Prompter, tokenizer_files: Path, tmp_path: Path) -> None:
    chat = prompter.token_ids("How many?", raw=False, max_tokens=1)
    raw = prompter.token_ids("How many?", raw=True, max_tokens=1)
    user, assistant = map(prompter.tokenizer.token_id, ["<|user|>", "<|assistant|>"])
    assert chat == (user, *raw, assistant)
    assert list(raw) == prompter.tokenizer.encode("How many?")
    assert prompter.token_ids((5, 0, 5), raw=False, max_tokens=1) == (5, 0, 5), "token ids are taken as they are"
    shutil.copy(tokenizer_files / "tokenizer.json", tmp_path)
    assert Prompter(tmp_path, CONTEXT).token_ids("How many?", raw=False, max_tokens=1) == raw, "without a template"


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ((), "the prompt is empty: give at least one token id"),
        ((1, -1), "the prompt names token -1, but the vocabulary has 300 tokens"),
        ((1, 10**6, 2), "the prompt names token 1000000, but the vocabulary has 300 tokens"),
        ((1,) * CONTEXT, f"the prompt has {CONTEXT} tokens and --max-tokens asks for 1 more"),
    ],
    ids=["none", "negative", "not in the vocabulary", "too many"],
)
def test_token_ids_that_are_no_prompt(prompter: Prompter, token_ids: tuple[int, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        prompter.token_ids(token_ids, raw=True, max_tokens=1)


def stopped(prompter: Prompter, token_ids: list[int], stop: list[str], size: int, **params: Any) -> tuple[list[str], int | None]:
    """The pieces of text when tokens arrive in bursts of ``size``, and the answer's length if a stop string ends it."""
    answer, pieces = prompter.answer_text(SamplingParams(stop=tuple(stop), **params)), []
    for start in range(0, len(token_ids), size):
        text, count = answer.add_pieces((token, answer.piece(token)) for token in token_ids[start : start + size])
        pieces.append(text)
        if count is not None:
            return pieces, start + count
    return [*pieces, answer.finish()], None


@examples(300)
@given(
    text=st.text("abé ", max_size=40),
    stop=st.lists(st.text("abé ", min_size=1, max_size=4), min_size=1, max_size=3),
    size=st.integers(1, 5),
)
def test_an_answer_ends_where_the_first_stop_string_begins(prompter: Prompter, text: str, stop: list[str], size: int) -> None:
    token_ids = prompter.tokenizer.encode(text)
    pieces, count = stopped(prompter, token_ids, stop, size)
    heard = [text_so_far(prompter, token_ids[:number]) for number in range(len(token_ids) + 1)]
    expected = next((number for number, said in enumerate(heard) if any(one in said for one in stop)), None)
    assert count == expected
    if count is None:
        assert "".join(pieces) == text
    else:
        assert "".join(pieces) == text[: min(place for one in stop if (place := heard[count].find(one)) >= 0)]


def text_so_far(prompter: Prompter, token_ids: list[int]) -> str:
    """The text without an incomplete character at the end."""
    return prompter.text(token_ids).rstrip("\ufffd")


def test_only_the_possible_start_of_a_stop_string_is_held_back(prompter: Prompter) -> None:
    token_ids = prompter.tokenizer.encode("abababc")
    assert len(token_ids) == 7, "one token per letter"
    assert stopped(prompter, token_ids, ["abc"], 1) == (["", "", "ab", "", "ab", "", ""], 7)
    assert stopped(prompter, token_ids, ["abd"], 1) == (["", "", "ab", "", "ab", "", "abc", ""], None)
    assert stopped(prompter, token_ids, ["c"], 3) == (["aba", "bab", ""], 7)
    assert stopped(prompter, token_ids, ["ba", "ab"], 7) == ([""], 2)


def test_decoded_pieces_can_contain_stop_strings(prompter: Prompter) -> None:
    watched = StopStrings(["END", "ab"])
    assert watched.add_pieces((5, piece) for piece in ["x", "", "yE"]) == ("xy", None)
    assert watched.add_pieces([]) == ("", None)
    assert watched.add_pieces((5, piece) for piece in ["N", "", "a"]) == ("EN", None)
    assert watched.finish() == "a"
    watched = StopStrings(["END"])
    assert watched.add_pieces((5, piece) for piece in ["one E", "", "ND two", "three"]) == ("one ", 3)
    assert watched.finish() == ""


@pytest.mark.parametrize("size", [1, 9])
@pytest.mark.parametrize(
    ("answer", "stop", "text", "count"),
    [
        ("ab<|user|>c", ["<|user|>"], "ab", 3),
        ("x<|user|>ab<pad>x<|user|>c", ["bx<|user|>"], "xa", 7),
        ("ab<|user|>c", ["bc", "<pad>"], "a", 4),
        ("b<|user|>c", ["x<|user|>", "user"], "bc", None),
        ("x<|user|><|user|>", ["x<|user|><|assistant|>"], "x", None),
        ("a<|user|><|assistant|>c", ["<|user|><|assistant|>c", "ac"], "", 4),
    ],
)
@pytest.mark.failure_case("H35")
def test_a_stop_string_may_name_special_tokens(
    prompter: Prompter, size: int, answer: str, stop: list[str], text: str, count: int | None
) -> None:
    """Which are no text: neither they nor stop strings are returned, and they part no other stop string."""
    pieces, found = stopped(prompter, prompter.tokenizer.encode(answer), stop, size)
    assert ("".join(pieces), found) == (text, count)


def test_the_chat_template_gets_the_dialect(prompter: Prompter, tokenizer_files: Path, tmp_path: Path) -> None:
    shutil.copytree(tokenizer_files, tmp_path / "target")
    template = CHAT_TEMPLATE.replace("{% for", "{% if threads is defined %}{{ threads }}{% endif %}{% for", 1)
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    config = tmp_path / "target" / "tokenizer_config.json"
    values = json.loads(config.read_text())
    values.pop("chat_template", None)
    config.write_text(json.dumps(values))
    knowing = Prompter(tmp_path / "target", CONTEXT)
    plain = prompter.token_ids("How many?", raw=False, max_tokens=1)
    apar = tuple(prompter.tokenizer.encode("apar"))
    assert knowing.token_ids("How many?", raw=False, max_tokens=1) == plain
    assert knowing.token_ids("How many?", raw=False, max_tokens=1, threads="apar") == (*apar, *plain)
    assert prompter.token_ids("How many?", raw=False, max_tokens=1, threads="apar") == plain, "templates may not care"
    assert knowing.token_ids("How many?", raw=True, max_tokens=1, threads="apar") == plain[1:-1]


@pytest.mark.parametrize("text", ["", " ", "\n\t"])
def test_an_empty_prompt_is_refused(prompter: Prompter, text: str) -> None:
    with pytest.raises(UserError, match="the prompt is empty"):
        prompter.token_ids(text, raw=True, max_tokens=1)


def test_prompt_and_answer_must_fit_the_context(prompter: Prompter) -> None:
    length = len(prompter.token_ids("How many?", raw=True, max_tokens=1))
    assert len(prompter.token_ids("How many?", raw=True, max_tokens=CONTEXT - length)) == length
    with pytest.raises(UserError, match=f"has {length} tokens and --max-tokens asks for {CONTEXT - length + 1} more"):
        prompter.token_ids("How many?", raw=True, max_tokens=CONTEXT - length + 1)


def test_a_missing_or_damaged_tokenizer_is_refused(tokenizer_files: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer in"):
        Prompter(tmp_path, CONTEXT)
    (tmp_path / "tokenizer.json").write_text((tokenizer_files / "tokenizer.json").read_text()[:-500])
    with pytest.raises(UserError, match=r"the tokenizer in .* cannot be read") as refused:
        Prompter(tmp_path, CONTEXT)
    assert "\n" not in str(refused.value)


@pytest.mark.failure_case("M18")
@pytest.mark.parametrize("numbers", [{}, {"added_tokens_decoder": {"4": {"content": "<|assistant|>", "special": True}}}])
def test_the_tokenizers_end_token_ends_answers_besides_the_models(
    tokenizer_files: Path, tmp_path: Path, numbers: dict[str, Any]
) -> None:
    shutil.copy(tokenizer_files / "tokenizer.json", tmp_path)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    for in_config, in_tokenizer, vocab_size, expected in (
        (2, "<|assistant|>", 300, (2, 4)), (2, {"content": "<|assistant|>"}, 300, (2, 4)), (None, "<|assistant|>", 300, (4,)),
        (4, "<|assistant|>", 300, (4,)), (2, None, 300, (2,)), (2, "<|assistant|>", 4, (2,)),
    ):  # fmt: skip
        config = {"model_type": "llama", "eos_token_id": in_config, "vocab_size": vocab_size, **sizes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": in_tokenizer, **numbers}))
        assert end_token_ids(tmp_path) == expected


@pytest.mark.failure_case("M4")
def test_tokenizers_are_compared_by_vocabulary(tokenizer_files: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no tokenizer in"):
        same_tokenizer(tokenizer_files, tmp_path)
    shutil.copytree(tokenizer_files, tmp_path / "spaced")
    same_tokenizer(tokenizer_files, tmp_path / "spaced")
    file = tmp_path / "spaced" / "tokenizer.json"
    file.write_text(file.read_text() + "\n")  # another file, the same tokenizer
    same_tokenizer(tokenizer_files, tmp_path / "spaced")
    foreign_tokenizer().save_pretrained(tmp_path / "foreign")
    with pytest.raises(UserError, match=r"has a different tokenizer than the target .*\(300 and 300 tokens\)"):
        same_tokenizer(tokenizer_files, tmp_path / "foreign")
    longer = AutoTokenizer.from_pretrained(tokenizer_files)
    longer.add_tokens(["[TOOL]"])
    longer.save_pretrained(tmp_path / "longer")
    with pytest.raises(UserError, match=r"\(300 and 301 tokens\), first in token 300 \(none and '\[TOOL\]'\): use a draft"):
        same_tokenizer(tokenizer_files, tmp_path / "longer")


@pytest.mark.failure_case("M4")
def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tokenizer_files: Path) -> None:
    fits_vocabulary(tokenizer_files, 300)
    with pytest.raises(UserError, match=r"token ids up to 299, .* a vocabulary of 299 tokens") as refused:
        fits_vocabulary(tokenizer_files, 299)
    assert str(tokenizer_files) in str(refused.value) and "\n" not in str(refused.value)
