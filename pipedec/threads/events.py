"""Events that an accepted token causes in the threads of an answer. Threads are given by their numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ThreadOpened:
    """``thread`` opened ``child``, whose forced first token is ``token`` at ``position``."""

    thread: int
    child: int
    token: int
    position: int


@dataclass(frozen=True)
class Waiting:
    """``thread`` waits until its open children have ended, and then continues or ends."""

    thread: int


@dataclass(frozen=True)
class Joined:
    """``thread`` continues: its join ``token`` entered at ``position`` and attends to all tokens of the threads ``joined``."""

    thread: int
    joined: tuple[int, ...]
    token: int
    position: int


@dataclass(frozen=True)
class ThreadEnded:
    """``thread`` accepts no further tokens. For ``reason`` see ``DecodeThread.ended_by``."""

    thread: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """All threads have ended. ``reason``: ``stop``, ``length`` (max_tokens was reached), or the argument of ``end_all``."""

    reason: str


Event = ThreadOpened | Waiting | Joined | ThreadEnded | Finished
