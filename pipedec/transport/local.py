"""Transfers between the stages of one process: a mailbox for every pair of ranks."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import TypeVar

from pipedec.core import Envelope, RankLost, Step

Item = TypeVar("Item")
Mailboxes = defaultdict[tuple[int, int], deque[Item]]


class LocalTransport:
    """In-process transfers for LocalPipeline. Steps are passed by reference, nothing is copied."""

    def __init__(self, rank: int, mailboxes: Mailboxes[Step], envelopes: Mailboxes[Envelope]) -> None:
        self._rank = rank
        self._mailboxes = mailboxes
        self._envelopes = envelopes

    @classmethod
    def connect(cls, world_size: int) -> list[LocalTransport]:
        """One connected transport for each of ``world_size`` ranks."""
        mailboxes: Mailboxes[Step] = defaultdict(deque)
        envelopes: Mailboxes[Envelope] = defaultdict(deque)
        return [cls(rank, mailboxes, envelopes) for rank in range(world_size)]

    def send(self, step: Step, dst: int) -> None:
        self._mailboxes[self._rank, dst].append(step)

    def receive(self, num_rows: int, src: int) -> Step:
        mailbox = self._mailboxes[src, self._rank]
        if not mailbox or mailbox[0].num_rows != num_rows:
            raise RankLost(f"rank {self._rank} expected {num_rows} rows from rank {src}, which did not send them")
        return mailbox.popleft()

    def send_envelope(self, envelope: Envelope, dst: int) -> None:
        self._envelopes[self._rank, dst].append(envelope)

    def receive_envelope(self, src: int) -> Envelope:
        if not self._envelopes[src, self._rank]:
            raise RankLost(f"rank {self._rank} expected an envelope from rank {src}, which did not send it")
        return self._envelopes[src, self._rank].popleft()

    def close(self) -> None:
        self._mailboxes.clear()
        self._envelopes.clear()
