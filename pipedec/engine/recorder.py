"""Times the pieces of a rank's work by events recorded on its device, and emulates slower devices.

A piece ends when the device has done it, perhaps long after the call that queued it. An emulated piece takes as long as
``plan/emulation.py`` says: ``Pacer`` lets a real rank sleep, ``EmulatedClock`` adds up the times of a pipeline in one process.
Verdicts, rank 0's own work and Redis take real time.
"""

from __future__ import annotations

import fcntl
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import BinaryIO, NamedTuple
from zlib import crc32

from pipedec.config import state_directory
from pipedec.core.stage_message import NO_LOAD, Load
from pipedec.decoding import TimestepTiming
from pipedec.decoding.events import TimedSpan, TimestepLoad
from pipedec.device import Device, DeviceEvent, HostDevice, PhaseTimes
from pipedec.plan.emulation import Emulation
from pipedec.plan.partition import delay_by_sharing_ms, slowest_transfers_ms
from pipedec.topology import Topology

_ALONE: AbstractContextManager[object] = nullcontext()


class Turn:
    """Context of a forward on the emulated device that rank 0 and a stage of run ``run_id`` share: a lock on one byte of a file
    that all runs of a state directory use. It ends with its process.
    """

    def __init__(self, run_id: str) -> None:
        self._file = _lock_file(state_directory())
        self._byte = crc32(run_id.encode())

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._byte)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._byte)


@cache
def _lock_file(directory: Path) -> BinaryIO:
    """Opened once: closing it would release all locks of the process."""
    return (directory / "emulated-devices").open("wb")


def turn_of(emulation: Emulation | None, rank: int, run_id: str) -> AbstractContextManager[object]:
    """The context in which a rank computes: the ``Turn`` of a device that it shares, or nothing."""
    shares = emulation is not None and emulation.shared_stage is not None and rank in (0, emulation.shared_stage)
    return Turn(run_id) if shares else _ALONE


class Pacer:
    """Makes a rank's work take as long as on its emulated device; without an emulation it does nothing.

    The real work of ``device`` counts towards the emulated time; the rank sleeps for the remainder. A computation that takes
    longer than its emulated time is an overrun and must be reported. A transfer that takes longer is part of the fixed cost of
    a timestep. ``turn`` is held while a rank computes that shares its emulated device with another one.
    """

    def __init__(
        self, emulation: Emulation | None, rank: int, device: Device | None = None, turn: AbstractContextManager[object] = _ALONE
    ) -> None:
        self.is_emulating = emulation is not None
        self._turn = turn
        self._timing = None if emulation is None else emulation.timing(rank)
        self._slow_motion = 0.0 if emulation is None else emulation.slow_motion
        self._device = HostDevice() if device is None else device
        self._overran = False

    @contextmanager
    def computing(self, load: Load) -> Iterator[None]:
        """Pace one forward of ``load`` through this rank's layers."""
        with self._turn:
            end = self._end(self._timing.compute_ms(load) if self._timing else 0.0)
            yield
            if self._timing is not None:
                self._device.record_event().wait()
                self._overran |= time.perf_counter() > end
            _sleep_until(end)

    def delay_sending(self, rows: int) -> None:
        """Sleep for the time that ``rows`` rows take from this rank to the next."""
        _sleep_until(self._end(self._timing.send_ms(rows) if self._timing else 0.0))

    def take_overran(self) -> bool:
        """Whether there was an overrun since the last call."""
        overran, self._overran = self._overran, False
        return overran

    def _end(self, emulated_ms: float) -> float:
        """When work that begins now must end."""
        return time.perf_counter() + emulated_ms * self._slow_motion / 1000


def _sleep_until(end: float) -> None:
    if (remaining := end - time.perf_counter()) > 0:
        time.sleep(remaining)


class EmulatedClock:
    """Adds up the duration of timesteps: rank 0's decisions, then the slowest group or rank 0, then the slowest transfers. If
    rank 0 and a stage share a device, each gets half of its time while both compute.

    With a passage longer than the groups, nothing waits for anything else at a timestep: a group computes a message when it has
    arrived and the group is free, links carry several at once, and rank 0 waits for the result that it takes.
    """

    def __init__(self, emulation: Emulation, topology: Topology) -> None:
        self._emulation = emulation
        self._topology = topology
        self._free = [0.0] * topology.num_groups  # when each group has computed what it has
        self._link_free = [0.0] * (topology.num_groups + 1)  # when each link has sent all bytes that it has
        self.total_ms = 0.0
        self.restart()

    def seconds(self) -> float:
        """The time so far."""
        return self.total_ms / 1000

    def restart(self) -> None:
        """From now on, the one message in front of each group but the first is ready, and nothing is on its way to rank 0."""
        inner = [deque([self.total_ms]) for _ in self._free[1:]]
        self._ready = [deque[float](), *inner, deque[float]()]  # by link: when each message could leave

    def add(self, load: TimestepLoad, taken: int | None = None) -> TimestepTiming:
        """Add a timestep and return its timing as rank 0 would measure it.

        Args:
            taken: timesteps whose results rank 0 takes at this one, if some are on links; None if the passage is the groups.
        """
        own = (load.deciding_seconds, load.beside_seconds) if self._emulation.counts_own_work else (0.0, 0.0)
        deciding_ms, beside_ms = (1000 * seconds for seconds in own)
        draft = self._emulation.draft
        forwards = [draft.compute_ms(forward) for forward in load.drafted] if draft else []
        groups_ms, delay_ms = self._groups_ms(load, sum(forwards))
        if delay_ms:
            forwards = [forward * (1 + delay_ms / sum(forwards)) for forward in forwards]
        busy_ms = sum(forwards) + beside_ms
        if taken is None:
            self.restart()
            leaving = {rank: self._send_ms(rank, load) for rank in load.sent if self._topology.feeds_next_group(rank)}
            transfer_ms = slowest_transfers_ms(leaving, self._topology.num_stages, self._emulation.duplex)
            timestep_ms = deciding_ms + max(busy_ms, *groups_ms) + transfer_ms
        else:
            timestep_ms = max(deciding_ms + busy_ms, self._pass_on(load, groups_ms, deciding_ms, taken) - self.total_ms)
        self.total_ms += timestep_ms
        waiting_ms = timestep_ms - deciding_ms - busy_ms
        return TimestepTiming(timestep_ms / 1000, waiting_ms / 1000, tuple(forward / 1000 for forward in forwards))

    def _pass_on(self, load: TimestepLoad, groups_ms: Sequence[float], deciding_ms: float, taken: int) -> float:
        """Let rank 0 send a message, and every group compute one. Returns when the results that rank 0 takes have arrived."""
        self._ready[0].append(self.total_ms + deciding_ms)
        for group, compute_ms in reversed(list(enumerate(groups_ms))):
            self._free[group] = max(self._arrive(group, load), self._free[group]) + compute_ms
            self._ready[group + 1].append(self._free[group])
        arrived = 0.0
        for _ in range(taken):
            arrived = self._arrive(-1, load)
        return arrived

    def _arrive(self, link: int, load: TimestepLoad) -> float:
        """When the next message of a link arrives, whose rows count as sent at this timestep."""
        sender = (0, *self._topology.exit_ranks)[link]
        timing = self._emulation.timing(sender)
        occupied_ms = timing.occupied_ms(load.sent.get(sender, 0)) if timing else 0.0
        self._link_free[link] = max(self._ready[link].popleft(), self._link_free[link]) + occupied_ms
        return self._link_free[link] + (timing.send_ms(0) if timing else 0.0)

    def _groups_ms(self, load: TimestepLoad, drafting_ms: float) -> tuple[list[float], float]:
        """How long each group takes; and how much longer rank 0's forwards take because they share a stage's device."""
        groups_ms, delay_ms = list[float](), 0.0
        for group in self._topology.groups:
            inside, work = sum(self._send_ms(rank, load) for rank in group[:-1]), 0.0
            for rank in group:
                if rank not in load.computed:
                    continue
                compute_ms = self._emulation.stages[rank - 1].compute_ms(load.computed[rank])
                if rank == self._emulation.shared_stage:
                    sent = sum(self._send_ms(earlier, load) for earlier in group if earlier < rank)
                    delay_ms = delay_by_sharing_ms(drafting_ms, work + sent, compute_ms)
                    compute_ms += delay_ms
                work += compute_ms
            groups_ms.append(work + inside)
        return groups_ms, delay_ms

    def _send_ms(self, rank: int, load: TimestepLoad) -> float:
        timing = self._emulation.timing(rank)
        return timing.send_ms(load.sent[rank]) if timing and rank in load.sent else 0.0


class _Piece(NamedTuple):
    """A piece of work that the device may not have finished. Its label is that of a trace."""

    began: DeviceEvent
    ended: DeviceEvent
    label: str = ""
    category: str = ""
    load: Load = NO_LOAD

    @property
    def seconds(self) -> float:
        return self.ended.seconds - self.began.seconds


class Recorder:
    """Times the work of one rank on ``device``."""

    def __init__(self, pacer: Pacer, device: Device | None = None) -> None:
        self.pacer = pacer  # of the rank's emulated device
        device = HostDevice() if device is None else device
        self.record_event = device.record_event  # records an event after all work queued on the rank's device
        self.phases = PhaseTimes(device)  # how long the device is in each phase of a rank's work
        self._spans: list[_Piece] = []
        self._forwards: list[_Piece] = []  # of the draft model
        self._waits: list[_Piece] = []
        self.restart()

    def restart(self) -> None:
        """Begin a timestep now, and discard the measurements of the current one."""
        self._began = time.perf_counter()
        self._own_began = time.thread_time()
        self._drafting = 0.0  # CPU time of the draft forwards
        self._waits.clear()
        self._forwards.clear()

    def computing(self, load: Load) -> AbstractContextManager[None]:
        """Context whose body takes as long as ``load`` on the emulated device, if there is one."""
        return self.pacer.computing(load) if load.rows and self.pacer.is_emulating else nullcontext()

    @contextmanager
    def span(self, label: str, category: str, load: Load = NO_LOAD) -> Iterator[None]:
        """Context whose body is recorded as a span, paced as by ``computing``."""
        began = self.record_event()
        with self.computing(load):
            yield
        self.add(label, category, began)

    def add(self, label: str, category: str, began: DeviceEvent, ended: DeviceEvent | None = None) -> None:
        """Record a span. It ends after all work queued on the device, unless ``ended`` is given."""
        self._spans.append(_Piece(began, self.record_event() if ended is None else ended, label, category))

    @contextmanager
    def drafting(self, load: Load) -> Iterator[None]:
        """Context of one draft forward, which is timed and paced."""
        began, cpu_began = self.record_event(), time.thread_time()
        with self.computing(load):
            yield
        self._forwards.append(_Piece(began, self.record_event(), load=load))
        self._drafting += time.thread_time() - cpu_began

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Context in which the rank waits; it counts from when its device has finished the queued work."""
        began = self.record_event()
        yield
        self._waits.append(_Piece(began, self.record_event()))

    def note_beside(self, load: TimestepLoad) -> None:
        """Enter the draft forwards since ``restart`` into ``load``, and this thread's other CPU time."""
        load.drafted = [forward.load for forward in self._forwards]
        load.beside_seconds = time.thread_time() - self._own_began - self._drafting

    def timing(self) -> TimestepTiming:
        """The timing of the timestep that ends now. Work that the device has not finished belongs to the next one."""
        forwards, later_forwards = _finished(self._forwards)
        waits, later_waits = _finished(self._waits)
        waited, drafted = sum([wait.seconds for wait in waits]), tuple([forward.seconds for forward in forwards])
        timing = TimestepTiming(time.perf_counter() - self._began, waited, drafted)
        self.restart()
        self._forwards, self._waits = later_forwards, later_waits
        return timing

    def take_spans(self) -> tuple[TimedSpan, ...]:
        """The spans that have not been taken yet and that the device has finished."""
        finished, self._spans = _finished(self._spans)
        times = ((one.label, one.category, one.began.seconds, one.ended.seconds) for one in finished)
        return tuple([TimedSpan(label, category, min(began, ended), ended) for label, category, began, ended in times])

    def await_spans(self) -> None:
        """Wait until the device has finished all spans."""
        for span in self._spans:
            span.began.wait()
            span.ended.wait()


def _finished(pieces: list[_Piece]) -> tuple[list[_Piece], list[_Piece]]:
    """The pieces that the device has finished, and the others. With two streams an end may come before its beginning."""
    finished, others = list[_Piece](), list[_Piece]()
    for piece in pieces:
        (finished if piece.began.has_passed and piece.ended.has_passed else others).append(piece)
    return finished, others
