"""From text to token ids and back: the tokenizer both models share, chat templates, prompt chunks, streamed text.

The only module that knows the tokenizer. Knows nothing of stages, methods or processes.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from transformers import AutoTokenizer

from pipedec.core import UserError

PREFILL_CHUNK = 512
_REPLACEMENT = "\ufffd"


def prefill_chunks(token_ids: Sequence[int], num_masks: int = 0) -> list[list[int]]:
    """The prompt in pieces of at most ``PREFILL_CHUNK`` tokens, so that long prompts need no more memory than short ones.

    The last piece ends with a group of ``num_masks`` masks.
    """
    chunks = [list(token_ids[start : start + PREFILL_CHUNK]) for start in range(0, len(token_ids), PREFILL_CHUNK)]
    chunks[-1] += [-mask for mask in range(1, num_masks + 1)]
    return chunks


class Prompter:
    """Tokenizes prompts for a checkpoint and checks that they fit."""

    def __init__(self, directory: Path, max_positions: int) -> None:
        if not any((directory / name).exists() for name in ("tokenizer.json", "tokenizer.model")):
            raise UserError(f"no tokenizer in {directory}: expected tokenizer.json beside config.json")
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(directory)
        except Exception as error:  # tokenizers raises a bare Exception for a corrupt file
            raise UserError(f"the tokenizer in {directory} cannot be read: {str(error).splitlines()[0][:160]}") from error
        self.tokenizer.model_max_length = sys.maxsize  # whether a prompt fits is checked here, in one line
        self._max_positions = max_positions

    def token_ids(self, prompt: str, raw: bool, max_tokens: int, threads: str | None = None) -> tuple[int, ...]:
        """The prompt's token ids, through the chat template if the model has one and ``raw`` is not set.

        Args:
            threads: name of the dialect in which the answer may open threads; the template knows it as ``threads``.

        Raises:
            UserError: the prompt is empty, or does not fit the context together with ``max_tokens``.
        """
        if not prompt.strip():
            raise UserError("the prompt is empty: give --prompt TEXT, --prompt-file FILE, or text on standard input")
        if self.tokenizer.chat_template is None or raw:
            token_ids = self.tokenizer(prompt)["input_ids"]
        else:
            message = [{"role": "user", "content": prompt}]
            wishes = {} if threads is None else {"threads": threads}
            token_ids = self.tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False, **wishes)
        if len(token_ids) + max_tokens > self._max_positions:
            raise UserError(
                f"the prompt has {len(token_ids)} tokens and --max-tokens asks for {max_tokens} more, "
                f"but the model's context is {self._max_positions}: shorten the prompt or lower --max-tokens"
            )
        return tuple(token_ids)

    def check_bias(self, logit_bias: Mapping[int, float] | None) -> None:
        """Raises UserError if a biased token is not in the vocabulary."""
        if logit_bias and max(logit_bias) >= len(self.tokenizer):
            raise UserError(f"logit_bias names token {max(logit_bias)}, but the vocabulary has {len(self.tokenizer)} tokens")

    def stream(self) -> TextStream:
        """A fresh decoder for one answer."""
        return TextStream(self)

    def text(self, token_ids: Sequence[int]) -> str:
        """Token ids as a reader wants them: without control tokens."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


class StopStrings:
    """The text of an answer up to the first stop string, token by token. What may become a stop string is held back."""

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = stop
        self._held = ""

    def add(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """The text that these tokens make certain, and how many of them the answer has if a stop string ends it there."""
        return self.add_pieces(self._stream.add([token]) for token in token_ids)

    def add_pieces(self, pieces: Iterable[str]) -> tuple[str, int | None]:
        """As ``add``, of tokens whose texts the stream has made already."""
        for count, piece in enumerate(pieces, start=1):
            self._held += piece
            found = [place for stop in self._stop if (place := self._held.find(stop)) >= 0]
            if found:
                text, self._held = self._held[: min(found)], ""
                return text, count
        certain = len(self._held) - self._undecided()
        text, self._held = self._held[:certain], self._held[certain:]
        return text, None

    def finish(self) -> str:
        """What was held back, when the answer has ended otherwise."""
        text, self._held = self._held + self._stream.finish(), ""
        return text

    def _undecided(self) -> int:
        """How many characters at the end may begin a stop string."""
        longest = min(len(self._held), max(map(len, self._stop)) - 1)
        lengths = (length for length in range(longest, 0, -1) if self._begins_stop(self._held[-length:]))
        return next(lengths, 0)

    def _begins_stop(self, text: str) -> bool:
        return any(stop.startswith(text) for stop in self._stop)


class TextStream:
    """Turns tokens into text piece by piece; a piece never ends inside a character."""

    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter
        self._token_ids: list[int] = []
        self._settled = 0  # tokens whose text has been handed out
        self._context = 0  # where decoding starts: a few tokens back, so that spaces come out right

    def add(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain."""
        self._token_ids.extend(token_ids)
        return self._emit(final=False)

    def finish(self) -> str:
        """What was held back at the end, even if it is half a character."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        before = self._prompter.text(self._token_ids[self._context : self._settled])
        now = self._prompter.text(self._token_ids[self._context :])
        if now.endswith(_REPLACEMENT) and not final:
            return ""
        self._context = self._settled
        self._settled = len(self._token_ids)
        return now[len(before) :]


def same_tokenizer(target: Path, draft: Path) -> None:
    """Check that both models speak the same tokens.

    Raises:
        UserError: their tokenizers differ.
    """
    digests = [hashlib.sha256((path / "tokenizer.json").read_bytes()).digest() for path in (target, draft) if _has(path)]
    if len(digests) == 2 and digests[0] == digests[1]:
        return
    vocabularies = [AutoTokenizer.from_pretrained(path).get_vocab() for path in (target, draft)]
    if vocabularies[0] != vocabularies[1]:
        sizes = " and ".join(str(len(vocabulary)) for vocabulary in vocabularies)
        raise UserError(
            f"the draft {draft} has a different tokenizer than the target {target} ({sizes} tokens): "
            "use a draft of the same family, or --method pp --draft none"
        )


def _has(directory: Path) -> bool:
    return (directory / "tokenizer.json").exists()
