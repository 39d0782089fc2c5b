"""The passage changes while answers are decoded: no text depends on it, and no verdict is lost or comes twice."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engine.test_local_pipeline import expected, make_pipeline, models, request
from support.transfer_order import transfers_of

from pipedec.core.stage_message import EMPTY, RequestUpdate, StageMessage
from pipedec.core.verdict import Verdict
from pipedec.decoding.events import Timestep
from pipedec.decoding.passage import Passages
from pipedec.engine.rank_zero import WindowPipeline
from pipedec.engine.recorder import Recorder
from pipedec.scheduler.protocol import Granted, RankMessage
from pipedec.scheduler.workflow import Task
from pipedec.topology import Topology

__all__ = ["models"]  # a fixture
LENGTHS = (3, 4, 9, 17)
SHAPE = (3, 3)


@pytest.mark.parametrize("method", ["pipedec", "pipedec-bestfirst"])
def test_answers_do_not_depend_on_it(models: Path, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = random.Random(3)
    monkeypatch.setattr(Passages, "length", property(lambda self: drawn.choice(LENGTHS)))
    pipeline = make_pipeline(models, SHAPE, "near")
    asked = [request(num_tokens=40, method=method, ignore_eos=True) for _ in range(3)]
    for one in asked:
        verdicts = list(pipeline.run(one))
        assert tuple(token for verdict in verdicts for token in verdict.tokens) == expected(
            models / "target", one.prompt_token_ids, 40
        )
        assert pipeline.last.metrics.hits + pipeline.last.metrics.misses == 39


class Tasks:
    """Rank 0's tasks with stages that answer every message by a verdict of its number, in order."""

    def __init__(self, topology: Topology) -> None:
        self.recorder = Recorder()
        self.in_flight: list[int] = []
        self.most = 0
        self._granted = RankMessage("tasks", 1, tasks=(Granted(Task.compute("window", 0, 1), payload={
            "timesteps": 10_000, "transfers": [[list(one) for one in phase] for phase in transfers_of(0, topology, "full")],
        }),))  # fmt: skip

    def next(self) -> RankMessage:
        return self._granted

    def report(self, *_: Any, **__: Any) -> None: ...

    def send(self, message: StageMessage, target: int, number: int) -> None:
        self.in_flight.append(number)
        self.most = max(self.most, len(self.in_flight))

    def receive(self, source: int) -> StageMessage:
        number = self.in_flight.pop(0)
        return StageMessage((RequestUpdate(number % 2 + 1, verdict=Verdict.of(number)),))

    def timestep(self, number: int, entered: StageMessage = EMPTY, results: Any = (), timing: Any = None) -> Timestep:
        return Timestep(number, entered, results, timing)


def test_every_result_is_returned_once_and_those_of_a_request_one_by_one() -> None:
    topology, drawn = Topology.even(3, 3), random.Random(5)
    tasks = Tasks(topology)
    wiring = SimpleNamespace(
        topology=topology, window=10_000, duplex="full", scheduler=SimpleNamespace(begin_session=lambda *_: None)
    )
    pipeline = WindowPipeline(1, tasks, wiring)  # type: ignore[arg-type]
    returned: list[int] = []
    for number in range(1, 400):
        passage = drawn.choice(LENGTHS) if number % 7 == 0 else LENGTHS[number // 100 % len(LENGTHS)]
        results = pipeline.run_timestep(number, EMPTY, passage, lambda: None).results
        assert len({one.number for one in results}) == len(results)
        returned += [token for one in results if one.verdict is not None for token in one.verdict.tokens]
    assert returned == list(range(1, len(returned) + 1)) and len(returned) > 300
    assert tasks.most <= max(LENGTHS)
    for number in range(400, 440):
        pipeline.run_timestep(number, EMPTY, LENGTHS[0], lambda: None)
    assert len(tasks.in_flight) <= max(LENGTHS)
