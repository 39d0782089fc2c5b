"""Text as it grows: token ids become text piece by piece, up to the first stop string.

Knows characters and tokens; the tokenizer itself comes in as a function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

_REPLACEMENT = "\ufffd"


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

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
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
        before = self._decode(self._token_ids[self._context : self._settled])
        now = self._decode(self._token_ids[self._context :])
        if now.endswith(_REPLACEMENT) and not final:
            return ""
        self._context = self._settled
        self._settled = len(self._token_ids)
        return now[len(before) :]
