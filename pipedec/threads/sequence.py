"""An answer as every rank replays it, token by token: its threads, the positions of their tokens, and where it ends.

Owns threads and their states; knows token ids, no texts, no model, no rows and no process. The base class has one thread;
``ThreadedSequence`` knows the dialects in which tokens open, close and join others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from pipedec.threads.document import DocumentToken, ReorderBuffer, document
from pipedec.threads.events import Event, Finished, ThreadEnded
from pipedec.threads.thread import Context, DecodeThread, State

if TYPE_CHECKING:
    from pipedec.grammar import Grammar as Structure


class Sequence:
    """An answer in one thread. Every token is text; an end token or the last of ``max_tokens`` ends the answer.

    Args:
        prompt_length: tokens of the prompt.
        end_token_ids: the model's end tokens, and the request's stop tokens.

    Attributes:
        threads: by number, the main thread first.
        main: the main thread.
        max_tokens: maximum tokens of the document, control and forced tokens included; the answer is truncated there.
        finished: None until the answer ends; then the ``reason`` of ``Finished``.
        grammar: what the answer, which is in one thread, must look like: as far as the accepted tokens. None for any text.
        can_fork: whether the answer may ever have more than one thread.
        leaves_gaps: whether positions are left empty after openers.
    """

    can_fork = False
    leaves_gaps = False

    def __init__(
        self, prompt_length: int, end_token_ids: Iterable[int], max_tokens: int, grammar: Structure | None = None
    ) -> None:
        self.prompt_length = prompt_length
        self.max_tokens = max_tokens
        self.grammar = grammar
        self.main = DecodeThread(next_position=prompt_length)
        self.threads = [self.main]
        self.finished: str | None = None
        self._end_token_ids = frozenset(end_token_ids)

    def accept(self, number: int, token: int) -> list[Event]:
        """Append an accepted token to a thread. Forced tokens are appended by the opener's call; see ``Opened``.

        A token of a thread that was cut is ignored: another thread's token cut the thread in the same timestep.

        Raises:
            ValueError: the thread is waiting or has ended without being cut.
        """
        thread = self.threads[number]
        if thread.is_cut:
            return []
        if thread.state is not State.RUNNING:
            raise ValueError(f"token {token} for thread {number}, which is {thread.state.value}")
        if self.grammar is not None:
            self.grammar.advance((token,))
        is_end = token in self._end_token_ids
        thread.enter(token, is_end)
        if not is_end and len(thread.token_ids) < self.max_tokens:
            return []
        thread.end("stop" if is_end else "length", is_cut=not is_end)
        self.finished = "stop" if is_end and len(thread.token_ids) <= self.max_tokens else "length"
        return [ThreadEnded(thread.number, "stop" if is_end else "length"), Finished(self.finished)]

    def ends_walk(self, number: int, token: int, after: Iterable[int] = ()) -> bool:
        """Whether ``token`` joins or ends the thread, so that its successor cannot be predicted yet.

        Args:
            after: text and openers between the thread's own tokens and ``token``, not accepted yet.
        """
        return token in self._end_token_ids or len(self.threads[number].token_ids) + len(tuple(after)) + 1 >= self.max_tokens

    def end_all(self, reason: str) -> list[Event]:
        """End all open threads for a reason that is not one of their tokens: ``cancelled``, a stop string, or ``cache_full``."""
        if self.finished is not None:
            return []
        events: list[Event] = []
        for thread in self.threads:
            if thread.state is not State.ENDED:
                thread.end(reason, is_cut=True)
                events.append(ThreadEnded(thread.number, reason))
        self.finished = reason
        return [*events, Finished(reason)]

    @property
    def anomalies(self) -> dict[str, int]:
        """Count by name (see ``ANOMALIES``). Tokens decoded beyond ``max_tokens`` of the document depend on the interleaving."""
        return {}

    def at(self, path: tuple[int, ...]) -> DecodeThread:
        """The thread with this path.

        Raises:
            KeyError: it is not open yet.
        """
        return {thread.path: thread for thread in self.threads}[path]

    def next_position(self, number: int) -> int:
        """Position id of the thread's next token. The position of a waiting join token is known only from ``Joined``."""
        return self.threads[number].next_position

    def context(self, number: int, index: int | None = None) -> Context:
        """The tokens of other threads that token ``index`` of a thread (default: the next) attends to.

        Returns:
            (thread number, number of its leading tokens) in a fixed order: the parent's context, the parent, joined threads.
        """
        return self.threads[number].context(index)

    def sees(self, number: int, index: int) -> Context:
        """``context`` of a token, and its own thread's tokens up to itself, inclusive."""
        return (*self.threads[number].context(index), (number, index + 1))

    def banned(self, number: int, after: Iterable[int] = ()) -> frozenset[int]:
        """Tokens that may not be sampled next in a thread, after the tokens ``after``, which are not accepted yet."""
        return frozenset()

    def following(self, number: int, path: list[int]) -> tuple[int, frozenset[int]]:
        """Constraints on the token after ``path``.

        Args:
            path: text and openers after the thread's own tokens, not accepted yet.

        Returns:
            its position id, and the tokens that are banned there.
        """
        return self.threads[number].next_position + len(path), self.banned(number, path)

    def gap(self, number: int, path: list[int]) -> int:
        """The number of positions left empty between the last token of ``path`` and its successor."""
        return 0

    def may_leave_gap(self, token: int) -> bool:
        """Whether positions might be left empty after this token."""
        return False

    def needed(self) -> list[int]:
        """For each thread, the number of its leading tokens that a later token may still attend to."""
        return [0 if thread.state is State.ENDED else thread.num_tokens for thread in self.threads]

    def released(self) -> tuple[int, ...]:
        """Threads whose tokens no later token attends to, so that their cache can be freed (APAR §2.4, early release)."""
        return tuple(number for number, count in enumerate(self.needed()) if count == 0)

    def document(self) -> list[DocumentToken]:
        """The tokens generated so far, in document order, truncated at ``max_tokens``."""
        return document(self.threads, self.max_tokens)

    def reader(self) -> ReorderBuffer:
        """A buffer that streams the document."""
        return ReorderBuffer(self.threads, self.max_tokens)

    def is_control(self, token: int) -> bool:
        """Whether a token is control rather than text in every context."""
        return token in self._end_token_ids

    def is_shown(self, token: DocumentToken) -> bool:
        """Whether the token appears in the text that users read."""
        return True


NewSequence = Callable[[], Sequence]  # makes the sequence of a new answer
