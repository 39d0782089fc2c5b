"""Redis calls of a run's supervisors: those who claim its name, and start and replace its ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from pipedec.messages import Recovery
from pipedec.scheduler.base import BaseScheduler, activity_of
from pipedec.scheduler.protocol import Supervision
from pipedec.scheduler.script_calls import KEY_SECONDS
from pipedec.validation import parse_json

NODE_LEASE_MS = 3000


class SupervisorScheduler(BaseScheduler):
    """The scheduler for a supervisor."""

    def supervise(self, node: str, ranks: Sequence[int] = ()) -> Supervision:
        """For the supervisor ``node`` of a host, in one round trip: everything that its decisions need. Renews its lease.

        Args:
            ranks: ranks that run on this host; they are its own from now on, unless another host has them.
        """
        keys = self.keys
        names = [keys.run, keys.members, *self._report_keys(), keys.recoveries, keys.nodes, keys.node(node)]
        names += map(keys.alive, self.topology.ranks)
        about = [KEY_SECONDS, node, NODE_LEASE_MS, keys.node_prefix, json.dumps(list(ranks))]
        return _supervision_of(self._run_script("supervise", names, about))

    def members(self) -> list[int]:
        """Ranks that have taken a lease and have not left, including expired ones and ranks beyond the topology."""
        ranks: Any = self._ask(lambda: self.client.smembers(self.keys.members))
        return sorted(int(rank) for rank in ranks)


def _supervision_of(told: Sequence[Any]) -> Supervision:
    """Read the reply of ``supervise.lua``."""
    (failure, state, epoch), alive, expired, doing, suspects, ends, places, recoveries, lost, now_us = told
    return Supervision(
        epoch=None if epoch is None else int(epoch),
        state=state.decode() if state is not None else "gone",
        failure=failure.decode() if failure is not None else None,
        members=tuple(sorted([*alive, *expired])),
        expired=tuple(sorted(expired)),
        activities={rank: activity_of(text, int(now_us)) for rank, text in _by_rank(doing).items()},
        suspects=_by_rank(suspects),
        ends=_by_rank(ends),
        places=_by_rank(places),
        recoveries=tuple(parse_json(Recovery, text, "the recovery") for text in recoveries),
        lost_nodes=tuple(sorted(node.decode() for node in lost)),
    )


def _by_rank(pairs: Sequence[bytes]) -> dict[int, str]:
    """A hash of texts by rank, as Redis returns it: fields and values alternate."""
    return {int(rank): text.decode() for rank, text in zip(pairs[::2], pairs[1::2], strict=True)}
