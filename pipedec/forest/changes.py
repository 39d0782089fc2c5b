"""What a verdict changes in each decode thread of an answer and in its tree. All ranks derive the same from the same verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from pipedec.core import Verdict
from pipedec.threads import DecodeThread, Joined, Opened, Sequence, State


class Remaining(Enum):
    """The rows of a thread's tree that remain after a verdict."""

    SUBTREE = "subtree"  # of the last accepted token
    ROOT = "root"  # the last accepted token alone: the thread has ended, but other threads will attend to that token
    NOTHING = "nothing"


@dataclass(frozen=True)
class Start:
    """A token that enters a thread without being sampled and becomes a root: a child's forced first token, or a join token."""

    thread: int
    token: int


@dataclass
class ThreadChanges:
    """The effects of a verdict. All dicts are keyed by thread number.

    Attributes:
        accepted: accepted tokens.
        remaining: what remains of the trees of threads with accepted tokens, and of threads that have ended or were cut.
        last: last tokens of ended threads that other threads will attend to: each enters, and nothing follows it.
        starts: tokens that become roots of new trees.
    """

    accepted: dict[int, tuple[int, ...]] = field(default_factory=dict)
    remaining: dict[int, Remaining] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)
    starts: list[Start] = field(default_factory=list)

    @property
    def affects_threads(self) -> bool:
        """Whether a thread was opened, joined others, or ended."""
        return bool(self.starts) or Remaining.NOTHING in self.remaining.values() or bool(self.last)


def apply_verdict(sequence: Sequence, verdict: Verdict) -> ThreadChanges:
    """Pass the accepted tokens to ``sequence`` and return the effects on all threads.

    Tokens of a thread that another thread's token of the same verdict has cut are void.
    """
    changes = ThreadChanges()
    running = [thread.number for thread in sequence.threads if thread.state is State.RUNNING]
    waiting = [thread.number for thread in sequence.threads if thread.state is State.WAITING]
    for number, tokens, _ in verdict.accepted:
        if not tokens or sequence.threads[number].is_cut:
            continue
        changes.accepted[number] = tokens
        changes.remaining[number] = Remaining.SUBTREE
        for token in tokens:
            for event in sequence.accept(number, token):
                if isinstance(event, Opened):
                    changes.starts.append(Start(event.child, event.token))
                elif isinstance(event, Joined):
                    changes.starts.append(Start(event.thread, event.token))
    if verdict.finished is not None and sequence.finished is None:
        sequence.end_all(verdict.finished)
    changes.starts = [start for start in changes.starts if sequence.threads[start.thread].state is not State.ENDED]
    for number in running:
        thread = sequence.threads[number]
        if thread.state is not State.RUNNING:
            last = _visible_last_token(sequence, thread) if sequence.can_fork else None
            changes.remaining[number] = Remaining.NOTHING if last is None else Remaining.ROOT
            if last is not None:
                changes.last[number] = last
    for number in waiting:
        if sequence.threads[number].is_cut:  # nothing will attend to its last token, and a pending token will never enter
            changes.remaining[number] = Remaining.NOTHING
    for start in changes.starts:
        changes.remaining[start.thread] = Remaining.NOTHING
    return changes


def _visible_last_token(sequence: Sequence, thread: DecodeThread) -> int | None:
    """The last token of a thread that has stopped, if its parent's join or one of its children may attend to it."""
    if thread.state is State.ENDED:
        return thread.token_ids[-1] if sequence.needed()[thread.number] == thread.num_tokens > 0 else None
    if not thread.is_closing or thread.parent is None:
        return None
    return thread.token_ids[-1] if thread.pending is None else thread.pending
