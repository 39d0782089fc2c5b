"""Tokenizers of GGUF files: the ones that were written into them, and llama.cpp's token ids for every pre-tokenizer."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType
from hypothesis import given
from hypothesis import strategies as st
from support.checkpoints import save_tiny_llama
from support.gguf_files import byte_level_tokenizer, save_gguf
from support.llama_cpp import LlamaCpp
from support.tiny_pair import Pair
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, trainers

from pipedec.core.errors import UserError
from pipedec.families import model_config
from pipedec.gguf import model_files
from pipedec.gguf.metadata import PRE_TOKENIZERS
from pipedec.text.prompt import end_token_ids, load_tokenizer, same_tokenizer
from pipedec.text.tokenizer import Tokenizer

CORPUS = [
    "Hello there, it's a test for don't stop now. 1234 5678 12.5  WE'LL go\n\n  and\tthen HelloWorld",
    "def f(x):\n    return x**2  # ok ==> ok!!\n",
    "Größe, naïve café, Ελλάδα, 東京東京 \U0001f680 \u0661\u0662\u0663 ½",
]
PIECES = ["a", "B", " ", "  ", "\n", "\t", "1", "23", "4567", "'s", "'LL", "é", "東", "\U0001f680", "-", "==", "<|user|>", "</s>"]
PIECES += ["\u00a0", "\r\n", ".", "_", "\u0663", "²", "/", "$", "+", "Hello", " there", "ok", "▁"]
MARKS = ["कि's कि'LL", "किok ि's"]  # combining marks, which end a word or belong to it
TEXTS = st.one_of(st.text(max_size=40), st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
SPECIALS = ["<unk>", "<s>", "</s>", "<|user|>"]


def merges_of(backend: Backend) -> list[str]:
    merges = json.loads(backend.to_str())["model"]["merges"]
    return [merge if isinstance(merge, str) else " ".join(merge) for merge in merges]


def names_of(backend: Backend) -> list[str]:
    vocabulary = backend.get_vocab()
    return sorted(vocabulary, key=vocabulary.__getitem__)


def byte_level_fields() -> dict[str, Any]:
    """A byte-level BPE whose merges cross the borders of words, so that token ids tell how a text was split."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False)
    parts = [*CORPUS * 3, *(" ".join(CORPUS).split(" ")), *["\n\n", "\n\n\n", "123", "12", "!!", " ==", "'s", "'ll"] * 4]
    backend.train_from_iterator(parts, trainer)
    tokens = names_of(backend)
    types = [int(TokenType.CONTROL)] * len(SPECIALS) + [int(TokenType.NORMAL)] * (len(tokens) - len(SPECIALS))
    fields = {"tokens": tokens, "token_type": types, "merges": merges_of(backend)}
    return {"model": "gpt2", **fields, "bos_token_id": 1, "eos_token_id": 2}


def spaced_backend() -> Backend:
    """A BPE as SentencePiece makes it: words begin with ▁, and bytes stand for letters that it does not know."""
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<|user|>"]
    backend.train_from_iterator(CORPUS * 3, trainers.BpeTrainer(vocab_size=450, special_tokens=specials, show_progress=False))
    return backend


def spaced_fields() -> dict[str, Any]:
    tokens = names_of(spaced_backend())
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256, TokenType.CONTROL]
    types = [int(kind) for kind in kinds] + [int(TokenType.NORMAL)] * (len(tokens) - len(kinds))
    scores = [0.0] * len(kinds) + [-float(rank) for rank in range(len(tokens) - len(kinds))]
    fields = {"tokens": tokens, "token_type": types, "scores": scores}
    return {"model": "llama", **fields, "bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for as many tokens as the larger of the tokenizers has."""
    directory = tmp_path_factory.mktemp("source")
    save_tiny_llama(directory, layers=1, vocab=len(byte_level_fields()["tokens"]))
    return directory


@pytest.fixture(scope="module")
def spaced_source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("spaced")
    save_tiny_llama(directory, layers=1, vocab=len(spaced_fields()["tokens"]))
    return directory


@pytest.fixture(autouse=True, scope="module")
def own_cache_of_the_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PIPEDEC_STATE_DIR", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="module")
def from_pair(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_gguf(tmp_path_factory.mktemp("pair") / "model.gguf", pair.target)


@given(text=TEXTS)
def test_a_byte_level_tokenizer_is_the_one_that_was_written(pair: Pair, from_pair: Path, text: str) -> None:
    written, found = _tokenizer(pair.target), _tokenizer(from_pair)
    tokens = written.encode(text)
    assert found.encode(text) == tokens
    for skips in (False, True):
        assert found.decode(tokens, skips) == written.decode(tokens, skips)


def test_special_tokens_and_the_chat_template_are_the_files(pair: Pair, from_pair: Path) -> None:
    written, found = load_tokenizer(pair.target), load_tokenizer(from_pair)
    assert found.special_tokens == written.special_tokens
    assert found.all_special_ids == written.all_special_ids
    assert found.tool_template == written.tool_template != ""
    same_tokenizer(pair.target, from_pair)
    with pytest.raises(UserError):
        same_tokenizer(pair.foreign_draft, from_pair)


@pytest.mark.failure_case("M20")
@pytest.mark.parametrize(
    ("end", "names", "kind", "expected"),
    [
        (2, {3: "<|im_end|>", 4: "<|endoftext|>"}, TokenType.CONTROL, (2, 3, 4)),
        (None, {2: "<of>", 3: "<|eot_id|>"}, TokenType.CONTROL, (3,)),
        (None, {2: "<of>", 3: "<|eot_id|>"}, TokenType.NORMAL, ()),
        (2, {0: "<|return|>", 3: "<|call|>", 4: "<|end|>"}, TokenType.CONTROL, (2, 0, 3)),
    ],
)
def test_control_tokens_with_known_names_end_answers(
    pair: Pair, tmp_path: Path, end: int | None, names: dict[int, str], kind: TokenType, expected: tuple[int, ...]
) -> None:
    """As in llama.cpp; a file without an end token has none by accident."""
    fields = byte_level_tokenizer(pair.target)
    for token, name in names.items():
        fields["tokens"][token], fields["token_type"][token] = name, int(kind)
    file = save_gguf(tmp_path / "model.gguf", pair.target, tokenizer={**fields, "eos_token_id": end})
    assert end_token_ids(file) == model_config(file).eos_token_ids == expected


@given(text=TEXTS)
def test_a_sentencepiece_tokenizer_is_merged_by_its_scores(spaced_source: Path, text: str) -> None:
    found, backend = _saved(spaced_source), _spaced()
    assert found.encode(text) == backend.encode(text).ids
    if "<" not in text and "▁" not in text:
        assert found.decode(found.encode(text)) == text


@pytest.mark.parametrize("fields", [{}, {"add_space_prefix": False}, {"add_bos_token": False, "add_eos_token": True}], ids=str)
def test_sentencepiece_token_ids_are_llama_cpps(spaced_source: Path, tmp_path: Path, fields: dict[str, Any]) -> None:
    file = save_gguf(tmp_path / "model.gguf", spaced_source, tokenizer={**spaced_fields(), **fields})
    check_against_llama_cpp(file, [*CORPUS, "<unk> x", " <|user|> y", *random_texts()])


def test_user_defined_tokens_are_found_in_texts(tmp_path: Path) -> None:
    """As Gemma has them, for runs of spaces and line breaks."""
    fields = spaced_fields()
    added = ["  ", "\n\n"]
    first = len(fields["tokens"])
    fields["tokens"] = [*fields["tokens"], *added]
    fields["scores"] = [*fields["scores"], 0.0, 0.0]
    fields["token_type"] = [*fields["token_type"], *[int(TokenType.USER_DEFINED)] * 2]
    save_tiny_llama(tmp_path / "source", layers=1, vocab=len(fields["tokens"]))
    tokenizer = {**fields, "add_space_prefix": False, "add_bos_token": True}
    found = load_tokenizer(save_gguf(tmp_path / "model.gguf", tmp_path / "source", tokenizer=tokenizer))
    ids = found.encode("it  it\n\n  it")
    inside = found.encode("it")[1:]
    assert ids == [1, *inside, first, *inside, first + 1, first, *inside]
    assert found.decode(ids, skip_special_tokens=True) == "it  it\n\n  it"


@pytest.mark.fast_cases("gpt-2", "smollm", "llama-bpe", "dbrx", "qwen2", "qwen35", "tekken")
@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_byte_level_token_ids_are_llama_cpps(source: Path, tmp_path: Path, pre: str) -> None:
    file = save_gguf(tmp_path / "model.gguf", source, tokenizer={**byte_level_fields(), "pre": pre})
    has_its_own = pre in ("tekken", "gpt-4o")  # llama.cpp simplifies its expression
    check_against_llama_cpp(file, [*CORPUS, *random_texts(), *(() if has_its_own else MARKS)])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"pre": "martian"}, "pre-tokenizer 'martian' is not known"),
        ({"pre": None}, "pre-tokenizer 'default' is not known"),
        ({"model": "bert"}, "tokenizer 'bert' is not supported"),
        ({"tokens": None}, "no tokens"),
        ({"model": "llama"}, "no scores"),
    ],
)
def test_other_tokenizers_are_refused_by_name(source: Path, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    file = save_gguf(tmp_path / "model.gguf", source, tokenizer={**byte_level_fields(), "pre": "gpt-2", **fields})
    with pytest.raises(UserError, match=words) as caught:
        model_files(file)
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


def check_against_llama_cpp(file: Path, texts: list[str]) -> None:
    """Texts whose composed form differs are left out: llama.cpp does not compose what the tokenizers of Qwen compose."""
    reference, found = LlamaCpp(file), load_tokenizer(file)
    for text in texts:
        if unicodedata.is_normalized("NFC", text):
            assert found.encode(text) == reference.encode(text), repr(text)


def random_texts(count: int = 200) -> list[str]:
    generator = random.Random(1)
    return ["".join(generator.choices(PIECES, k=generator.randint(1, 25))) for _ in range(count)]


@cache
def _tokenizer(model: Path) -> Tokenizer:
    return load_tokenizer(model)


@cache
def _spaced() -> Backend:
    backend = spaced_backend()
    backend.add_special_tokens(["<s>", "</s>", "<|user|>"])
    return backend


@cache
def _saved(source: Path) -> Tokenizer:
    fields = {**spaced_fields(), "add_bos_token": False}
    return load_tokenizer(save_gguf(source / "model.gguf", source, tokenizer=fields))
