"""What a verdict on several threads does to each of their trees. Every rank follows the same verdicts and comes to the same."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from pipedec.core import Verdict
from pipedec.threads import DecodeThread, Joined, Opened, Sequence, State


class Rest(Enum):
    """What stays of a thread's tree behind its last accepted token."""

    SUBTREE = "subtree"  # that token's row and all below it
    ROOT = "root"  # its row alone: the thread has ended, and somebody will see its last token
    NOTHING = "nothing"


@dataclass(frozen=True)
class Start:
    """A certain token that nobody sampled enters a thread: the forced first token of a child, or a join token."""

    thread: int
    token: int


@dataclass
class Turn:
    """A verdict, thread by thread.

    Attributes:
        accepted: what was accepted of each thread.
        rests: what stays of the tree of each of these threads, and of those that have ended or were cut.
        last: threads that have ended, but whose last token others will see: it enters without a successor.
        starts: tokens that begin a tree anew.
        committed: int64, the token ids of each thread that have left its tree for the past (see ``Forest.advance``).
    """

    accepted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    rests: dict[int, Rest] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)
    committed: dict[int, Tensor] = field(default_factory=dict)

    @property
    def changes_threads(self) -> bool:
        """Whether a thread was opened, joins others, or has ended."""
        return bool(self.starts) or Rest.NOTHING in self.rests.values() or bool(self.last)


def follow(sequence: Sequence, verdict: Verdict) -> Turn:
    """Tell ``sequence`` what was accepted, and say what becomes of the trees.

    Tokens of a thread that another thread's token of the same verdict has cut are void.
    """
    turn = Turn()
    running = [thread.number for thread in sequence.threads if thread.state is State.RUNNING]
    pending = [thread.number for thread in sequence.threads if thread.pending is not None]
    for number, tokens, _ in verdict.parts():
        if not tokens or sequence.threads[number].is_cut:
            continue
        turn.accepted[number] = tokens
        turn.rests[number] = Rest.SUBTREE
        for token in tokens:
            for event in sequence.accept(number, token):
                if isinstance(event, Opened):
                    turn.starts.append(Start(event.child, event.token))
                elif isinstance(event, Joined):
                    turn.starts.append(Start(event.thread, event.token))
    if verdict.finished is not None and sequence.finished is None:
        sequence.end_all(verdict.finished)
    turn.starts = [start for start in turn.starts if sequence.threads[start.thread].state is not State.ENDED]
    for number in running:
        _finish(sequence, turn, number)
    for number in pending:
        if sequence.threads[number].is_cut:  # the token that waited for its children will never be
            turn.rests[number] = Rest.NOTHING
    for start in turn.starts:
        turn.rests[start.thread] = Rest.NOTHING
    return turn


def _finish(sequence: Sequence, turn: Turn, number: int) -> None:
    """A thread that ran before the verdict and runs no more."""
    thread = sequence.threads[number]
    if thread.state is State.RUNNING:
        return
    token = _last_seen(sequence, thread)
    turn.rests[number] = Rest.NOTHING if token is None else Rest.ROOT
    if token is not None:
        turn.last[number] = token


def _last_seen(sequence: Sequence, thread: DecodeThread) -> int | None:
    """The last token of a thread that runs no more, if others may see it: its parent's join, or a child that it opened."""
    if thread.state is State.ENDED:
        return thread.token_ids[-1] if sequence.needed()[thread.number] == thread.num_tokens > 0 else None
    if not thread.is_closing or thread.parent is None:
        return None
    return thread.token_ids[-1] if thread.pending is None else thread.pending
