"""The text of one answer: which of its tokens are text, and the stop string that ends it. Knows no threads and no engine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from pipedec.core.sampling import SamplingParams
from pipedec.text.stream import StopStrings, TextStream
from pipedec.text.tokenizer import Tokenizer


def hidden_tokens(tokenizer: Tokenizer, sampling: SamplingParams) -> frozenset[int]:
    """The special tokens that are no text of an answer."""
    return tokenizer.all_special_ids.difference(sampling.shown_special_tokens) if sampling.skip_special_tokens else frozenset()


def text_stream(tokenizer: Tokenizer, sampling: SamplingParams) -> TextStream:
    """A new incremental decoder for tokens of an answer."""
    return TextStream(partial(tokenizer.decode, skip_special_tokens=False), hidden_tokens(tokenizer, sampling))


class AnswerText:
    """Turns the tokens of an answer into its text, up to the first stop string.

    Attributes:
        stop_reason: the stop string or the one of ``stop_token_ids`` that has ended the answer; None if neither has.
    """

    def __init__(self, tokenizer: Tokenizer, sampling: SamplingParams) -> None:
        self.stop_reason: str | int | None = None
        self._sampling = sampling
        self._stream = text_stream(tokenizer, sampling)
        hidden = hidden_tokens(tokenizer, sampling) if sampling.stop else ()
        names = {token: tokenizer.special_names[token] for token in hidden}
        self._stops = StopStrings(sampling.stop, names, sampling.min_tokens, sampling.include_stop_str_in_output)

    def piece(self, token: int, is_end: bool = False) -> str:
        """The text that becomes final with the next token.

        Args:
            is_end: it is an end token or a stop token, which ends the answer. It is text only with
                ``include_stop_str_in_output``.
        """
        if is_end:
            self.stop_reason = token if token in self._sampling.stop_token_ids else None
        return self._stream.add([token]) if self._sampling.include_stop_str_in_output or not is_end else ""

    def add_pieces(self, pieces: Iterable[tuple[int, str]]) -> tuple[str, int | None]:
        """See ``StopStrings.add_pieces``."""
        text, count = self._stops.add_pieces(pieces)
        if count is not None:
            self.stop_reason = self._stops.found
        return text, count

    def finish(self) -> str:
        """The text still held back, when the answer has ended without a stop string."""
        return self._stops.finish() + self._stream.finish()
