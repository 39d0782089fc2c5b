"""Marks, phases and recorded spans of a device that carries out its work late."""

from __future__ import annotations

import time

import pytest
import torch
from support.fake_cuda import FakeCuda

from benchmarks.kernels.stopwatch import Stopwatch
from pipedec.core.stage_message import Load
from pipedec.device import GpuDevice, HostDevice, PhaseTimes, device_of, to_device, to_host
from pipedec.engine.recorder import Recorder

NEAR = 1e-3  # seconds; what the simulated host needs between two calls is far less
CPU = torch.device("cpu")


def gpu(cuda: FakeCuda) -> GpuDevice:
    return GpuDevice(cuda=cuda, now=lambda: cuda.now)


def test_a_mark_is_passed_when_the_work_before_it_is_done() -> None:
    cuda = FakeCuda()
    device = gpu(cuda)
    began = device.record_event()
    cuda.give(0.03)
    ended = device.record_event()
    assert not ended.has_passed
    with pytest.raises(RuntimeError, match="before it was reached"):
        _ = ended.seconds
    cuda.advance(0.02)
    assert not ended.has_passed
    ended.wait()
    assert ended.has_passed and ended.seconds - began.seconds == pytest.approx(0.03, abs=NEAR)
    assert ended.seconds == pytest.approx(cuda.now, abs=NEAR)


def test_marks_tell_the_hosts_time_however_long_ago_the_device_was_idle() -> None:
    cuda = FakeCuda()
    device = gpu(cuda)
    for _ in range(3):
        cuda.advance(1000.0)  # the device is idle
        launched = cuda.now
        marks = []
        for _ in range(4):
            cuda.give(0.5)
            marks.append(device.record_event())
        marks[-1].wait()
        assert [mark.seconds - launched for mark in marks] == pytest.approx([0.5, 1.0, 1.5, 2.0], abs=NEAR)


def test_a_stream_beside_does_not_wait_unless_it_joins() -> None:
    cuda = FakeCuda()
    device = gpu(cuda)
    with device.beside("copies"):
        cuda.give(0.02)
        copied = device.record_event()
    cuda.give(0.005)
    computed = device.record_event()
    copied.join()
    cuda.give(0.001)
    joined = device.record_event()
    start = cuda.now
    joined.wait()
    assert [mark.seconds - start for mark in (computed, copied, joined)] == pytest.approx([0.005, 0.02, 0.021], abs=NEAR)


def test_phases_are_those_of_the_device_and_count_when_they_have_ended() -> None:
    """The device computes while its host already waits, so less of the waiting is the device's."""
    cuda = FakeCuda()
    device = gpu(cuda)
    phases = PhaseTimes(device)
    phases.begin("computing")
    cuda.give(0.03)
    phases.begin("waiting")
    assert phases.seconds("computing") == 0.0
    cuda.advance(0.04)
    phases.begin("computing")
    cuda.give(0.005)
    phases.begin("waiting")
    cuda.advance(0.001)
    assert phases.seconds("computing") == pytest.approx(0.03, abs=NEAR)
    assert phases.seconds("waiting") == pytest.approx(0.01, abs=NEAR)
    cuda.advance(0.01)
    assert phases.seconds("computing") == pytest.approx(0.035, abs=NEAR)


def test_spans_last_until_the_device_has_done_the_work() -> None:
    cuda = FakeCuda()
    device = gpu(cuda)
    recorder, launched = Recorder(device), cuda.now
    with recorder.span("2F17", "dec", Load(3)):
        cuda.give(0.03)
    began = recorder.record_event()
    with device.beside("send"):
        cuda.give(0.1)
        sent = device.record_event()
    recorder.add("2>3@17", "transfer", began, sent)
    assert recorder.take_spans() == (), "a span was told before its end"
    cuda.advance(0.05)
    (span,) = recorder.take_spans()
    assert span.label == "2F17" and (span.began, span.ended) == pytest.approx((launched, launched + 0.03), abs=NEAR)
    recorder.await_spans()
    (span,) = recorder.take_spans()
    assert span.label == "2>3@17" and span.ended == pytest.approx(launched + 0.1, abs=NEAR)
    assert recorder.take_spans() == (), "a span is told once"


def test_a_transfer_that_ends_before_its_begin_is_passed_is_recorded_later() -> None:
    """Rows can leave on a stream of their own while the device is still at what it had been given before them."""
    cuda = FakeCuda()
    device = gpu(cuda)
    recorder, launched = Recorder(device), cuda.now
    cuda.give(0.1)
    began = recorder.record_event()
    with device.beside("send"):
        cuda.give(0.02)
        sent = device.record_event()
    recorder.add("0>1@17", "transfer", began, sent)
    cuda.advance(0.05)
    assert sent.has_passed and not began.has_passed
    assert recorder.take_spans() == ()
    recorder.await_spans()
    (span,) = recorder.take_spans()
    assert (span.began, span.ended) == pytest.approx((launched + 0.02, launched + 0.02), abs=NEAR), "it takes no time"


def test_draft_forwards_are_timed_to_their_ends() -> None:
    cuda = FakeCuda()
    recorder = Recorder(gpu(cuda))
    with recorder.drafting(Load(1)):
        cuda.give(0.02)
    with recorder.drafting(Load(1)):
        cuda.give(0.04)
    cuda.advance(0.03)
    assert recorder.timing().forward_seconds == pytest.approx((0.02,), abs=NEAR)
    with recorder.waiting():
        cuda.advance(0.05)
    timing = recorder.timing()
    assert timing.forward_seconds == pytest.approx((0.04,), abs=NEAR)
    assert timing.waiting_seconds == pytest.approx(0.02, abs=NEAR), "the device was still drafting"
    assert recorder.timing().forward_seconds == ()


def test_what_was_recorded_before_a_restart_is_discarded() -> None:
    cuda = FakeCuda()
    recorder = Recorder(gpu(cuda))
    with recorder.drafting(Load(1)), recorder.waiting():
        cuda.give(0.02)
    recorder.restart()
    cuda.advance(1.0)
    timing = recorder.timing()
    assert (timing.forward_seconds, timing.waiting_seconds) == ((), 0.0)


def test_the_stopwatch_stops_when_the_device_has_finished() -> None:
    cuda = FakeCuda()
    watch = Stopwatch(CPU, 5, gpu(cuda))
    times_us = watch.time_us(lambda: cuda.give(0.5), lambda _: cuda.give(0.002))
    assert times_us["median"] == pytest.approx(2000, abs=NEAR * 1e6)


def test_a_cpu_has_passed_every_mark_and_copies_nothing() -> None:
    device, tensor = device_of(CPU), torch.arange(3)
    assert isinstance(device, HostDevice)
    before, mark, after = time.perf_counter(), device.record_event(), time.perf_counter()
    assert mark.has_passed and before <= mark.seconds <= after
    mark.wait()
    with device.beside("anything"):
        mark.join()
    assert to_device(tensor, "cpu") is tensor and to_host(tensor) is tensor
