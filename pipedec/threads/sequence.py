"""An answer as every rank replays it, token by token: its threads, the positions of their tokens, and where it ends.

Owns threads and their states, and the document: a child's tokens come directly after the token that opened it. So an answer
reads root, first child, next sibling (APAR §2.3), and asynchronous text follows its promise (PASTA §3). Knows token ids, no
texts, no model, no rows and no process. The base class has one thread; ``ThreadedSequence`` knows the dialects in which tokens
open, close and join others.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING, NamedTuple

from pipedec.threads.dialect import OpenerTag

if TYPE_CHECKING:
    from pipedec.grammar import Grammar as Structure

Context = tuple[tuple[int, int], ...]  # (thread number, number of its leading tokens)


class State(Enum):
    """A thread waits for its open children before its join token enters, or before it ends."""

    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"


class Anomaly(StrEnum):
    """Structural errors in a threaded answer. Each is counted and resolved by a fixed rule (docs/threads.md)."""

    UNCLOSED_CHILD = "unclosed_child"
    LENGTH_MISSING = "length_missing"
    LENGTH_CLAMPED = "length_clamped"
    LENGTH_EXCEEDED = "length_exceeded"
    OPENER_NOT_COMPLETED = "opener_not_completed"
    OPENER_TOO_DEEP = "opener_too_deep"
    OPENER_OUT_OF_PLACE = "opener_out_of_place"
    TOO_MANY_CHILDREN = "too_many_children"
    JOIN_WITHOUT_CHILDREN = "join_without_children"
    END_WITHOUT_JOIN = "end_without_join"
    CLOSE_OUTSIDE_CHILD = "close_outside_child"
    END_TOKEN_IN_CHILD = "end_token_in_child"
    FORCED_TOKEN_SAMPLED = "forced_token_sampled"
    CACHE_FULL = "cache_full"


@dataclass(frozen=True)
class Start:
    """A token that enters ``thread`` without being sampled: a child's forced first token, or a join token after the wait."""

    thread: int
    token: int


@dataclass(frozen=True)
class Join:
    """From its join token, at ``index``, a thread attends to ``context``: all tokens of the joined threads."""

    index: int
    context: Context


@dataclass
class DecodeThread:
    """Tokens decoded one after another.

    Attributes:
        number: index in order of opening, which depends on the interleaving of threads. The main thread is 0.
        path: child indices on the way from the main thread to this one, () for the main thread: an identity that does not
            depend on the interleaving.
        parent: number of the thread that opened it; None for the main thread.
        opened_at: number of the parent's tokens up to the opener, inclusive; the thread attends to these.
        inherited: what all its tokens attend to in other threads: the parent's context, and the parent.
        next_position: position of the next token, unless that is a join token.
        predicted_length: predicted number of its tokens; None if the dialect predicts none.
        is_control: for each token, whether it is control rather than text. All tokens of a tag are control.
        reverted: tokens of broken tags, which are text: index of the token → index of the token that broke the tag.
        tails: text after the end of a tag within the tag's last token, by the index of that token.
        children: their numbers, in order of opening.
        unjoined: the children that the thread has not joined yet.
        tag: the incomplete tag of an opener, if any.
        pending: an accepted token that waits for the children and is not in ``token_ids`` yet.
        ended_by: ``stop`` (end token), ``close``, ``limit`` (the dialect's max_child_tokens), ``length`` (max_tokens), or the
            argument of ``Sequence.end_all``. Of a waiting thread: the reason why it will end; None if it waits for a join.
        is_cut: whether it was ended by something other than its own token; then further tokens accepted for it in the same
            timestep are void.
    """

    number: int = 0
    path: tuple[int, ...] = ()
    parent: int | None = None
    opened_at: int = 0
    inherited: Context = ()
    next_position: int = 0
    predicted_length: int | None = None
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    is_control: list[bool] = field(default_factory=list)
    reverted: dict[int, int] = field(default_factory=dict)
    tails: dict[int, str] = field(default_factory=dict)
    children: list[int] = field(default_factory=list)
    unjoined: list[int] = field(default_factory=list)
    joins: list[Join] = field(default_factory=list)
    tag: OpenerTag | None = None
    pending: int | None = None
    state: State = State.RUNNING
    ended_by: str | None = None
    is_cut: bool = False

    @property
    def noise_stream(self) -> int:
        """The thread's stream of sampling noise (see ``gumbel``): a function of its path, 0 for the main thread."""
        return zlib.crc32(",".join(map(str, self.path)).encode())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_closing(self) -> bool:
        """Whether it waits to end, not to join."""
        return self.state is State.WAITING and self.ended_by is not None

    def context(self, index: int | None = None) -> Context:
        """The tokens of other threads that token ``index`` (default: the next) attends to, in a fixed order: the parent's
        context, the parent, joined threads.
        """
        index = self.num_tokens if index is None else index
        joined = (entry for join in self.joins if join.index <= index for entry in join.context)
        return (*self.inherited, *joined)

    def enter(self, token: int, is_control: bool) -> None:
        self.token_ids.append(token)
        self.positions.append(self.next_position)
        self.is_control.append(is_control)
        self.next_position += 1

    def end(self, reason: str, is_cut: bool = False) -> None:
        """End the thread. For ``reason`` see ``ended_by``."""
        self.state, self.ended_by, self.is_cut = State.ENDED, reason, is_cut
        self.pending = self.tag = None


class DocumentToken(NamedTuple):
    """One token of the document.

    Attributes:
        is_control: whether it is control rather than text; true of all tokens of a tag, also of one truncated by ``max_tokens``.
        tail: text after the end of a tag, within the tag's last token. It belongs to the answer's text.
    """

    thread: int
    token_id: int
    ordinal: int  # its index in the thread
    is_control: bool
    tail: str


class Sequence:
    """An answer in one thread. Every token is text; an end token or the last of ``max_tokens`` ends the answer.

    Args:
        end_token_ids: the model's end tokens, and the request's stop tokens.
        min_tokens: before so many tokens of the main thread, it may not end.

    Attributes:
        threads: by number, the main thread first.
        max_tokens: maximum tokens of the document, control and forced tokens included; the answer is truncated there.
        finished: None until the answer ends; then ``stop``, ``length`` (max_tokens was reached), or the argument of ``end_all``.
        grammar: the answer's structure, advanced past the accepted tokens; None for any text.
        can_fork: whether the answer may ever have more than one thread.
        leaves_gaps: whether positions are left empty after openers.
    """

    can_fork = False
    leaves_gaps = False

    def __init__(
        self, prompt_length: int, end_token_ids: Iterable[int], max_tokens: int, grammar: Structure | None = None,
        min_tokens: int = 0,
    ) -> None:  # fmt: skip
        self.prompt_length = prompt_length
        self.max_tokens = max_tokens
        self._min_tokens = min_tokens
        self.grammar = grammar
        self.main = DecodeThread(next_position=prompt_length)
        self.threads = [self.main]
        self.finished: str | None = None
        self._end_token_ids = frozenset(end_token_ids)

    @property
    def is_free(self) -> bool:
        """Whether every token may follow any path of tokens that are not accepted yet."""
        return not self.can_fork and self.grammar is None and self.main.num_tokens >= self._min_tokens

    def accept_token(self, number: int, token: int) -> list[Start]:
        """Append an accepted token to a thread; returns tokens that have entered because of it, without being sampled.

        Tokens of a thread that was cut are ignored: another thread's token cut it in the same timestep. Raises ValueError if the
        thread is waiting, or has ended without being cut.
        """
        thread = self.threads[number]
        if thread.is_cut:
            return []
        if thread.state is not State.RUNNING:
            raise ValueError(f"token {token} for thread {number}, which is {thread.state.value}")
        return self._accept(thread, token)

    def _accept(self, thread: DecodeThread, token: int) -> list[Start]:
        if self.grammar is not None:
            self.grammar.consume((token,))
        is_end = token in self._end_token_ids
        thread.enter(token, is_end)
        if is_end or len(thread.token_ids) >= self.max_tokens:
            thread.end("stop" if is_end else "length", is_cut=not is_end)
            self.finished = "stop" if is_end and len(thread.token_ids) <= self.max_tokens else "length"
        return []

    def ends_walk(self, number: int, token: int, after: Iterable[int] = ()) -> bool:
        """Whether ``token`` joins or ends the thread, so that its successor cannot be predicted yet. It follows the tokens
        ``after`` the thread's own, text and openers, which are not accepted yet.
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
        """Counts by name (see ``Anomaly``). Those of tokens beyond ``max_tokens`` of the document depend on the interleaving."""
        return {}

    def sees(self, number: int, index: int) -> Context:
        """The ``context`` of a token, and the tokens of its own thread up to and including itself."""
        return (*self.threads[number].context(index), (number, index + 1))

    def banned(self, number: int, after: Iterable[int] = ()) -> frozenset[int]:
        """Tokens that may not be sampled next in a thread, after the tokens ``after``, which are not accepted yet."""
        is_early = number == 0 and self.main.num_tokens + len(tuple(after)) < self._min_tokens
        return self._end_token_ids if is_early else frozenset()

    def gap(self, number: int, path: list[int]) -> int:
        """The number of positions left empty between the last token of ``path`` and its successor. ``path`` follows the thread's
        own tokens and has text and openers, not accepted yet.
        """
        return 0

    def may_leave_gap(self, token: int) -> bool:
        """Whether positions might be left empty after this token."""
        return False

    def needed(self) -> list[int]:
        """For each thread, the number of its leading tokens that a later token may still attend to."""
        return [0 if thread.state is State.ENDED else thread.num_tokens for thread in self.threads]

    @property
    def num_past(self) -> int:
        """Maximum cache entries of accepted tokens. The row of the last one may not be among them."""
        return self.prompt_length + len(self.main.token_ids) - 1

    def released(self) -> tuple[int, ...]:
        """Threads whose tokens no later token attends to, so that their cache can be freed (APAR §2.4, early release)."""
        return tuple(number for number, count in enumerate(self.needed()) if count == 0)

    def document(self) -> list[DocumentToken]:
        """The tokens generated so far, in document order, truncated at ``max_tokens``."""
        return self.reader().pop_ready(is_over=True)

    def reader(self) -> ReorderBuffer:
        """A buffer that streams the document."""
        return ReorderBuffer(self.threads, self.max_tokens)

    def is_control(self, token: int) -> bool:
        """Whether a token is control rather than text in every context."""
        return token in self._end_token_ids

    def is_last(self, token: DocumentToken) -> bool:
        """Whether the token is the end token or stop token of the main thread, the last one of a complete document."""
        main = self.main
        return main.ended_by == "stop" and not main.is_cut and (token.thread, token.ordinal) == (0, main.num_tokens - 1)

    def is_shown(self, token: DocumentToken) -> bool:
        """Whether the token appears in the text that users read."""
        return True


NewSequence = Callable[[], Sequence]  # makes the sequence of a new answer


def _document_token(thread: DecodeThread, index: int, remaining: int) -> DocumentToken:
    """Token ``index`` of a thread, the first of ``remaining`` ones within ``max_tokens``. A tag's tokens are consecutive in the
    document, so a token of a broken tag is text if the token that broke the tag is among them.
    """
    is_reverted = thread.reverted.get(index, index + remaining) < index + remaining
    is_control = thread.is_control[index] and not is_reverted
    return DocumentToken(thread.number, thread.token_ids[index], index, is_control, thread.tails.get(index, ""))


def next_indices(threads: list[DecodeThread]) -> list[int]:
    """For each thread, the smallest index in the document that its next token can have. Tokens yet to come may precede it."""
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
    """Returns each token of an answer once, in document order, as soon as no later token can precede it."""

    def __init__(self, threads: list[DecodeThread], max_tokens: int) -> None:
        self._threads = threads
        self._remaining = max_tokens
        self._stack = [0]  # the thread being read and its ancestors, outermost first
        self._taken = [0]  # number of tokens already returned of each thread on the stack
        self._visited: set[int] = set()

    def pop_ready(self, is_over: bool = False) -> list[DocumentToken]:
        """The tokens that have become available since the last call; if it ``is_over``, all that are there."""
        taken = []
        while self._remaining and self._stack:
            thread, index = self._threads[self._stack[-1]], self._taken[-1]
            opened = (number for number in thread.children if self._threads[number].opened_at == index)
            child = next((number for number in opened if number not in self._visited), None)
            if child is not None:
                self._visited.add(child)
                self._stack.append(child)
                self._taken.append(0)
            elif index < (thread.num_tokens if is_over or thread.tag is None else thread.tag.start):
                taken.append(_document_token(thread, index, self._remaining))
                self._taken[-1] += 1
                self._remaining -= 1
            elif is_over or thread.state is State.ENDED:
                self._stack.pop()
                self._taken.pop()
            else:
                break
        return taken


def replay(sequence: Sequence, token_ids: Iterable[int]) -> None:
    """Pass an answer, which may be incomplete, to a new sequence, for training and for measuring: tokens in document order,
    control and forced tokens included. Raises ValueError if an opener is not followed by its forced token, or tokens follow the
    end of the answer.
    """
    open_threads = [0]  # the current thread and its ancestors, outermost first
    tokens = iter(token_ids)
    for token in tokens:
        if not open_threads:
            if sequence.finished == "length":
                return
            raise ValueError("tokens follow the end of the answer")
        known = len(sequence.threads)
        sequence.accept_token(open_threads[-1], token)
        for child in sequence.threads[known:]:
            forced = next(tokens, child.token_ids[0])
            if forced != child.token_ids[0]:
                raise ValueError(f"token {forced} follows an opener instead of the forced token {child.token_ids[0]}")
            open_threads.append(child.number)
        while open_threads and sequence.threads[open_threads[-1]].state is State.ENDED:
            open_threads.pop()
