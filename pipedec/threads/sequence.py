"""An answer as every rank replays it, token by token: its threads, the positions of their tokens, and where it ends.

Owns threads and their states, and the document: a child's tokens come directly after the token that opened it. So an answer
reads root, first child, next sibling (APAR §2.3), and asynchronous text follows its promise (PASTA §3). Knows token ids, no
texts, no model, no rows and no process. The base class has one thread; ``ThreadedSequence`` knows the dialects in which tokens
open, close and join others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from pipedec.threads.thread import Context, DecodeThread, Start, State

if TYPE_CHECKING:
    from pipedec.grammar import Grammar as Structure


class DocumentToken(NamedTuple):
    """One token of the document.

    Attributes:
        thread: number of its thread.
        ordinal: its index in the thread.
        is_control: whether it is control rather than text; true of all tokens of a tag, also of one truncated by ``max_tokens``.
        tail: text after the end of a tag, within the tag's last token. It belongs to the answer's text.
    """

    thread: int
    token_id: int
    ordinal: int
    is_control: bool
    tail: str


class Sequence:
    """An answer in one thread. Every token is text; an end token or the last of ``max_tokens`` ends the answer.

    Args:
        prompt_length: tokens of the prompt.
        end_token_ids: the model's end tokens, and the request's stop tokens.

    Attributes:
        threads: by number, the main thread first.
        main: the main thread.
        max_tokens: maximum tokens of the document, control and forced tokens included; the answer is truncated there.
        finished: None until the answer ends; then ``stop``, ``length`` (max_tokens was reached), or the argument of ``end_all``.
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

    def accept(self, number: int, token: int) -> list[Start]:
        """Append an accepted token to a thread.

        A token of a thread that was cut is ignored: another thread's token cut the thread in the same timestep.

        Returns:
            tokens that have entered because of this one, without being sampled.

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
        if is_end or len(thread.token_ids) >= self.max_tokens:
            thread.end("stop" if is_end else "length", is_cut=not is_end)
            self.finished = "stop" if is_end and len(thread.token_ids) <= self.max_tokens else "length"
        return []

    def ends_walk(self, number: int, token: int, after: Iterable[int] = ()) -> bool:
        """Whether ``token`` joins or ends the thread, so that its successor cannot be predicted yet.

        Args:
            after: text and openers between the thread's own tokens and ``token``, not accepted yet.
        """
        return token in self._end_token_ids or len(self.threads[number].token_ids) + len(tuple(after)) + 1 >= self.max_tokens

    def end_all(self, reason: str) -> None:
        """End all open threads for a reason that is not one of their tokens: ``cancelled``, a stop string, or ``cache_full``."""
        if self.finished is not None:
            return
        for thread in self.threads:
            if thread.state is not State.ENDED:
                thread.end(reason, is_cut=True)
        self.finished = reason

    @property
    def anomalies(self) -> dict[str, int]:
        """Count by name (see ``Anomaly``). Tokens decoded beyond ``max_tokens`` of the document depend on the interleaving."""
        return {}

    def sees(self, number: int, index: int) -> Context:
        """``context`` of a token, and its own thread's tokens up to itself, inclusive."""
        return (*self.threads[number].context(index), (number, index + 1))

    def banned(self, number: int, after: Iterable[int] = ()) -> frozenset[int]:
        """Tokens that may not be sampled next in a thread, after the tokens ``after``, which are not accepted yet."""
        return frozenset()

    def gap(self, number: int, path: list[int]) -> int:
        """The number of positions left empty between the last token of ``path`` and its successor.

        Args:
            path: text and openers after the thread's own tokens, not accepted yet.
        """
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
        ordered = enumerate(islice(_in_document_order(self.threads, self.main), self.max_tokens))
        return [_document_token(thread, index, self.max_tokens - count) for count, (thread, index) in ordered]

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


def _in_document_order(threads: list[DecodeThread], thread: DecodeThread) -> Iterator[tuple[DecodeThread, int]]:
    children = {threads[number].opened_at: threads[number] for number in thread.children}
    for index in range(thread.num_tokens):
        yield thread, index
        if index + 1 in children:
            yield from _in_document_order(threads, children[index + 1])


def _document_token(thread: DecodeThread, index: int, remaining: int) -> DocumentToken:
    """Token ``index`` of a thread.

    Args:
        remaining: number of tokens from this one on that fit into ``max_tokens``. A tag's tokens are consecutive in the
            document, so a token of a broken tag is text if the token that broke the tag is among them.
    """
    is_reverted = thread.reverted.get(index, index + remaining) < index + remaining
    is_control = thread.is_control[index] and not is_reverted
    return DocumentToken(thread.number, thread.token_ids[index], index, is_control, thread.tails.get(index, ""))


def next_indices(threads: list[DecodeThread]) -> list[int]:
    """For each thread, the smallest index that its next token can have in the document; tokens yet to come may precede it."""
    sizes = [thread.num_tokens for thread in threads]
    for thread in reversed(threads[1:]):  # children have larger numbers than their parents
        assert thread.parent is not None
        sizes[thread.parent] += sizes[thread.number]
    starts = [0] * len(threads)
    for thread in threads:
        earlier = 0
        for number in thread.children:
            starts[number] = starts[thread.number] + threads[number].opened_at + earlier
            earlier += sizes[number]
    return [start + size for start, size in zip(starts, sizes, strict=True)]


class ReorderBuffer:
    """Returns each token of an answer once, in document order, as soon as no other token can still precede it."""

    def __init__(self, threads: list[DecodeThread], max_tokens: int) -> None:
        self._threads = threads
        self._remaining = max_tokens
        self._stack = [0]  # the thread being read and its ancestors, outermost first
        self._taken = [0]  # number of tokens already returned of each thread on the stack
        self._visited: set[int] = set()

    def take(self) -> list[DocumentToken]:
        """The tokens that have become available since the last call."""
        taken = []
        while self._remaining and self._stack:
            thread, index = self._threads[self._stack[-1]], self._taken[-1]
            opened = (number for number in thread.children if self._threads[number].opened_at == index)
            child = next((number for number in opened if number not in self._visited), None)
            if child is not None:
                self._visited.add(child)
                self._stack.append(child)
                self._taken.append(0)
            elif index < (thread.tag.start if thread.tag else thread.num_tokens):
                taken.append(_document_token(thread, index, self._remaining))
                self._taken[-1] += 1
                self._remaining -= 1
            elif thread.state is State.ENDED:
                self._stack.pop()
                self._taken.pop()
            else:
                break
        return taken


def replay(sequence: Sequence, token_ids: Iterable[int]) -> None:
    """Pass an answer to a new sequence, for training and for measuring.

    Args:
        token_ids: tokens in document order, control and forced tokens included. The answer may be incomplete.

    Raises:
        ValueError: an opener is not followed by its forced token, or tokens follow the end of the answer.
    """
    open_threads = [0]  # the current thread and its ancestors, outermost first
    tokens = iter(token_ids)
    for token in tokens:
        if not open_threads:
            if sequence.finished == "length":
                return
            raise ValueError("tokens follow the end of the answer")
        known = len(sequence.threads)
        sequence.accept(open_threads[-1], token)
        for child in sequence.threads[known:]:
            forced = next(tokens, child.token_ids[0])
            if forced != child.token_ids[0]:
                raise ValueError(f"token {forced} follows an opener instead of the forced token {child.token_ids[0]}")
            open_threads.append(child.number)
        while open_threads and sequence.threads[open_threads[-1]].state is State.ENDED:
            open_threads.pop()
