"""The tokenizer of a checkpoint and its chat template, read from their files; without transformers, which loads torch.

Owns the meaning of ``tokenizer.json``, ``tokenizer_config.json`` and ``chat_template.jinja``: token ids and texts are those of
transformers' ``AutoTokenizer``. Knows no models and no requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from pipedec.core.errors import UserError
from pipedec.gguf import model_files
from pipedec.text.chat_template import compiled

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FILES = ("tokenizer.json", "tokenizer.model")
_CONVERTERS = ("sentencepiece", "google.protobuf")  # modules that transformers needs for ``tokenizer.model``
_SPACES = [(" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't")]
_SPACES += [(f" '{word}", f"'{word}") for word in ("m", "s", "ve", "re")]


class Tokenizer:
    """From text to token ids and back, for a checkpoint with ``tokenizer.json`` or a GGUF file. Raises UserError if it is missing
    or damaged.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory = model_files(directory)
        path = directory / "tokenizer.json"
        if not path.exists():
            raise UserError(f"no tokenizer in {directory}: expected tokenizer.json beside config.json")
        try:
            self._backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # tokenizers raises a bare Exception for a corrupt file
            raise UserError(f"the tokenizer in {directory} cannot be read: {str(error).splitlines()[0][:160]}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        config = configuration(directory)
        self.special_tokens = {name: content(config[name]) for name in _NAMED if config.get(name)}
        self._add_tokens(config)
        is_bpe = isinstance(self._backend.model, tokenizers.models.BPE)
        self._cleans_spaces = bool(config.get("clean_up_tokenization_spaces")) and not is_bpe
        self._template_sources = _read_templates(directory, config)
        self._wants_parts: dict[str, bool] = {}  # by the template's source

    def __len__(self) -> int:
        """The number of tokens, added ones included; without gaps all ids are below it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def vocabulary(self) -> Mapping[str, int]:
        """Ids of all tokens, by their names in the file."""
        return self._backend.get_vocab(with_added_tokens=True)

    @property
    def largest_own_id(self) -> int:
        """The largest id of a token that was not added to the tokenizer; 0 without any."""
        return max(self._backend.get_vocab(with_added_tokens=False).values(), default=0)

    @cached_property
    def max_chars_per_token(self) -> int:
        """The most characters that a token stands for."""
        return max(map(len, self.vocabulary))

    @property
    def eos_token_id(self) -> int | None:
        name = self.special_tokens.get("eos_token")
        return None if name is None else self.token_id(name)

    @cached_property
    def all_special_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which are no text."""
        return frozenset(token for token, added in self._added.items() if added.special)

    @cached_property
    def special_names(self) -> Mapping[int, str]:
        """The names of the special tokens, by id."""
        return {token: self.token(token) for token in self.all_special_ids}

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Ids of the tokens that were added to the tokenizer's model, special or not, by their texts."""
        return {added.content: token for token, added in self._added.items()}

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._template_sources

    @property
    def tool_template(self) -> str:
        """The source of the template that renders conversations with tools; empty if there is no template."""
        return self._template_sources.get("tool_use", self._template_sources.get("default", ""))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text.

        Args:
            add_special_tokens: with the tokens that the tokenizer puts before or after every text. Special tokens that the text
                itself names are read as such in any case.

        Raises UserError if the text has half a surrogate pair, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            place = f"character {error.start} is half a surrogate pair"
            raise UserError(f"the text is no valid Unicode ({place}): send whole characters") from None
        return self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids  # without the GIL

    def check_length(self, text: str, max_tokens: int) -> None:
        """Raises UserError if a text has more characters than ``max_tokens`` tokens can stand for. It need not be tokenized."""
        if len(text) > (limit := max_tokens * self.max_chars_per_token):
            raise UserError(
                f"the prompt is too long: it has {len(text)} characters, but the {max_tokens} tokens that fit are at most {limit}"
            )

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids; an incomplete character is U+FFFD. Ids beyond the vocabulary are left out."""
        text = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        if self._cleans_spaces:
            for spaced, tight in _SPACES:
                text = text.replace(spaced, tight)
        return text

    def token_id(self, name: str) -> int | None:
        """The id of a token by its name in the file."""
        return self._backend.token_to_id(name)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 of a token's text, which may be a part of a character. Nothing for an id beyond the vocabulary."""
        name = self._backend.id_to_token(token_id)
        if name is None:
            return b""
        if token_id in self._added:
            return name.encode()
        if self._byte_of is not None and all(letter in self._byte_of for letter in name):
            return bytes(self._byte_of[letter] for letter in name)
        if len(name) == 6 and name.startswith("<0x") and name.endswith(">"):
            return bytes([int(name[3:5], 16)])
        return name.replace("▁", " ").encode() if _has(self._backend.decoder, "▁") else name.encode()

    def token(self, token_id: int) -> str:
        """The text of one token. Where it is a part of a character: ``bytes:`` and its bytes, as OpenAI's API writes it."""
        spelled = self.token_bytes(token_id)
        try:
            return spelled.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)

    def to_json(self) -> str:
        """The contents of ``tokenizer.json``, with the tokens that only the configuration has."""
        return self._backend.to_str()

    def encoder_without(self, token_ids: Collection[int]) -> Callable[[str], list[int]]:
        """A function that encodes text in which these added tokens are not recognised. It shares the model's tables."""
        backend = tokenizers.Tokenizer(self._backend.model)
        for part in ("normalizer", "pre_tokenizer"):
            if (value := getattr(self._backend, part)) is not None:
                setattr(backend, part, value)
        kept = {added.content: token for token, added in self._added.items() if token not in token_ids}
        backend.add_tokens([self._added[token] for token in kept.values()])
        own = {backend.token_to_id(content): token for content, token in kept.items()}
        return lambda text: [own.get(token, token) for token in backend.encode(text, add_special_tokens=False).ids]

    def render_chat(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, continue_final_message: bool = False,
        **options: Any,
    ) -> str:  # fmt: skip
        """The text that the chat template makes of messages, JSON objects with ``role`` and ``content``, with ``options`` as
        further variables. Content is text or parts; the template gets it as it needs it.

        Args:
            add_generation_prompt: end where the answer of the assistant begins.
            continue_final_message: end with the content of the last message, which the answer continues.

        Raises UserError as ``apply_chat_template``, or if the last message cannot be continued, or both ends are asked for.
        """
        if continue_final_message and add_generation_prompt:
            raise UserError("continue_final_message is not possible with add_generation_prompt: leave out one of them")
        if not self.has_chat_template:
            raise UserError(f"{self.directory} has no chat template: send the prompt as it is (/v1/completions, --raw)")
        if not messages:
            raise UserError("messages is empty: give at least one message")
        source = self._template_sources["default"] if options.get("tools") is None else self.tool_template
        template = compiled(source)
        if source not in self._wants_parts:
            self._wants_parts[source] = template.wants_parts(**self.special_tokens)
        variables = {**self.special_tokens, **options, "in_parts": self._wants_parts[source]}
        if continue_final_message:
            return template.render_open(messages, **variables)
        return template.render(messages, add_generation_prompt, **variables)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True, **options: Any
    ) -> list[int]:
        """Token ids of a conversation (see ``render_chat``). Raises UserError if there is no template or no message, or the
        template refuses the messages or runs out of its limits.
        """
        return self.encode(self.render_chat(messages, add_generation_prompt, **options), add_special_tokens=False)

    @cached_property
    def _added(self) -> Mapping[int, AddedToken]:
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def _byte_of(self) -> dict[str, int] | None:
        """The byte that each letter stands for, as in GPT-2's vocabulary; None if the tokenizer is not byte-level."""
        if not _has(self._backend.decoder, "ByteLevel"):
            return None
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        return {chr(byte): byte for byte in printable} | {chr(256 + number): byte for number, byte in enumerate(others)}

    def _add_tokens(self, config: Mapping[str, Any]) -> None:
        """Add the tokens that only the configuration has, in the order of their ids; those that it names are special."""
        listed = sorted(config.get("added_tokens_decoder", {}).items(), key=lambda item: int(item[0]))
        known = self._backend.get_added_tokens_decoder()
        self._backend.add_tokens([_added(entry) for number, entry in listed if int(number) not in known])
        extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
        named = [*(config[name] for name in _NAMED if config.get(name)), *(extra.values() if isinstance(extra, dict) else extra)]
        self._backend.add_special_tokens(
            [_added(entry) if isinstance(entry, dict) else AddedToken(entry, special=True, normalized=False) for entry in named]
        )


def has_tokenizer(directory: Path) -> bool:
    """Whether there are files of a tokenizer in any known format."""
    return any((directory / name).exists() for name in _FILES)


def configuration(directory: Path) -> dict[str, Any]:
    """The object in ``tokenizer_config.json``; empty without one. Raises UserError if it is damaged."""
    config = _read_json(directory / "tokenizer_config.json")
    if "added_tokens_decoder" not in config:  # older checkpoints name their special tokens in a file of its own
        config |= _read_json(directory / "special_tokens_map.json")
    return config


def content(entry: str | Mapping[str, Any]) -> str:
    """The name of a special token, which may be given with its flags."""
    return entry if isinstance(entry, str) else str(entry["content"])


def _read_json(path: Path) -> dict[str, Any]:
    """An object; an empty one if there is no file."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}
    except (ValueError, TypeError) as error:
        raise UserError(f"the tokenizer in {path.parent} cannot be read: {path.name}: {str(error)[:160]}") from error


def _read_templates(directory: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name: ``default``, and ``tool_use`` where a checkpoint has another one for tools.

    Multimodal checkpoints may have theirs in ``chat_template.json``, where transformers' processors look for it.
    """
    path, others = directory / "chat_template.jinja", directory / "additional_chat_templates"
    if path.exists():
        return {file.stem: file.read_text(encoding="utf-8") for file in others.glob("*.jinja")} | {
            "default": path.read_text(encoding="utf-8")
        }
    source = config.get("chat_template") or _read_json(directory / "chat_template.json").get("chat_template")
    if isinstance(source, list):
        return {entry["name"]: entry["template"] for entry in source}
    return {} if source is None else {"default": source}


def _added(entry: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(entry[name]) for name in ("special", "normalized", "lstrip", "rstrip", "single_word") if name in entry}
    return AddedToken(entry["content"], **flags)


def _has(decoder: Any, part: str) -> bool:
    """Whether a decoder of the tokenizer names ``part``."""
    return decoder is not None and part in decoder.__getstate__().decode()


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # its parent is not installed
        return False


def load_for_training(directory: Path) -> Any:
    """The tokenizer of transformers, which can be changed and saved. Raises UserError if there is none, or a damaged one, or one
    that can only be converted by packages that are not installed.
    """
    directory = model_files(directory)
    if not has_tokenizer(directory):
        raise UserError(f"no tokenizer in {directory}: expected tokenizer.json beside config.json")
    if not (directory / "tokenizer.json").exists() and not all(map(_is_installed, _CONVERTERS)):
        raise UserError(
            f"{directory} has a tokenizer.model and no tokenizer.json: pip install 'pipedec[sentencepiece]' to convert it"
        )
    from transformers import AutoTokenizer  # which loads torch

    try:
        return AutoTokenizer.from_pretrained(directory)
    except Exception as error:  # tokenizers raises a bare Exception for a corrupt file
        raise UserError(f"the tokenizer in {directory} cannot be read: {str(error).splitlines()[0][:160]}") from error
