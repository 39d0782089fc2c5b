"""New tokens and text of each decode thread of an answer, for clients that watch the threads grow."""

from __future__ import annotations

from pipedec.messages import ThreadNews
from pipedec.text.prompt import Prompter
from pipedec.text.stream import TextStream
from pipedec.threads import DecodeThread, Sequence

_Path = tuple[int, ...]


class _ThreadText:
    """The text of one thread, of which ``num_tokens`` tokens have been read."""

    def __init__(self, stream: TextStream) -> None:
        self.text = ""
        self.num_tokens = 0
        self._stream = stream

    def read(self, thread: DecodeThread) -> None:
        added = zip(thread.token_ids[self.num_tokens :], thread.is_control[self.num_tokens :], strict=True)
        self.text += "".join(self._stream.add([token]) for token, is_control in added if not is_control)
        self.num_tokens = thread.num_tokens


class News:
    """Reports every piece of every thread once, even if the answer is generated again from its first token."""

    def __init__(self, prompter: Prompter) -> None:
        self._prompter = prompter
        self._lines: dict[_Path, _ThreadText] = {}
        self._published: dict[_Path, tuple[int, int]] = {}  # by thread: tokens and characters reported so far

    def restart(self) -> None:
        """Begin again: the answer is being generated once more."""
        self._lines.clear()

    def take(self, sequence: Sequence) -> list[ThreadNews]:
        """New pieces since the last call."""
        news = (self._of(thread) for thread in sequence.threads)
        return [one for one in news if one is not None]

    def _of(self, thread: DecodeThread) -> ThreadNews | None:
        tokens, characters = self._published.get(thread.path, (0, 0))
        line = self._lines.setdefault(thread.path, _ThreadText(self._prompter.stream()))
        line.read(thread)
        if thread.num_tokens <= tokens and tokens > 0:
            return None
        self._published[thread.path] = thread.num_tokens, max(characters, len(line.text))
        return ThreadNews(thread.path, line.text[characters:], thread.state.value, thread.num_tokens, characters)
