"""Incremental detokenization, up to the first stop string.

Knows characters and token ids; the tokenizer is passed in as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\ufffd"


class StopStrings:
    """The text of an answer up to the first stop string, excluded. Text that may begin a stop string is held back."""

    def __init__(self, stream: TextStream, stop: Sequence[str]) -> None:
        self._stream = stream
        self._stop = stop
        self._held = ""

    def add_pieces(self, pieces: Iterable[str]) -> tuple[str, int | None]:
        """Add decoded tokens, one piece of text per token. Returns the text that is now final, and the number of these tokens
        that belong to the answer if a stop string ends it, else None.
        """
        for count, piece in enumerate(pieces, start=1):
            self._held += piece
            starts = [start for stop in self._stop if (start := self._held.find(stop)) >= 0]
            if starts:
                text, self._held = self._held[: min(starts)], ""
                return text, count
        final = len(self._held) - num_begun(self._held, self._stop)
        text, self._held = self._held[:final], self._held[final:]
        return text, None

    def finish(self) -> str:
        """The text still held back, when the answer has ended without a stop string."""
        text, self._held = self._held + self._stream.finish(), ""
        return text


def num_begun(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of a text that may be the beginning of a mark that it does not contain."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((length for length in range(longest, 0, -1) if any(mark.startswith(text[-length:]) for mark in marks)), 0)


class TextStream:
    """Turns tokens into text incrementally. A piece never ends inside a character."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []
        self._num_emitted = 0  # tokens whose text has been returned
        self._context = 0  # decoding starts here, a few tokens back, so that spaces between words are right

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now final."""
        self._token_ids.extend(token_ids)
        return self._emit(final=False)

    def finish(self) -> str:
        """The text still held back, even if it ends in an incomplete character."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        before = self._decode(self._token_ids[self._context : self._num_emitted])
        now = self._decode(self._token_ids[self._context :])
        if now.endswith(_REPLACEMENT) and not final:
            return ""
        self._context = self._num_emitted
        self._num_emitted = len(self._token_ids)
        return now[len(before) :]
