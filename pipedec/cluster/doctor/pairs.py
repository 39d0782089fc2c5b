"""The group of two stages that follow each other, tried between their GPUs in the way in which stages connect: two processes meet
in a store, connect over NCCL (or over gloo, on processors), and one sends the other a message. Also the finding about it.

Each process has a time limit that the kernel enforces, as a call of NCCL or of the driver may never return.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from pipedec.cluster.doctor.findings import Finding, first_line, ok, problem
from pipedec.cluster.network import interface_of
from pipedec.cluster.processes import describe_exit
from pipedec.core.errors import RankLost

NEAR_SECONDS, FAR_SECONDS = 20.0, 40.0  # for a pair to connect and exchange the message, within a host and between two
START_SECONDS = 60.0  # for both processes to import torch and to open their GPUs
MESSAGE_BYTES = 1_000_000
_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.05
_NEAR = (
    "set NCCL_P2P_DISABLE=1 (with IOMMU or PCIe ACS switched on, many boards cannot copy from GPU to GPU), then "
    "NCCL_SHM_DISABLE=1 (/dev/shm is too small), in environment: of the host, and run the doctor again; or set transport: gloo"
)
_FAR = (
    "set NCCL_SOCKET_IFNAME to the interface that joins the hosts, NCCL_IB_DISABLE=1 if they have no InfiniBand, in "
    "environment: of both hosts, and run the doctor again; or set transport: gloo"
)


@dataclass(frozen=True)
class GpuPair:
    """Two GPUs by their numbers on their hosts: the sender and the receiver. ``host``: of the latter, if it is another one."""

    index: int
    other_index: int
    host: str | None = None

    @property
    def name(self) -> str:
        return f"GPU {self.index} → {f'{self.host} ' if self.host else ''}GPU {self.other_index}"


@dataclass(frozen=True)
class PairEnd:
    """One of the two processes that try a pair.

    Attributes:
        rank: 0 for the one that sends, 1 for the other.
        device: ``cuda:1``, or ``cpu`` for gloo.
        address, port: of the store in which both meet.
        number: of the trial, another one each time in this store.
        interface: for connections with another host; None if both are on this one.
        seconds: for the exchange.
    """

    rank: int
    device: str
    address: str
    port: int
    number: int
    interface: str | None
    seconds: float


def try_ends(ends: Sequence[PairEnd]) -> str | None:
    """Try the ends that are on this host, one or both. Returns why the pair does not work; None if it does."""
    with tempfile.TemporaryFile("w+") as errors:
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", __name__, msgspec.json.encode(end).decode()],
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors,
            )
            for end in ends
        ]  # fmt: skip
        deadline = time.monotonic() + START_SECONDS + ends[0].seconds
        statuses: list[int | None] = [None]
        while None in statuses and not any(statuses) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            statuses = [one.poll() for one in processes]
        for one in processes:
            one.kill()  # and not waited for if it is left: in the driver it may be beyond reach
        errors.seek(0)
        lines = errors.read().strip().splitlines()
    if not any(statuses):
        return f"no answer within {START_SECONDS + ends[0].seconds:g} s" if None in statuses else None
    failed = next(status for status in statuses if status)
    if failed == -signal.SIGALRM:
        return f"nothing has arrived within {ends[0].seconds:g} s"
    return lines[-1] if failed == 1 and lines else f"its process {describe_exit(failed)}"


def try_near(devices: Sequence[str], seconds: float = NEAR_SECONDS) -> str | None:
    """Try the pair of two ``devices`` of this host. Returns as ``try_ends``."""
    from pipedec.transport.rendezvous import StoreServer

    server = StoreServer(_LOOPBACK)
    return try_ends([PairEnd(rank, one, _LOOPBACK, server.port, 0, None, seconds) for rank, one in enumerate(devices)])


def pair_findings(pairs: Mapping[GpuPair, str | None]) -> list[Finding]:
    """The row about ``pairs`` that were tried, each with the reason why it does not work, or None."""
    if not pairs:
        return []
    if not (broken := {pair: reason for pair, reason in pairs.items() if reason is not None}):
        return [ok("GPU pairs", f"{', '.join(pair.name for pair in pairs)} exchange messages")]
    mends = dict.fromkeys(_NEAR if pair.host is None else _FAR for pair in broken)
    return [problem("GPU pairs", "; ".join(f"{pair.name}: {reason}" for pair, reason in broken.items()), "; ".join(mends))]


def near_pairs(num_gpus: int) -> dict[GpuPair, str | None]:
    """Try every GPU of this host with the next one. Returns as ``pair_findings`` takes it."""
    return {GpuPair(one, one + 1): try_near([f"cuda:{one}", f"cuda:{one + 1}"]) for one in range(num_gpus - 1)}


def _exchange(end: PairEnd) -> None:
    """Raises RankLost or RuntimeError if the pair does not work, and ends with SIGALRM if that takes too long."""
    import torch

    from pipedec.cluster.meeting import Interface, use_interface
    from pipedec.transport.rendezvous import Rendezvous, join_store, part_of_store, wait_for_key
    from pipedec.transport.torch_distributed import try_pair

    store, device = part_of_store(join_store(end.address, end.port), end.number), torch.device(end.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    store.set(f"end {end.rank}", "is here")
    if not wait_for_key(store, f"end {1 - end.rank}", START_SECONDS):
        raise RankLost(f"the process of the other GPU has not come within {START_SECONDS:g} s")
    if end.interface is not None:
        use_interface(Interface(end.interface, end.address, "the other host is reached by it"))
    interface = end.interface or interface_of(_LOOPBACK) or "lo"
    signal.setitimer(signal.ITIMER_REAL, end.seconds)
    try_pair(Rendezvous(end.rank + 1, 3, store, end.seconds, interface), device, MESSAGE_BYTES)
    store.set(f"done {end.rank}", "")
    wait_for_key(store, f"done {1 - end.rank}", end.seconds)


def main() -> None:
    """Entry point of the process of an end: ``python -m pipedec.cluster.doctor.pairs JSON``."""
    from pipedec.config.environment import set_rank_environment

    end, status = msgspec.json.decode(sys.argv[1], type=PairEnd), 0
    set_rank_environment()
    try:
        _exchange(end)
    except Exception as error:  # a driver that fails in any way
        print(first_line(error), file=sys.stderr, flush=True)
        status = 1
    os._exit(status)  # NCCL's and gloo's groups may wait for the other process


if __name__ == "__main__":
    main()
