"""One decode thread of an answer: its tokens, their positions, and what they attend to in other threads. Knows no dialect."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import Enum, StrEnum

from pipedec.threads.dialect import OpenerTag

Context = tuple[tuple[int, int], ...]  # (thread number, number of its leading tokens)


class State(Enum):
    """A waiting thread waits for its open children: before its join token enters, or before it ends."""

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
        """The tokens of other threads that token ``index`` (default: the next) attends to.

        Returns:
            in a fixed order: the parent's context, the parent, joined threads.
        """
        index = self.num_tokens if index is None else index
        joined = (entry for join in self.joins if join.index <= index for entry in join.context)
        return (*self.inherited, *joined)

    def enter(self, token: int, is_control: bool) -> None:
        """Append a token at the next position."""
        self.token_ids.append(token)
        self.positions.append(self.next_position)
        self.is_control.append(is_control)
        self.next_position += 1

    def end(self, reason: str, is_cut: bool = False) -> None:
        """End the thread. For ``reason`` see ``ended_by``."""
        self.state, self.ended_by, self.is_cut = State.ENDED, reason, is_cut
        self.pending = self.tag = None
