"""Incremental detokenization, up to the first stop string.

Knows characters and token ids; the tokenizer is passed in as a function.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import AnyStr

_REPLACEMENT = "\ufffd"
_MARK = re.compile("[\ud800-\udfff]")  # halves of surrogate pairs, which no text has


class StopStrings:
    """The text of an answer up to the first stop string. Text that may begin a stop string is held back.

    Args:
        hidden: names, by id, of special tokens that are no text. A stop string that contains the name of one ends the answer
            there, too.
        min_tokens: a stop string that these first tokens complete ends nothing.
        includes: the text ends with the stop string, not before it.

    Attributes:
        found: the stop string that has ended the answer; of several that begin in the same place, the shortest. None if none
            has.
    """

    def __init__(
        self, stop: Sequence[str], hidden: Mapping[int, str] | None = None, min_tokens: int = 0, includes: bool = False
    ) -> None:
        named = {name for name in (hidden or {}).values() if any(name in text for text in stop)}
        marks = dict(zip(sorted(named, key=len, reverse=True), map(chr, range(0xD800, 0xE000)), strict=False))
        self.found: str | None = None
        self._marks = {token: marks[name] for token, name in (hidden or {}).items() if name in marks}
        self._stop = stop
        self._marked_stop = {marked: text for text in stop if (marked := _replaced(text, marks)) != text}
        self._held = ""  # text, with a mark in place of each special token that a stop string names
        self._num_early = min_tokens  # of the next tokens, in which stop strings end nothing
        self._early = 0  # characters of the held text that come from such tokens
        self._includes = includes

    def add_pieces(self, pieces: Iterable[tuple[int, str]]) -> tuple[str, int | None]:
        """Add decoded tokens, each with the text that it has made final. Returns the text that is now final, and the number of
        these tokens that belong to the answer if a stop string ends it, else None.
        """
        if not self._stop:
            return "".join([piece for _, piece in pieces]), None
        for count, (token, piece) in enumerate(pieces, start=1):
            self._held += piece + self._marks.get(token, "")
            if self._num_early:
                self._num_early, self._early = self._num_early - 1, len(self._held)
            elif occurrences := self._occurrences():
                start, _, self.found = min(occurrences)
                text, self._held = _shown(self._held)[:start] + self.found * self._includes, ""
                return text, count
        text = _shown(self._held)
        num_final = len(text) - num_begun(text, self._stop)
        places = [place for place, letter in enumerate(self._held) if not "\ud800" <= letter <= "\udfff"]
        final = min([*places[num_final : num_final + 1], len(self._held) - num_begun(self._held, [*self._marked_stop])])
        text, self._held, self._early = _shown(self._held[:final]), self._held[final:], max(self._early - final, 0)
        return text, None

    def _occurrences(self) -> list[tuple[int, int, str]]:
        """Each stop string that ends after the early text: where it begins in the held text without marks, its length, itself."""
        text, early = _shown(self._held), len(_shown(self._held[: self._early]))
        found = [(text.find(stop, max(early - len(stop) + 1, 0)), len(stop), stop) for stop in self._stop]
        for marked, stop in self._marked_stop.items():
            if (at := self._held.find(marked, max(self._early - len(marked) + 1, 0))) >= 0:
                found.append((len(_shown(self._held[:at])), len(stop), stop))
        return [place for place in found if place[0] >= 0]

    def finish(self) -> str:
        """The text still held back, when the answer has ended without a stop string."""
        text, self._held = _shown(self._held), ""
        return text


def num_begun(text: AnyStr, marks: Sequence[AnyStr]) -> int:
    """Number of characters (or bytes) at the end of a text that may be the beginning of a mark that it does not contain."""
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
    """Turns tokens into text incrementally. A piece never ends inside a character. ``hidden``: tokens without text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], hidden: Collection[int] = ()) -> None:
        self._decode = decode
        self._hidden = hidden
        self._token_ids: list[int] = []  # from a few tokens before the next piece on, so that spaces between words are right
        self._num_emitted = 0  # how many of them have had their text returned

    def add(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is now final."""
        shown = [token for token in token_ids if token not in self._hidden]
        self._token_ids += shown
        return self._emit(final=False) if shown else ""

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
