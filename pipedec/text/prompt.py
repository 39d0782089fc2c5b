"""From the prompt of a request to token ids: the tokenizer that target and draft share, and what fits.

Knows nothing of stages, methods or processes.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams, check_sets_of_tokens, check_token_ids
from pipedec.core.values import shortened
from pipedec.families import model_config
from pipedec.gguf import model_files
from pipedec.text.answer_text import AnswerText, hidden_tokens, text_stream
from pipedec.text.stream import TextStream
from pipedec.text.tokenizer import Tokenizer, configuration, content, has_tokenizer, load_for_training

_DEFAULTS = SamplingParams()
_SHOWN_TOKENS = 3  # examples that an error shows of tokens in which two vocabularies differ


class Prompter:
    """Tokenizes prompts for a checkpoint and checks that they fit, with their answers, into the model's context
    ``max_positions`` and the cluster's own limit ``max_model_len``, if there is one.

    ``vocab_size``: the model's embeddings; None for as many as the tokenizer has tokens.
    """

    def __init__(
        self, directory: Path, max_positions: int, max_model_len: int | None = None, vocab_size: int | None = None
    ) -> None:
        self.tokenizer = load_tokenizer(directory)
        self._vocab_size = len(self.tokenizer) if vocab_size is None else vocab_size
        self._context, self._owner = max_positions, "model"
        if max_model_len is not None and max_model_len < max_positions:
            self._context, self._owner = max_model_len, "cluster"

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int, threads: str | None = None) -> tuple[int, ...]:
        """The prompt's token ids, after the chat template unless the model has none.

        Args:
            prompt: text, or token ids, which are taken as they are.
            raw: skip the chat template.
            max_tokens: room to leave for the answer.
            threads: dialect in which the answer may open decode threads, passed to the template as ``threads``; None for none.

        Raises UserError if the prompt is empty, has a token that the model lacks, or exceeds the context of the model or the
        cluster together with ``max_tokens``.
        """
        if isinstance(prompt, tuple):
            token_ids = prompt
            if not token_ids:
                raise UserError("the prompt is empty: give at least one token id")
        else:
            if not prompt.strip():
                raise UserError("the prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input")
            self.tokenizer.check_length(prompt, self._context)
            is_plain = raw or not self.tokenizer.has_chat_template
            text = prompt
            if not is_plain:
                options: dict[str, Any] = {} if threads is None else {"threads": threads}
                text = self.tokenizer.render_chat([{"role": "user", "content": prompt}], **options)
            token_ids = tuple(self.tokenizer.encode(text, add_special_tokens=is_plain))
        if len(token_ids) + max_tokens > self._context:
            raise UserError(
                f"the prompt has {len(token_ids)} tokens and --max-tokens asks for {max_tokens} more, "
                f"but the {self._owner}'s context is {self._context}: shorten the prompt or lower --max-tokens"
            )
        check_token_ids("the prompt", token_ids, self._vocab_size)
        return token_ids

    def check(self, sampling: SamplingParams) -> None:
        """Raises UserError if a token that the parameters name is not the model's."""
        check_sets_of_tokens(
            self._vocab_size, logit_bias=sampling.logit_bias, stop_token_ids=sampling.stop_token_ids,
            shown_special_tokens=sampling.shown_special_tokens,
        )  # fmt: skip

    def answer_text(self, sampling: SamplingParams) -> AnswerText:
        """The text of a new answer."""
        return AnswerText(self.tokenizer, sampling)

    def stream(self, sampling: SamplingParams = _DEFAULTS) -> TextStream:
        """A new incremental decoder for tokens of an answer, without stop strings."""
        return text_stream(self.tokenizer, sampling)

    def text(self, token_ids: Sequence[int], sampling: SamplingParams = _DEFAULTS) -> str:
        """The text of token ids, without the special tokens that are no text with these parameters."""
        hidden = hidden_tokens(self.tokenizer, sampling)
        return self.tokenizer.decode([token for token in token_ids if token not in hidden], skip_special_tokens=False)


def vocabulary_digest(tokenizer: Tokenizer) -> str:
    """SHA-256 over all tokens and their ids (16 hex digits): identifies the targets that a draft with a small vocabulary fits."""
    listed = json.dumps(sorted(tokenizer.vocabulary.items(), key=lambda item: (item[1], item[0])))
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def same_tokenizer(target: Path, draft: Path) -> None:
    """Raises UserError if the vocabularies of both models differ, or one cannot be read."""
    files = [model_files(path) / "tokenizer.json" for path in (target, draft)]
    digests = [hashlib.sha256(file.read_bytes()).digest() for file in files if file.exists()]
    if len(digests) == 2 and digests[0] == digests[1]:
        return
    vocabularies = [load_tokenizer(path).vocabulary for path in (target, draft)]
    if vocabularies[0] != vocabularies[1]:
        sizes = " and ".join(str(len(vocabulary)) for vocabulary in vocabularies)
        raise UserError(
            f"the draft {draft} has a different tokenizer than the target {target} ({sizes} tokens), "
            f"{_difference(*vocabularies)}: use a draft of the same family, or --method pp --draft none"
        )


def _difference(target: Mapping[str, int], draft: Mapping[str, int]) -> str:
    """The first tokens that differ, by id."""
    targets, drafts = ({token_id: token for token, token_id in vocabulary.items()} for vocabulary in (target, draft))
    differing = sorted({token_id for _, token_id in target.items() ^ draft.items()})[:_SHOWN_TOKENS]
    shown = [f"{one} ({_named(targets.get(one))} and {_named(drafts.get(one))})" for one in differing]
    return f"first in token {', '.join(shown)}"


def _named(token: str | None) -> str:
    return "none" if token is None else repr(shortened(token))


def fits_vocabulary(directory: Path, vocab_size: int) -> None:
    """Raises UserError unless a model has an embedding for every token of its directory's tokenizer, if there is one, and as
    ``load_tokenizer``.

    Added tokens are exempt: some fine-tuned models come with a padding token that is never used.
    """
    if not has_tokenizer(model_files(directory)):
        return
    largest = load_tokenizer(directory).largest_own_id
    if largest >= vocab_size:
        raise UserError(
            f"{directory}: the tokenizer has token ids up to {largest}, but config.json a vocabulary of {vocab_size} tokens: "
            "the tokenizer does not belong to this model; download both again"
        )


def end_token_ids(directory: Path) -> tuple[int, ...]:
    """The tokens that end an answer of a checkpoint's model: those that its configuration names, and the end token of its
    tokenizer, where fine-tuning often changes it alone. Raises UserError as ``model_config``, or if the tokenizer is damaged.
    """
    config, own = model_config(directory), _own_end_token_id(directory)
    if own is None or own >= config.vocab_size or own in config.eos_token_ids:
        return config.eos_token_ids
    return (*config.eos_token_ids, own)


def _own_end_token_id(directory: Path) -> int | None:
    """The id of a tokenizer's end token, if it names one. The vocabulary is read only if the configuration has no ids."""
    files = model_files(directory)
    stated = configuration(files)
    if not stated.get("eos_token"):
        return None
    end = content(stated["eos_token"])
    listed = {content(entry): int(number) for number, entry in stated.get("added_tokens_decoder", {}).items()}
    if end in listed:
        return listed[end]
    return load_tokenizer(directory).eos_token_id if has_tokenizer(files) else None


def load_tokenizer(directory: Path) -> Tokenizer:
    """The tokenizer of any checkpoint; one without ``tokenizer.json`` is converted by transformers, which loads torch. Raises
    UserError if there is none, or a damaged one.
    """
    directory = model_files(directory)
    if not (directory / "tokenizer.model").exists() or (directory / "tokenizer.json").exists():
        return Tokenizer(directory)
    with tempfile.TemporaryDirectory(prefix="pipedec-") as written:
        load_for_training(directory).save_pretrained(written)
        tokenizer = Tokenizer(Path(written))
    tokenizer.directory = directory
    return tokenizer
