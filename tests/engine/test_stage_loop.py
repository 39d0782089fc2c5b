"""A stage's loop alone, on a simulated device whose work ends late: what is told of a timestep is what the device has done."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.fake_cuda import FakeCuda
from support.transfer_order import transfers_of

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Load, NewRequest, RequestUpdate, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.device import DeviceEvent, GpuDevice
from pipedec.engine.rank_tasks import Wiring
from pipedec.engine.stage_loop import StageLoop
from pipedec.messages.events import Event, TraceEvents
from pipedec.messages.stats import StageStats
from pipedec.scheduler import RankScheduler, Task
from pipedec.scheduler.protocol import Granted, RankMessage
from pipedec.stage import StageWorker
from pipedec.threads.sequences import Sequences
from pipedec.topology import Topology
from pipedec.tracing import Tracer
from pipedec.transport import Transport

TOPOLOGY = Topology.even(3, 3)
RANK = 2
HEAD_SECONDS, ACTIVATION_SECONDS, COMPUTE_SECONDS, SEND_SECONDS = 0.06, 0.02, 0.03, 0.04  # each after what precedes it
NEAR = 2e-3


class OneWindow:
    """A scheduler that grants one window, and stops when that is done. Attributes: what it was told."""

    def __init__(self, timesteps: int, duplex: str) -> None:
        payload = {"timesteps": timesteps, "transfers": transfers_of(RANK, TOPOLOGY, duplex)}
        self._next = [RankMessage("tasks", 1, (Granted(Task.compute("window", RANK, 1), payload),))]
        self.stats: list[StageStats] = []
        self.events: list[Event] = []

    def wait(self, rank: int, timeout_seconds: float) -> RankMessage:
        return self._next.pop()

    def report(self, *report: Any) -> RankMessage:
        return RankMessage("stop")

    def publish_stats(self, stats: StageStats) -> None:
        self.stats.append(stats)

    def publish(self, number: int, *events: Event) -> None:
        self.events += events

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(alive=())


class LateTransport:
    """Messages whose activations come ``ACTIVATION_SECONDS`` after the rest, and leave within ``SEND_SECONDS``."""

    def __init__(self, cuda: FakeCuda, device: GpuDevice, messages: list[StageMessage], log: list[str]) -> None:
        self._cuda, self._device, self._messages, self._log = cuda, device, messages, log

    def receive_message(self, src: int) -> StageMessage:
        self._cuda.advance(HEAD_SECONDS)
        self._log.append("receive")
        message, arrives_at = self._messages.pop(0), self._cuda.now + ACTIVATION_SECONDS
        return StageMessage(message.updates, message.ends_session, SimpleNamespace(wait=partial(self._await, arrives_at)))

    def _await(self, arrives_at: float) -> None:
        self._log.append("await")
        stream = self._cuda.current_stream()
        stream.free_at = max(stream.free_at, arrives_at)

    def send_message(self, message: StageMessage, dst: int) -> DeviceEvent:
        self._log.append("send")
        computed = self._device.record_event()
        with self._device.beside("send"):
            computed.join()
            self._cuda.give(SEND_SECONDS)
            return self._device.record_event()


class LateWorker:
    """A stage whose device computes for ``COMPUTE_SECONDS``."""

    rows = pruned_rows = cache_slots = experts = expert_layers = num_experts = 0

    def __init__(self, cuda: FakeCuda, log: list[str]) -> None:
        self._cuda, self._log = cuda, log

    def reset(self) -> None:
        """There is nothing."""

    def advance(self, message: StageMessage, span: Callable[[str, Load], Any]) -> StageMessage:
        self._log.append("replay")
        message.await_hidden()
        with span("dec", Load()):
            self._cuda.give(COMPUTE_SECONDS)
        return StageMessage(message.updates, message.ends_session)


def served(messages: list[StageMessage], duplex: str = "full") -> tuple[OneWindow, list[str]]:
    """Serve one window of these messages. Returns what the scheduler was told, and the order in which things were done."""
    cuda, log = FakeCuda(), list[str]()
    device = GpuDevice(cuda=cuda, now=lambda: cuda.now)
    scheduler, transport = OneWindow(len(messages), duplex), LateTransport(cuda, device, messages, log)
    wiring = Wiring(
        cast(RankScheduler, scheduler), cast(Transport, transport), TOPOLOGY, Tracer(RANK), cast(Sequences, Path()),
        duplex=duplex, window=len(messages), device=device,
    )  # fmt: skip
    StageLoop(cast(StageWorker, LateWorker(cuda, log)), RANK, wiring).serve(cast(Transport, transport))
    return scheduler, log


def rows() -> Step:
    return cast(Step, SimpleNamespace(num_rows=1))


def test_what_a_stage_tells_of_its_time_is_its_devices() -> None:
    """The host launches everything at once; the device first waits for the activations and then computes."""
    last = 5
    messages = [StageMessage((RequestUpdate(1, step=rows()),), number == last) for number in range(1, last + 1)]
    scheduler, _ = served(messages)
    told = scheduler.stats[-1]
    assert told.timesteps == last
    full = last - 1  # the device is still at the last timestep when the stage tells
    assert told.compute_seconds == pytest.approx(COMPUTE_SECONDS * full, abs=NEAR)
    between = HEAD_SECONDS - ACTIVATION_SECONDS - COMPUTE_SECONDS  # the device is done before the next message comes
    assert told.wait_seconds == pytest.approx(HEAD_SECONDS + full * (ACTIVATION_SECONDS + between), abs=NEAR)


def test_the_trace_of_a_request_has_the_times_of_the_device() -> None:
    begins = RequestUpdate(1, NewRequest(1, SamplingParams(), trace=True), step=rows())
    goes_on = RequestUpdate(1, step=rows())
    ends = RequestUpdate(1, verdict=Verdict((), "stop"))
    scheduler, _ = served([StageMessage((begins,)), StageMessage((goes_on,)), StageMessage((ends,), True)])
    [trace] = [event for event in scheduler.events if isinstance(event, TraceEvents)]
    lasting = {event.label: (event.end_us - event.start_us) / 1e6 for event in trace.rows}
    assert lasting["2F1"] == pytest.approx(COMPUTE_SECONDS, abs=NEAR)
    assert lasting["2F2"] == pytest.approx(COMPUTE_SECONDS, abs=NEAR)
    assert lasting["2>3@1"] == pytest.approx(SEND_SECONDS, abs=NEAR), "a transfer ends when the rows have left"


def test_with_half_duplex_a_stage_sends_behind_all_that_it_receives() -> None:
    assert transfers_of(RANK, TOPOLOGY, "half")[0][0].target == RANK, "the stage was to receive first"
    messages = [StageMessage((RequestUpdate(1, step=rows()),), number == 3) for number in range(1, 4)]
    _, log = served(messages, "half")
    between = ["receive", "await", "send", "replay", "await"]
    assert log == ["receive", "replay", "await", *between, *between, "send"]
    assert served([StageMessage((RequestUpdate(1, step=rows()),), True)])[1] == ["receive", "replay", "await", "send"]
