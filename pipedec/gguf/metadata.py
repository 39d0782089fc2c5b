"""From the metadata of a GGUF file to ``tokenizer.json`` and ``tokenizer_config.json``.

Owns which pre-tokenizer each of llama.cpp's names stands for. The texts' tokens are those of llama.cpp.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pipedec.core.errors import UserError

_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # kinds of tokens
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%(end)s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%(end)s"
    r"|\p{N}%(digits)s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = _CASED % {"end": "", "digits": ""}
_O200K = _CASED % {"end": "(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": "{1,3}"}
_MARKED_WORDS = (_WORDS % "").replace(r"?\p{L}+", r"?[\p{L}\p{M}]+").replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "gigachat", "exaone4", "trillion")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2")
_LIKE_LLAMA3_NAMES = (*_LLAMA3_NAMES, "dbrx", "smaug-bpe", "chatglm-bpe", "glm4")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan")
_WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken")  # words that are tokens are never merged from parts; texts begin with a bos token
PRE_TOKENIZERS = (*_GPT2, *_SINGLE_DIGITS, *_LIKE_LLAMA3_NAMES, *_QWEN2, "qwen35", "tekken", "gpt-4o")
# Control tokens that end an answer in llama.cpp, although no field of a file names them.
_END_NAMES = {
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>", "<|endoftext|>",
    "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>",
    "<|tool_response>", "<｜end▁of▁sentence｜>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>",
    "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
}  # fmt: skip
# Tokens that do not end an answer where there are all of the others.
_NO_ENDS = (
    ({"<|return|>", "<|call|>"}, "<|end|>"), ({"<|flush|>", "<|call|>"}, "<|end|>"), ({"<|flush|>", "<|calls|>"}, "<|end|>"),
    ({"<|tool_response>"}, "</s>"),
)  # fmt: skip
_ENDS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def write_tokenizer(metadata: Mapping[str, Any], directory: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json`` into ``directory``.

    Raises UserError if the kind of tokenizer or its pre-tokenizer is not supported, or a field is missing.
    """
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise UserError(f"its tokenizer {kind!r} is not supported; use a model with a tokenizer 'gpt2' or 'llama'")
    tokens, types = metadata.get("tokenizer.ggml.tokens"), metadata.get("tokenizer.ggml.token_type")
    if not tokens or not types or len(tokens) != len(types):
        raise UserError("it has no tokens, or no types of them; convert the model again")
    tokenizer = _byte_level(metadata, tokens) if kind == "gpt2" else _sentence_piece(metadata, tokens)
    for special, wanted in ((True, _CONTROL), (False, _USER_DEFINED)):
        added = [token for token, of in zip(tokens, types, strict=True) if of == wanted]
        entries = [AddedToken(token, normalized=False, special=special) for token in added]
        (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(entries)
    _add_ends(tokenizer, metadata, tokens, kind)
    tokenizer.save(str(directory / "tokenizer.json"))
    numbers = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    config = {name: tokens[number] for name, number in numbers.items() if number is not None and number < len(tokens)}
    config |= {
        "clean_up_tokenization_spaces": False,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": metadata.get(f"{metadata.get('general.architecture')}.context_length"),
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")


def end_tokens_of(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer, as in llama.cpp: those that fields name, and control tokens with known names."""
    fields = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _ENDS)
    kinds = zip(metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ()), strict=False)
    control = {name: token for token, (name, kind) in enumerate(kinds) if kind == _CONTROL}
    known = control.keys() & _END_NAMES
    known -= {name for others, name in _NO_ENDS if others <= known}
    return list(dict.fromkeys([*(token for token in fields if token is not None), *sorted(control[name] for name in known)]))


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    if name in (*_QWEN2, "qwen35"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: str) -> Any:
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    patterns = {"tekken": _TEKKEN, "gpt-4o": _O200K, "qwen35": _MARKED_WORDS}
    patterns |= {**dict.fromkeys(_LIKE_LLAMA3_NAMES, _WORDS % "{1,3}"), **dict.fromkeys(_QWEN2, _WORDS % "")}
    if name not in patterns:
        raise UserError(f"its pre-tokenizer {name!r} is not known; use a file with one of {', '.join(PRE_TOKENIZERS)}")
    split = pre_tokenizers.Split(Regex(patterns[name]), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _sentence_piece(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    vocabulary = {token: number for number, token in enumerate(tokens)}
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    scores = metadata.get("tokenizer.ggml.scores")
    if not scores:
        raise UserError("its tokenizer 'llama' has no scores; convert the model again")
    merges = _merges(vocabulary, scores, metadata["tokenizer.ggml.token_type"])
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces]) if prefix else spaces
    whole = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*whole, decoders.Strip(" ", 1, 0)] if prefix else whole)
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE: all pairs of tokens that make a third one, the one with the best score first."""
    found: list[tuple[float, int, int, tuple[str, str]]] = []
    for token, number in vocabulary.items():
        if types[number] in (_CONTROL, _BYTE):
            continue
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in vocabulary and right in vocabulary:
                found.append((-scores[number], vocabulary[left], vocabulary[right], (left, right)))
    return [pair for *_, pair in sorted(found)]


def _add_ends(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], kind: str) -> None:
    """The tokens that are added before and after every text."""
    starts = kind == "llama" or metadata.get("tokenizer.ggml.pre") in _WHOLE_WORDS
    flags = (("bos", starts), ("eos", False))
    first, last = (
        metadata.get(f"tokenizer.ggml.{name}_token_id") if metadata.get(f"tokenizer.ggml.add_{name}_token", usual) else None
        for name, usual in flags
    )
    before, after = ([] if token is None else [tokens[token]] for token in (first, last))
    if before or after:
        template = " ".join([*before, "$A", *after])
        named = [(tokens[token], token) for token in dict.fromkeys((first, last)) if token is not None]
        level = [tokenizer.post_processor] if tokenizer.post_processor is not None else []
        ends = processors.TemplateProcessing(single=template, special_tokens=named)
        tokenizer.post_processor = processors.Sequence([*level, ends]) if level else ends
