"""The kinds of faults, and which one comes next: pure functions of a seed. Knows neither processes nor clusters."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from pipedec.bench.checks import check_known

RESET = "reset"
_Card = TypeVar("_Card")


@dataclass(frozen=True)
class Kind:
    """A kind of fault.

    Attributes:
        hits_rank: one rank is hit; ``loses_rank``: its process is lost, and replaced in a new epoch.
        may_lose_rank: its process may be lost: rarely, and for a reason not yet known, the rank does not enter the next epoch
            and is replaced.
        ends_all: nothing of the cluster is left.
    """

    name: str
    help: str
    hits_rank: bool = False
    loses_rank: bool = False
    may_lose_rank: bool = False
    ends_all: bool = False


KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill", "a rank is killed", hits_rank=True, loses_rank=True),
        Kind("stop", "a rank is stopped and never goes on", hits_rank=True, loses_rank=True),
        Kind("exit", "a rank ends with exit status 0", hits_rank=True, loses_rank=True),
        Kind(RESET, "a connection between two ranks is reset", hits_rank=True, may_lose_rank=True),
        Kind("redis-restart", "Redis is killed, and comes back empty"),
        Kind("redis-flush", "Redis loses all keys"),
        Kind("redis-disconnect", "Redis closes every connection"),
        Kind("front-end", "a server in front of the cluster is killed with its streams"),
        Kind("supervisor", "the process that started the cluster is killed", ends_all=True),
    )
}


@dataclass(frozen=True)
class Fault:
    """One fault: what, when, under which load.

    Attributes:
        index: from 0.
        rank: that is hit; None if the fault hits none.
        questions: indices of the questions that are asked together.
        watched: index among them of the one that decides when the fault comes.
        progress: the part of the watched answer that has been said by then, in [0, 1).
    """

    index: int
    kind: Kind
    rank: int | None
    questions: tuple[int, ...]
    watched: int
    progress: float


def plan_fault(
    index: int, seed: int, kinds: Sequence[str], concurrency: Sequence[int], num_questions: int, num_stages: int
) -> Fault:
    """The fault ``index`` of a seed. Kinds, ranks and numbers of requests come equally often, each in a random order.

    Raises:
        UserError: there is no such kind.
    """
    for name in kinds:
        check_known("kind of fault", name, KINDS)
    draw = random.Random(f"{seed} {index}")
    kind = KINDS[_dealt(f"{seed} kind", kinds, index)]
    role = _dealt(f"{seed} role", (0, 1, (num_stages + 1) // 2, num_stages), index // len(kinds))
    count = _dealt(f"{seed} count", concurrency, index)
    asked = tuple(draw.sample(range(num_questions), min(count, num_questions)))
    rank = role if kind.hits_rank else None
    return Fault(index, kind, rank, asked, draw.randrange(len(asked)), draw.random())


def _dealt(name: str, cards: Sequence[_Card], index: int) -> _Card:
    """The card at ``index`` of an endless row of shuffled decks."""
    turn, place = divmod(index, len(cards))
    return random.Random(f"{name} {turn}").sample(cards, len(cards))[place]
