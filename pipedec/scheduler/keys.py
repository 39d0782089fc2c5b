"""Every Redis key of a run, in one place. ``lua/README.md`` lists their contents."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipedec.core import UserError


@dataclass(frozen=True)
class Keys:
    """The key names of run ``run_id``. The braces are a hash tag, so that a Redis cluster keeps a run's keys on one node.

    Attributes:
        epoch: of the run; keys that only the ranks of one epoch use are different in each.

    Raises:
        UserError: ``run_id`` is empty, too long or has other characters than letters, digits, ``_``, ``.`` and ``-``.
    """

    run_id: str
    epoch: int = 0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", self.run_id):
            raise UserError(f"run id must be 1 to 100 letters, digits, '_', '.' or '-', not {self.run_id[:100]!r}")

    @property
    def prefix(self) -> str:
        return f"pipedec:{{{self.run_id}}}:"

    @property
    def meeting(self) -> int:
        """The number of the answer, of no request, in which ranks meet and report that they have loaded their weights."""
        return -1 - self.epoch

    def _of_epoch(self, name: str) -> str:
        return f"{self.prefix}{name}:{self.epoch}"

    @property
    def run(self) -> str:
        return self.prefix + "run"

    @property
    def workflow(self) -> str:
        return self._of_epoch("workflow")

    @property
    def done(self) -> str:
        return self._of_epoch("done")

    @property
    def trace(self) -> str:
        return self._of_epoch("trace")

    @property
    def waiting(self) -> str:
        return self.prefix + "waiting"

    @property
    def requests(self) -> str:
        return self.prefix + "requests"

    @property
    def bell(self) -> str:
        return self.prefix + "bell"

    @property
    def running(self) -> str:
        return self.prefix + "running"

    @property
    def cancelled(self) -> str:
        return self.prefix + "cancelled"

    @property
    def unread(self) -> str:
        return self.prefix + "unread"

    @property
    def attempts(self) -> str:
        return self.prefix + "attempts"

    @property
    def doing(self) -> str:
        return self.prefix + "doing"

    @property
    def suspects(self) -> str:
        return self.prefix + "suspects"

    @property
    def ends(self) -> str:
        return self.prefix + "ends"

    @property
    def places(self) -> str:
        return self.prefix + "places"

    @property
    def nodes(self) -> str:
        return self.prefix + "nodes"

    @property
    def node_prefix(self) -> str:
        return self.prefix + "node:"

    def node(self, node: str) -> str:
        return self.node_prefix + node

    @property
    def recoveries(self) -> str:
        return self.prefix + "recoveries"

    @property
    def live(self) -> str:
        return self.prefix + "live"

    @property
    def watchers(self) -> str:
        return self.prefix + "watchers"

    @property
    def owners(self) -> str:
        return self.prefix + "owners"

    @property
    def members(self) -> str:
        return self.prefix + "members"

    def queue(self, rank: int) -> str:
        return self._of_epoch("queue") + f":{rank}"

    def alive(self, rank: int) -> str:
        return f"{self.alive_prefix}{rank}"

    @property
    def alive_prefix(self) -> str:
        return self.prefix + "alive:"

    def is_lease(self, key: str) -> bool:
        """Whether the key exists only while a rank, a supervisor or an owner renews it."""
        return key.startswith((self.alive_prefix, self.node_prefix, self.owner_prefix))

    @property
    def owner_prefix(self) -> str:
        return self.prefix + "owner:"

    def owner(self, owner: str) -> str:
        return self.owner_prefix + owner

    def operation(self, operation: str) -> str:
        return f"{self.prefix}operation:{operation}"

    def wake(self, owner: str) -> str:
        return f"{self.prefix}wake:{owner}"

    @property
    def answer_prefix(self) -> str:
        return self.prefix + "answer:"

    def answer(self, request_number: int) -> str:
        return f"{self.answer_prefix}{request_number}"
