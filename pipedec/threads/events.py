"""What an accepted token changes about the threads of an answer. Threads are named by their numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Opened:
    """``thread`` opened ``child``, whose forced first token is ``token`` at ``position``."""

    thread: int
    child: int
    token: int
    position: int


@dataclass(frozen=True)
class Waiting:
    """``thread`` goes on, or ends, when its open children have ended."""

    thread: int


@dataclass(frozen=True)
class Joined:
    """``thread`` goes on: its join ``token`` entered at ``position`` and sees all tokens of the threads ``joined``."""

    thread: int
    joined: tuple[int, ...]
    token: int
    position: int


@dataclass(frozen=True)
class Ended:
    """``thread`` takes no more tokens. For ``reason`` see ``DecodeThread.ended_by``."""

    thread: int
    reason: str


@dataclass(frozen=True)
class Finished:
    """All threads have ended: ``stop``, ``length`` (the answer was cut at max_tokens), or what ``end_all`` was given."""

    reason: str


Event = Opened | Waiting | Joined | Ended | Finished
