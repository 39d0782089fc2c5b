"""A run on emulated devices: real ranks sleep for the time that their device would take, or one clock adds up the times of a
pipeline in one process.

Verdicts, rank 0's own work and Redis take real time. ``plan.emulation`` says how long work should last; without an emulation
nothing of this is used.
"""

from __future__ import annotations

import fcntl
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from pipedec.config import state_directory
from pipedec.core.stage_message import Load
from pipedec.decoding import TimestepTiming
from pipedec.decoding.events import TimestepLoad
from pipedec.device import Device, HostDevice
from pipedec.plan.emulation import Emulation
from pipedec.plan.partition import delay_by_sharing_ms, slowest_transfers_ms
from pipedec.topology import Topology


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


class Pacer:
    """Makes a rank's work take as long as on its emulated device.

    The real work of ``device`` counts towards the emulated time; the rank sleeps for the remainder. A computation that takes
    longer than its emulated time is an overrun and must be reported. A transfer that takes longer is part of the fixed cost of
    a timestep. A rank that shares its emulated device with another one takes turns with it (see ``Turn``).
    """

    def __init__(self, emulation: Emulation, rank: int, run_id: str, device: Device | None = None) -> None:
        shares = emulation.shared_stage is not None and rank in (0, emulation.shared_stage)
        self._turn: AbstractContextManager[object] = Turn(run_id) if shares else nullcontext()
        self._timing = emulation.timing(rank)
        self._slow_motion = emulation.slow_motion
        self._device = HostDevice() if device is None else device
        self._overran = False

    @contextmanager
    def computing(self, load: Load) -> Iterator[None]:
        """Pace one forward of ``load`` through this rank's layers."""
        if not load.rows:
            yield
            return
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


class OwnWork:
    """Rank 0's own work since ``restart``: the CPU time of its thread, without forwards of the draft, which it notes."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.drafted: list[Load] = []  # the load of each forward
        self._began, self._drafting = time.thread_time(), 0.0

    @contextmanager
    def drafting(self, load: Load, forwards: int = 1) -> Iterator[None]:
        """Context of a draft forward: on an emulated device each waits for the host, so ``forwards`` is 1."""
        del forwards
        began = time.thread_time()
        yield
        self.drafted.append(load)
        self._drafting += time.thread_time() - began

    @property
    def seconds(self) -> float:
        return time.thread_time() - self._began - self._drafting


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
        self.own_work = OwnWork()
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
