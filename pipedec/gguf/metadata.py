"""From the metadata of a GGUF file to ``config.json``, ``tokenizer.json`` and ``tokenizer_config.json``.

Owns which pre-tokenizer each of llama.cpp's names stands for. The texts' tokens are those of llama.cpp.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from pipedec.core import UserError

# model_type of transformers, by architecture of GGUF. A Mistral is a llama there.
ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_CLASSES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_LLAMA3_FACTORS = (8.0, 32.0)  # Llama 3.1 and 3.3; 3.2
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6  # kinds of tokens
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "gigachat", "exaone4", "trillion")
_SINGLE_DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
_LLAMA3_NAMES = ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral")
_LIKE_LLAMA3_NAMES = (*_LLAMA3_NAMES, "dbrx", "smaug-bpe")
_QWEN2 = ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan")
_WHOLE_WORDS = (*_LLAMA3_NAMES, "tekken")  # words that are tokens are never merged from parts; texts begin with a bos token
PRE_TOKENIZERS = (*_GPT2, *_SINGLE_DIGITS, *_LIKE_LLAMA3_NAMES, *_QWEN2, "tekken")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def config_of(metadata: Mapping[str, Any], tensors: Collection[str], vocab_size: int, frequencies: Any | None) -> dict[str, Any]:
    """The contents of ``config.json``, from all fields of the file and the names of its tensors.

    ``frequencies`` is the tensor ``rope_freqs.weight``, factors of wave lengths; None if there is none. Raises UserError if the
    architecture, its experts or its rotary embedding are not supported, or a size is missing.
    """
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(f"its architecture {architecture!r} is not supported; use one of {', '.join(ARCHITECTURES)}")

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if value is None:
            raise UserError(f"it has no field {architecture}.{name}; convert the model again")
        if not isinstance(value, int | float):
            raise UserError(f"its {architecture}.{name} is not one number for all layers, which is not supported")
        return value

    if field("expert_count", 0):
        raise UserError("it is a mixture of experts, which is not supported; use a dense model")
    if field("block_count") > len(tensors):
        raise UserError(f"it has {len(tensors)} tensors, which is too few for {field('block_count')} layers; download it again")
    hidden, heads = field("embedding_length"), field("attention.head_count")
    head_dim = field("attention.key_length", hidden // heads)
    if (rotated := field("rope.dimension_count", head_dim)) != head_dim:
        raise UserError(f"its rotary embedding turns {rotated} of {head_dim} numbers of a head, which is not supported")
    return {
        "architectures": [_CLASSES[architecture]],
        "model_type": ARCHITECTURES[architecture],
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": field("context_length"),
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "rope_theta": field("rope.freq_base", 10_000.0),
        "rope_scaling": _scaling(metadata, architecture, head_dim, frequencies),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_output.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def end_tokens_of(metadata: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer."""
    named = (metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in named if token is not None))


def _scaling(metadata: Mapping[str, Any], architecture: str, head_dim: int, frequencies: Any | None) -> dict[str, Any] | None:
    if frequencies is not None:
        return _llama3(metadata.get(f"{architecture}.rope.freq_base", 10_000.0), head_dim, frequencies)
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = metadata.get(f"{architecture}.rope.scaling.factor", 1.0)
    if kind == "none" or factor in (0.0, 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.get(f"{architecture}.rope.scaling.original_context_length")
    if kind == "yarn" and original:
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise UserError(f"its rotary embedding is scaled by {kind!r}, which is not supported")


def _llama3(base: float, head_dim: int, frequencies: Any) -> dict[str, Any]:
    """The scaling of Llama 3, found from the factors of wave lengths that it results in, which is all that GGUF has."""
    low, high, original = _LLAMA3.values()
    waves = [2 * math.pi * base ** (index / head_dim) for index in range(0, head_dim, 2)]
    smooth = [min(max((original / wave - low) / (high - low), 0.0), 1.0) for wave in waves]
    for factor in _LLAMA3_FACTORS:
        wanted = [1 / ((1 - share) / factor + share) for share in smooth]
        if len(wanted) == len(frequencies) and all(map(partial(math.isclose, rel_tol=1e-3), wanted, frequencies)):
            return {"rope_type": "llama3", "factor": factor, **_LLAMA3}
    raise UserError("its rope_freqs.weight are not those of Llama 3.1, 3.2 or 3.3, and no others are supported")


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


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str]) -> tokenizers.Tokenizer:
    name = metadata.get("tokenizer.ggml.pre", "default")
    merges = [tuple(merge.split(" ")) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _WHOLE_WORDS))
    if name in _QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(name)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(name: str) -> Any:
    if name in _GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if name in _SINGLE_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    patterns = {"tekken": _TEKKEN, **dict.fromkeys(_LIKE_LLAMA3_NAMES, _WORDS % "{1,3}"), **dict.fromkeys(_QWEN2, _WORDS % "")}
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
