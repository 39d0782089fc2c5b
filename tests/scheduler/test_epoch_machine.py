"""Any sequence of what clients and rank 0 do, and of lost ranks: no request is lost or given out twice in an epoch, and a caller
of an ended epoch changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test
from support.whole_scheduler import FreshRun, WholeScheduler

from pipedec.config import Settings
from pipedec.core.errors import EpochEnded
from pipedec.messages.events import TokensEvent
from pipedec.messages.run import RunDescription
from pipedec.scheduler.protocol import RankMessage
from pipedec.scheduler.workflow import initial_windows
from pipedec.topology import Topology

TWO = Topology.even(2, 2)
DESCRIPTION = RunDescription(Settings.of(target="target", max_num_seqs=3), TWO.groups, ((0, 1), (1, 2)))
CALLS: list[Callable[[WholeScheduler], object]] = [
    lambda zombie: zombie.pop_requests(3),
    lambda zombie: zombie.publish(0, TokensEvent([9], "z")),
    lambda zombie: zombie.complete(0),
    lambda zombie: zombie.renew_lease(1),
    lambda zombie: zombie.begin_session(7, initial_windows(TWO, 8), 0),
    lambda zombie: zombie.end_orphans(),
]


class Epochs(RuleBasedStateMachine):
    """Rank 0, its clients and a zombie of every epoch."""

    @initialize()
    def begin(self) -> None:
        self.real = FreshRun(TWO)
        self.ended: list[WholeScheduler] = []
        self.told: dict[int, list[int]] = {}  # by unfinished request
        self.given: set[int] = set()  # to rank 0, and not finished
        self.real.open(DESCRIPTION, recovers=True)

    @rule(priority=st.integers(-1, 1))
    def submit(self, priority: int) -> None:
        number = self.real.submit("{}", priority)
        assert number not in self.told
        self.told[number] = []

    @rule(limit=st.integers(0, 3))
    def take(self, limit: int) -> None:
        taken = [one.number for one in self.real.pop_requests(limit).requests]
        assert not self.given & set(taken)
        self.given.update(taken)

    @precondition(lambda self: self.given)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 9), max_size=3), ends=st.booleans())
    def publish(self, data: st.DataObject, tokens: list[int], ends: bool) -> None:
        number = data.draw(st.sampled_from(sorted(self.given)))
        event = TokensEvent(tokens, "x" * len(tokens), index=len(self.told[number]), offset=len(self.told[number]))
        (self.real.complete if ends else self.real.publish)(number, event)
        self.told[number] += tokens
        if ends:
            self.given.discard(number)
            del self.told[number]

    @precondition(lambda self: self.told)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.told)))
        assert self.real.cancel(number)
        if number not in self.given:
            del self.told[number]

    @rule(lost=st.sampled_from([0, 1, 2]), repeated=st.booleans())
    def lose_a_rank(self, lost: int, repeated: bool) -> None:
        self._zombie()
        for _ in range(1 + repeated):
            assert self.real.recover([lost], "it was killed") == self.real.epoch + 1
        self._enter()

    def _zombie(self) -> None:
        zombie = WholeScheduler(self.real.client, self.real.keys.run_id, TWO)
        zombie.enter(self.real.epoch)
        self.ended = [*self.ended[-3:], zombie]

    def _enter(self) -> None:
        epoch = self.real.current_epoch()
        assert epoch == self.real.epoch + 1
        self.real.enter(epoch)

    @rule(call=st.sampled_from(CALLS))
    def a_zombie_calls(self, call: Callable[[WholeScheduler], object]) -> None:
        before = self.real.status(), self._journal()
        for zombie in self.ended:
            with pytest.raises(EpochEnded):
                call(zombie)
        assert (self.real.status(), self._journal()) == before

    @invariant()
    def nothing_is_lost(self) -> None:
        journal = self._journal()
        assert {one.number: list(one.output_token_ids) for one in journal} == {number: self.told[number] for number in self.given}
        status = self.real.status()
        assert set(status.running) == self.given and status.waiting == len(self.told) - len(self.given)

    def _journal(self) -> list[RankMessage]:
        return [replace(one, text="") for one in self.real.journal()]

    def teardown(self) -> None:
        if hasattr(self, "real"):
            self.real.clear()


@pytest.mark.slow
@pytest.mark.usefixtures("redis_client")
def test_whatever_is_lost_the_scheduler_knows_the_same_requests() -> None:
    run_state_machine_as_test(Epochs, settings=settings(deadline=None, stateful_step_count=30))  # type: ignore[no-untyped-call]
