"""One decode thread of an answer: its tokens, where they stand, and what they see of other threads. Knows no dialect."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from enum import Enum

from pipedec.threads.bound import OpenerTag

Context = tuple[tuple[int, int], ...]


class State(Enum):
    """Waiting is for open children: before a join token enters, or before the thread ends."""

    RUNNING = "running"
    WAITING = "waiting"
    ENDED = "ended"


@dataclass(frozen=True)
class Join:
    """From its token ``index`` on, the join token, a thread sees ``context``: (thread number, all its tokens) of each joined."""

    index: int
    context: Context


@dataclass
class DecodeThread:
    """Tokens decoded one after another.

    Attributes:
        number: in order of opening, so it depends on which thread opens first in time. The main thread is 0.
        path: ordinals of the openings from the main thread, (), to this one: the identity that does not depend on time.
        parent: number of the thread that opened it; None for the main thread.
        opened_at: how many of the parent's tokens it sees: those up to and with its opener.
        inherited: what all its tokens see of other threads, as (thread number, tokens): the parent's context, and the parent.
        next_position: position of the next token to enter, unless a join moves it.
        promised: predicted number of its tokens, where the dialect predicts.
        is_control: for each token, whether it is control rather than text; inside a tag all are.
        reverted: text that stands in a tag which was broken off: index of the token to index of the one with which that is known.
        tails: text that stands behind the end of a tag in the token that completes it, by the token's index.
        children: numbers, in order of opening; ``unjoined`` are those of them that no join token has named yet.
        joins: in order.
        tag: an opener's tag that is not complete yet.
        pending: the accepted token that waits for the children: it is not among ``token_ids`` yet.
        ended_by: ``stop`` (end token), ``close``, ``limit`` (the dialect's max_child_tokens), ``length`` (max_tokens), or what
            ``Sequence.end_all`` was given. Of a waiting thread: by what it will end, None before a join.
        is_cut: it ended by no token of its own, so tokens accepted for it elsewhere in the same timestep are void.
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
    def depth(self) -> int:
        """0 for the main thread."""
        return len(self.path)

    @property
    def noise_stream(self) -> int:
        """What the thread's tokens are drawn with besides seed and position: a function of its path, 0 for the main thread."""
        return zlib.crc32(",".join(map(str, self.path)).encode())

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def is_closing(self) -> bool:
        """It waits, not for a join, but to end."""
        return self.state is State.WAITING and self.ended_by is not None

    def context(self, index: int | None = None) -> Context:
        """What its token ``index`` (by default the next one) sees of other threads, as (thread number, tokens)."""
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
        self.state, self.ended_by, self.is_cut = State.ENDED, reason, is_cut
        self.pending = self.tag = None
