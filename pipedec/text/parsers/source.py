"""Text that comes piece by piece, read by generators that wait for more of it.

A reader is a generator: it yields what it has found, and ``MORE`` where it cannot go on before more text has come. It never sees
where one piece ends and the next begins, so that what it finds does not depend on that. Knows characters; no forms of answers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from enum import Enum
from functools import lru_cache
from typing import Final, TypeVar

import regex


class More(Enum):
    """The only member asks for more text."""

    MORE = "more"


MORE: Final = More.MORE
BLANKS = " \t\r\n"
ANY_BLANKS = r"\s{0,99}"  # a pattern

Found = TypeVar("Found")
Result = TypeVar("Result")
Waiting = Generator[More, None, Result]  # yields nothing but MORE
Pieces = Generator[str | More, None, Result]  # yields pieces of text


class EndOfText(Exception):
    """The text has ended where more of it is needed."""


class Source:
    """The text that has come and is not yet read."""

    def __init__(self) -> None:
        self._text = ""
        self._place = 0  # characters before it have been read
        self._held: int | None = None  # what is read from here on is kept
        self._kept: list[str] = []  # what was read and kept before more text came
        self._is_closed = False

    def add(self, text: str) -> None:
        """More text has come. What has been read before it can no longer be unread."""
        if self._held is not None:
            self._kept.append(self._text[self._held : self._place])
            self._held = 0
        self._text = self._text[self._place :] + text
        self._place = 0

    def close(self) -> None:
        """No more text comes."""
        self._is_closed = True

    def hold(self, mark: str) -> None:
        """Keep what is read from now on, and the ``mark`` that was read last."""
        self._held, self._kept = self._place - len(mark), []

    def release(self) -> str:
        """Keep no more; returns what was kept."""
        held = "" if self._held is None else self._text[self._held : self._place]
        kept, self._held, self._kept = "".join([*self._kept, held]), None, []
        return kept

    @property
    def is_holding(self) -> bool:
        return self._held is not None

    @property
    def is_over(self) -> bool:
        return self._is_closed and self._place == len(self._text)

    def read(self, length: int | None = None) -> str:
        """The next ``length`` characters; None: all that have come."""
        text = self._text[self._place :] if length is None else self._text[self._place : self._place + length]
        self._place += len(text)
        return text

    def unread(self, text: str) -> None:
        """Put back the ``text`` that was read last."""
        self._place -= len(text)

    def more(self) -> Waiting[None]:
        """Wait for more text. Raises EndOfText if none comes."""
        if self._is_closed:
            raise EndOfText
        yield MORE

    def skip(self, characters: str = BLANKS) -> Waiting[str]:
        """Read as long as only ``characters`` come; returns them. The end of the text is no error."""
        skipped = []
        while True:
            rest = self._text[self._place :]
            skipped.append(self.read(len(rest) - len(rest.lstrip(characters))))
            if self._is_closed or self._place < len(self._text):
                return "".join(skipped)
            yield MORE

    def mark(self, marks: Iterable[str]) -> Waiting[str | None]:
        """Read the mark that comes next; None if none of them does. The end of the text is no error."""
        longest = max(map(len, marks), default=0)
        while True:
            rest = self._text[self._place : self._place + longest]
            found = next((mark for mark in marks if rest.startswith(mark)), None)
            if found is not None:
                self._place += len(found)
                return found
            if self._is_closed or not any(mark.startswith(rest) for mark in marks):
                return None
            yield MORE

    def take(self, pattern: regex.Pattern[str]) -> Waiting[regex.Match[str] | None]:
        """Read what matches the pattern; None, and nothing is read, if what comes next does not.

        The pattern ends in something definite, not in a repetition, and limits its repetitions: it is tried again whenever text
        comes. Raises EndOfText if the text ends before it is decided.
        """
        while True:
            found = pattern.match(self._text, self._place, partial=True)
            if found is None or not found.partial:
                self._place = self._place if found is None else found.end()
                return found
            yield from self.more()

    def search(self, pattern: regex.Pattern[str]) -> Pieces[regex.Match[str]]:
        """The text up to what matches the pattern, as it comes; returns the match, which is read, too. Patterns as for ``take``.

        Raises EndOfText after the last piece if there is none.
        """
        while (found := pattern.search(self._text, self._place, partial=not self._is_closed)) is None or found.partial:
            end = len(self._text) if found is None else found.start()
            if piece := self.read(end - self._place):
                yield piece
            yield from self.more()
        if piece := self.read(found.start() - self._place):
            yield piece
        self._place = found.end()
        return found

    def until(self, marks: Iterable[str]) -> Pieces[str]:
        """As ``search`` for the first of the marks, which it returns. No mark contains another."""
        found = yield from self.search(_any_of(tuple(marks)))
        return found[0]


@lru_cache(maxsize=64)
def _any_of(marks: tuple[str, ...]) -> regex.Pattern[str]:
    return regex.compile("|".join(map(regex.escape, marks)) or "(?!)")


def each(pieces: Pieces[Result], change: Callable[[str], Found]) -> Generator[Found | More, None, Result]:
    """The pieces, changed; returns as they do."""
    while True:
        try:
            piece = next(pieces)
        except StopIteration as end:
            return end.value
        yield MORE if isinstance(piece, More) else change(piece)


def joined(pieces: Pieces[object]) -> Waiting[str]:
    """All pieces, when the last one has come."""
    texts = []
    for piece in pieces:
        if isinstance(piece, str):
            texts.append(piece)
        else:
            yield piece
    return "".join(texts)


class TrailingBlanks:
    """Holds back the blanks at the end of text that comes in pieces."""

    def __init__(self, blanks: str = "") -> None:
        self._held = [blanks]

    def add(self, piece: str) -> str:
        """The text that is known not to be blanks at the end."""
        body = piece.rstrip()
        if not body:
            self._held.append(piece)
            return ""
        text = "".join([*self._held, body])
        self._held = [piece[len(body) :]]
        return text

    def held(self) -> str:
        return "".join(self._held)
