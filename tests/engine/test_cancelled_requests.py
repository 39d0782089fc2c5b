"""How soon a cancelled request makes room: after one look at the queue, and at the next timestep; in counts, not in time."""

from __future__ import annotations

from functools import partial

from support.memory_scheduler import MemoryScheduler
from support.processes import wait_until

from pipedec.config import Settings
from pipedec.core import Request, RequestUpdate, SamplingParams, Verdict
from pipedec.decoding import Batch
from pipedec.engine.loop import Record, RequestEnded, RequestPool
from pipedec.engine.request_queue import RequestQueue
from pipedec.kv import KVManager
from pipedec.messages import RunDescription
from pipedec.scheduler.protocol import Taken
from pipedec.threads import Sequence
from pipedec.topology import Topology

PROMPT = tuple(range(100))


class Counting(MemoryScheduler):
    """Counts looks at the queue."""

    def __init__(self) -> None:
        super().__init__(Topology.even(1, 1))
        self.looks = 0
        self.open(RunDescription(Settings.of(target="target", max_num_seqs=1), ((1,),), ((0, 1),)))

    def take(self, limit: int) -> Taken:
        taken = super().take(limit)
        self.looks += 1
        return taken


def test_one_look_tells_of_a_cancellation_and_the_next_but_one_brings_another_request() -> None:
    scheduler = Counting()
    queue = RequestQueue(scheduler)
    first, second = scheduler.submit("{}"), scheduler.submit("{}")
    with queue.serving():
        assert wait_until(lambda: [message.number for message in queue.arrivals(1)] == [first], 5)
        assert scheduler.cancel(first)
        look = scheduler.looks
        assert wait_until(lambda: scheduler.looks >= look + 2, 5)  # one may have been on its way
        assert queue.cancelled() == [first]
        queue.finish(first)
        assert wait_until(lambda: scheduler.status().running == (), 5)
        assert queue.arrivals(1) == []
        look = scheduler.looks
        assert wait_until(lambda: scheduler.looks >= look + 2, 5)
        assert [message.number for message in queue.arrivals(1)] == [second]


def test_a_cancelled_requests_memory_is_free_at_once_and_goes_to_the_next_with_the_same_envelope() -> None:
    batch = Batch(14, kv=KVManager(160, 16, shares_prefixes=False))
    noted: list[Record] = []
    pool = RequestPool(batch, listeners=[noted.append])
    for number in range(2):
        request = Request(number, PROMPT, SamplingParams(max_tokens=20), "pp")
        pool.open(request, partial(Sequence, len(PROMPT), (), 20))
    assert [update.number for update in pool.entering().updates] == [0], "there is memory for one"
    pool.cancel(0)
    assert (batch.kv.used_slots, noted[-1]) == (0, RequestEnded(0, "cancelled", 0, 0))
    told, begun = pool.entering().updates
    assert (told.number, told.verdict) == (0, Verdict((), "cancelled"))
    assert begun.number == 1 and begun.opening is not None and begun.step is not None
    assert pool.take(RequestUpdate(0, verdict=Verdict.of(5)), 3) is None, "a late verdict is void"
