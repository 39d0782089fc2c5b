"""The names of all Redis keys of a run. ``lua/README.md`` lists their contents."""

from __future__ import annotations

import re

from pipedec.core.errors import UserError


class Keys:
    """The key names of run ``run_id``. The braces are a hash tag, so that a Redis cluster keeps a run's keys on one node.

    Attributes:
        epoch: part of the names of keys that only the ranks of one epoch use.
        meeting: negative number of the answer stream in which ranks meet and report that they have loaded their weights.

    Raises:
        UserError: ``run_id`` is not 1 to 100 letters, digits, ``_``, ``.`` or ``-``.
    """

    def __init__(self, run_id: str, epoch: int = 0) -> None:
        if not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", run_id):
            raise UserError(f"run id must be 1 to 100 letters, digits, '_', '.' or '-', not {run_id[:100]!r}")
        self.run_id = run_id
        self.epoch = epoch
        self.meeting = -1 - epoch

        self.prefix = prefix = f"pipedec:{{{run_id}}}:"
        self.run = prefix + "run"
        self.waiting = prefix + "waiting"
        self.requests = prefix + "requests"
        self.bell = prefix + "bell"
        self.running = prefix + "running"
        self.cancelled = prefix + "cancelled"
        self.unread = prefix + "unread"
        self.attempts = prefix + "attempts"
        self.members = prefix + "members"
        self.doing = prefix + "doing"
        self.suspects = prefix + "suspects"
        self.ends = prefix + "ends"
        self.places = prefix + "places"
        self.nodes = prefix + "nodes"
        self.recoveries = prefix + "recoveries"
        self.live = prefix + "live"
        self.watchers = prefix + "watchers"
        self.owners = prefix + "owners"

        self.workflow = f"{prefix}workflow:{epoch}"
        self.done = f"{prefix}done:{epoch}"
        self.trace = f"{prefix}trace:{epoch}"

        self.answer_prefix = prefix + "answer:"
        self.owner_prefix = prefix + "owner:"
        self.node_prefix = prefix + "node:"
        self.alive_prefix = prefix + "alive:"

    def queue(self, rank: int) -> str:
        return f"{self.prefix}queue:{self.epoch}:{rank}"

    def alive(self, rank: int) -> str:
        return f"{self.alive_prefix}{rank}"

    def node(self, node: str) -> str:
        return self.node_prefix + node

    def owner(self, owner: str) -> str:
        return self.owner_prefix + owner

    def wake(self, owner: str) -> str:
        return f"{self.prefix}wake:{owner}"

    def operation(self, operation: str) -> str:
        return f"{self.prefix}operation:{operation}"

    def answer(self, request_number: int) -> str:
        return f"{self.answer_prefix}{request_number}"
