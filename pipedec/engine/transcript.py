"""The final part of an answer as text: document order of threads, characters, stop strings.

An answer in one thread is a document of one thread. Knows no clients: ``answer`` keeps how much they have received.
"""

from __future__ import annotations

from msgspec.structs import replace

from pipedec.core import Verdict
from pipedec.text.prompt import Prompter
from pipedec.text.stream import StopStrings
from pipedec.threads import DocumentToken, Sequence

Place = tuple[tuple[int, ...], int]  # of an accepted token, in any order of decoding: path of its thread, ordinal there


class Transcript:
    """Replays verdicts into a sequence of its own.

    Args:
        sequence: advanced only by this object. It may have begun.
        stop: stop strings.

    Attributes:
        token_ids: in document order.
        text: the final text, without characters that may yet be part of a stop string.
        finished: why the answer has ended; None while it goes on.
    """

    def __init__(self, sequence: Sequence, prompter: Prompter, stop: str | tuple[str, ...]) -> None:
        self.sequence = sequence
        self.token_ids: list[int] = []
        self.text = ""
        self.finished: str | None = None
        self._reader = sequence.reader()
        self._stream = prompter.stream()
        self._stops = StopStrings(self._stream, stop) if stop else None
        self._read(sequence.finished)

    def take(self, verdict: Verdict) -> tuple[Verdict, list[Place | None]]:
        """Add the accepted tokens.

        Returns:
            the verdict, cut and finished if a stop string ends the answer; and the place of each of its tokens, None for a
            token of a thread that had been cut.
        """
        places = [self._accept(number, token) for number, tokens, _ in verdict.accepted for token in tokens]
        count = self._read(verdict.finished)
        if count is None:
            return verdict, places
        if self.sequence.can_fork:  # all accepted tokens are replayed
            return replace(verdict, finished="stop"), places
        return Verdict.of(*verdict.tokens[:count], finished="stop"), places

    def _accept(self, number: int, token: int) -> Place | None:
        thread = self.sequence.threads[number]
        if thread.is_cut:
            return None
        place = thread.path, thread.num_tokens
        self.sequence.accept(number, token)
        return place

    def _read(self, finished: str | None) -> int | None:
        """Read the tokens that have become final. Returns how many were read if a stop string ends the answer with them."""
        tokens = self._reader.take()
        text, count = self._text_of(tokens)
        if count is not None:
            del tokens[count:]
            finished = "stop"
            self.sequence.end_all("stop")
        elif finished is not None:
            text += self._release(tokens, finished)
        self.token_ids += [token.token_id for token in tokens]
        self.text += text
        self.finished = finished
        return count

    def _text_of(self, tokens: list[DocumentToken]) -> tuple[str, int | None]:
        """The final text of tokens, and the number of them up to a stop string, if there is one."""
        pieces = [self._stream.add([token.token_id]) if self.sequence.is_shown(token) else token.tail for token in tokens]
        return ("".join(pieces), None) if self._stops is None else self._stops.add_pieces(pieces)

    def _release(self, tokens: list[DocumentToken], reason: str) -> str:
        """At the end of the answer, add the tokens that were held back to ``tokens``, and return the rest of the text."""
        self.sequence.end_all(reason)
        rest = self._reader.take()
        text, count = self._text_of(rest)
        tokens += rest[:count]
        return text if count is not None else text + (self._stops or self._stream).finish()
