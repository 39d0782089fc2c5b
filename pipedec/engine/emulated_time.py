"""Emulated time: ``Pacer`` lets a real rank sleep, ``EmulatedClock`` adds up the times of a pipeline in one process.

``plan/emulation.py`` defines how long work takes. Chunks of prompts are rows like others. Verdicts, rank 0's own work and Redis
are not emulated: they take real time.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from pipedec.config import state_directory
from pipedec.core import Load
from pipedec.decoding import TimestepTiming
from pipedec.device import Device, HostDevice
from pipedec.plan.emulation import Emulation
from pipedec.plan.partition import delay_by_sharing_ms, slowest_transfers_ms
from pipedec.topology import Topology

_ALONE: AbstractContextManager[object] = nullcontext()


class Turn:
    """The emulated device that rank 0 and a stage share: one forward at a time. Use as a context manager.

    It is a lock on one byte of a file that all runs of a state directory share. It is released when its process ends.

    Args:
        run_id: the run whose ranks share the device.
    """

    def __init__(self, run_id: str) -> None:
        self._file = _devices(state_directory())
        self._byte = crc32(run_id.encode())

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX, 1, self._byte)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, self._byte)


@cache
def _devices(directory: Path) -> BinaryIO:
    """The file of the locks, opened once: closing it would release all locks of the process."""
    return (directory / "emulated-devices").open("wb")


def turn_of(emulation: Emulation | None, rank: int, run_id: str) -> AbstractContextManager[object]:
    """The context in which a rank computes: the ``Turn`` of a device that it shares, or nothing."""
    shares = emulation is not None and emulation.shared_stage is not None and rank in (0, emulation.shared_stage)
    return Turn(run_id) if shares else _ALONE


class Pacer:
    """Makes a rank's work take as long as on its emulated device; without an emulation it does nothing.

    Real work counts towards the emulated time; the rank sleeps for the remainder. A computation that takes longer than its
    emulated time is an overrun and must be reported. A transfer that takes longer is part of the fixed cost of a timestep.

    Args:
        device: the device that does the real work.
        turn: held while the rank computes, if it shares its emulated device with another rank.
    """

    def __init__(
        self, emulation: Emulation | None, rank: int, device: Device | None = None, turn: AbstractContextManager[object] = _ALONE
    ) -> None:
        self._turn = turn
        self._emulation = emulation
        self._rank = rank
        self._device = HostDevice() if device is None else device
        self._overran = False

    @contextmanager
    def computing(self, load: Load) -> Iterator[None]:
        """Pace one forward of ``load`` through this rank's layers."""
        timing = self._emulation and self._emulation.timing(self._rank)
        with self._turn:
            end = self._end(timing.compute_ms(load) if timing else 0.0)
            yield
            if timing:
                self._device.record_event().wait()
            self._overran |= timing is not None and time.perf_counter() > end
            _sleep_until(end)

    @contextmanager
    def sending(self, source: int, rows: int) -> Iterator[None]:
        """Pace the transfer of ``rows`` rows from rank ``source``, on the sending or the receiving rank."""
        end = self._sent_at(source, rows)
        yield
        _sleep_until(end)

    def delay_sending(self, rows: int) -> None:
        """Sleep for the time that ``rows`` rows take from this rank to the next."""
        _sleep_until(self._sent_at(self._rank, rows))

    @property
    def is_emulating(self) -> bool:
        return self._emulation is not None

    def take_overran(self) -> bool:
        """Whether there was an overrun since the last call."""
        overran, self._overran = self._overran, False
        return overran

    def _sent_at(self, source: int, rows: int) -> float:
        timing = self._emulation and self._emulation.timing(source)
        return self._end(timing.send_ms(rows) if timing else 0.0)

    def _end(self, emulated_ms: float) -> float:
        slow_motion = self._emulation.slow_motion if self._emulation else 0.0
        return time.perf_counter() + emulated_ms * slow_motion / 1000


def _sleep_until(end: float) -> None:
    if (remaining := end - time.perf_counter()) > 0:
        time.sleep(remaining)


@dataclass
class TimestepLoad:
    """The work of one timestep.

    Attributes:
        drafted: the load of each draft forward.
        computed: by rank.
        sent: rows by sender.
        deciding_seconds: rank 0's own work between two timesteps: verdicts, and the rows that enter next. All stages wait for it.
        beside_seconds: rank 0's own work while the stages compute, besides the draft forwards.
    """

    drafted: list[Load] = field(default_factory=list)
    computed: dict[int, Load] = field(default_factory=dict)
    sent: dict[int, int] = field(default_factory=dict)
    deciding_seconds: float = 0.0
    beside_seconds: float = 0.0


class EmulatedClock:
    """Adds up the duration of timesteps: rank 0's decisions, then the slowest group or rank 0, then the slowest transfers.

    On a device that they share, rank 0's forwards and the stage's each get half of the time while both compute.
    """

    def __init__(self, emulation: Emulation, topology: Topology) -> None:
        self._emulation = emulation
        self._topology = topology
        self.total_ms = 0.0

    def seconds(self) -> float:
        """The time so far."""
        return self.total_ms / 1000

    def add(self, load: TimestepLoad) -> TimestepTiming:
        """Add a timestep and return its timing as rank 0 would measure it."""
        own = (load.deciding_seconds, load.beside_seconds) if self._emulation.counts_own_work else (0.0, 0.0)
        deciding_ms, beside_ms = (1000 * seconds for seconds in own)
        forwards = self._forwards_ms(load)
        compute_ms, delay_ms = self._compute_ms(load, sum(forwards))
        if delay_ms:
            forwards = [forward * (1 + delay_ms / sum(forwards)) for forward in forwards]
        busy_ms = sum(forwards) + beside_ms
        timestep_ms = deciding_ms + max(busy_ms, compute_ms) + self._transfer_ms(load)
        self.total_ms += timestep_ms
        waiting_ms = timestep_ms - deciding_ms - busy_ms
        return TimestepTiming(timestep_ms / 1000, waiting_ms / 1000, tuple(forward / 1000 for forward in forwards))

    def _forwards_ms(self, load: TimestepLoad) -> list[float]:
        draft = self._emulation.draft
        return [draft.compute_ms(forward) for forward in load.drafted] if draft else []

    def _compute_ms(self, load: TimestepLoad, drafting_ms: float) -> tuple[float, float]:
        """The slowest group; and how much longer rank 0's forwards take because they share a stage's device."""
        slowest, delay_ms = 0.0, 0.0
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
            slowest = max(slowest, work + inside)
        return slowest, delay_ms

    def _transfer_ms(self, load: TimestepLoad) -> float:
        leaving = {rank: self._send_ms(rank, load) for rank in load.sent if self._topology.feeds_next_group(rank)}
        return slowest_transfers_ms(leaving, self._topology.num_stages, self._emulation.duplex)

    def _send_ms(self, rank: int, load: TimestepLoad) -> float:
        timing = self._emulation.timing(rank)
        return timing.send_ms(load.sent[rank]) if timing and rank in load.sent else 0.0
