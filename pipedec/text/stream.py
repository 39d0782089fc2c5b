"""Incremental detokenization, up to the first stop string.

Knows characters and token ids; the tokenizer is passed in as a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

_REPLACEMENT = "\ufffd"
_MARK = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs, which no text has


class StopStrings:
    """The text of an answer up to the first stop string, excluded. Text that may begin a stop string is held back.

    Args:
        special: names of special tokens by id. They are no text, but a stop string that contains the name of one ends the answer
            there, too.
    """

    def __init__(self, stream: TextStream, stop: Sequence[str], special: Mapping[int, str] | None = None) -> None:
        named = {name for name in (special or {}).values() if any(name in text for text in stop)}
        marks = dict(zip(sorted(named, key=len, reverse=True), map(chr, range(0xD800, 0xE000)), strict=False))
        self._marks = {token: marks[name] for token, name in (special or {}).items() if name in marks}
        self._stream = stream
        self._stop = stop
        self._marked_stop = [marked for text in stop if (marked := _replaced(text, marks)) != text]
        self._held = ""  # text, with a mark in place of each special token that a stop string names

    def add_pieces(self, pieces: Iterable[tuple[int, str]]) -> tuple[str, int | None]:
        """Add decoded tokens, each with the text that it has made final. Returns the text that is now final, and the number of
        these tokens that belong to the answer if a stop string ends it, else None.
        """
        for count, (token, piece) in enumerate(pieces, start=1):
            self._held += piece + self._marks.get(token, "")
            text = _shown(self._held)
            starts = [start for stop in self._stop if (start := text.find(stop)) >= 0]
            starts += [len(_shown(self._held[:at])) for stop in self._marked_stop if (at := self._held.find(stop)) >= 0]
            if starts:
                self._held = ""
                return text[: min(starts)], count
        text = _shown(self._held)
        num_final = len(text) - num_begun(text, self._stop)
        places = [place for place, letter in enumerate(self._held) if not "\ud800" <= letter <= "\udfff"]
        final = min([*places[num_final : num_final + 1], len(self._held) - num_begun(self._held, self._marked_stop)])
        text, self._held = _shown(self._held[:final]), self._held[final:]
        return text, None

    def finish(self) -> str:
        """The text still held back, when the answer has ended without a stop string."""
        text, self._held = _shown(self._held) + self._stream.finish(), ""
        return text


def num_begun(text: str, marks: Sequence[str]) -> int:
    """Number of characters at the end of a text that may be the beginning of a mark that it does not contain."""
    longest = min(len(text), max(map(len, marks), default=1) - 1)
    return next((length for length in range(longest, 0, -1) if any(mark.startswith(text[-length:]) for mark in marks)), 0)


def _replaced(text: str, marks: Mapping[str, str]) -> str:
    for name, mark in marks.items():
        text = text.replace(name, mark)
    return text


def _shown(text: str) -> str:
    """Without marks."""
    return _MARK.sub("", text)


class TextStream:
    """Turns tokens into text incrementally. A piece never ends inside a character."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._token_ids: list[int] = []  # from a few tokens before the next piece on, so that spaces between words are right
        self._num_emitted = 0  # how many of them have had their text returned

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now final."""
        self._token_ids.extend(token_ids)
        return self._emit(final=False)

    def finish(self) -> str:
        """The text still held back, even if it ends in an incomplete character."""
        return self._emit(final=True)

    def _emit(self, final: bool) -> str:
        before = self._decode(self._token_ids[: self._num_emitted])
        now = self._decode(self._token_ids)
        if now.endswith(_REPLACEMENT) and not final:
            return ""
        del self._token_ids[: self._num_emitted]
        self._num_emitted = len(self._token_ids)
        return now[len(before) :]
