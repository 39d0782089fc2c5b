"""Steps between the stages of one process: a mailbox for every pair of ranks."""

from collections import defaultdict, deque

from pipedec.core import RankLost, Step


class LocalTransport:
    """In-process transfer for LocalPipeline: nothing is copied, a step is handed over as it is."""

    def __init__(self, rank: int, mailboxes: dict[tuple[int, int], deque[Step]]) -> None:
        self._rank = rank
        self._mailboxes = mailboxes

    @classmethod
    def connect(cls, world_size: int) -> list["LocalTransport"]:
        """One connected transport for each of ``world_size`` ranks."""
        mailboxes: dict[tuple[int, int], deque[Step]] = defaultdict(deque)
        return [cls(rank, mailboxes) for rank in range(world_size)]

    def send(self, step: Step, dst: int) -> None:
        self._mailboxes[self._rank, dst].append(step)

    def receive(self, num_rows: int, src: int) -> Step:
        mailbox = self._mailboxes[src, self._rank]
        if not mailbox or mailbox[0].num_rows != num_rows:
            raise RankLost(f"rank {self._rank} expected {num_rows} rows from rank {src}, which did not send them")
        return mailbox.popleft()

    def close(self) -> None:
        self._mailboxes.clear()
