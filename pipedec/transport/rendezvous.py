"""The store through which the processes of a group find each other. Knows nothing about these processes."""

from __future__ import annotations

import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, TCPStore
from torch._C._distributed_c10d import Store as Store
from torch.distributed import DistError
from torch.distributed.rendezvous import rendezvous

from pipedec.core.errors import PipedecError, RankLost

MEETING_SECONDS = 120.0  # for all ranks to join; also the longest duration of a single transfer
CONNECT_SECONDS = 10.0
_POLL_SECONDS = 0.002


@dataclass(frozen=True)
class Rendezvous:
    """How the ranks of a run find each other: through one store, which all of them pass."""

    rank: int
    world_size: int
    store: Store
    timeout_seconds: float  # how long to wait for the other ranks, and later for any single transfer
    interface: str  # the network interface of this rank's transfers


class AbortableStore(Store):
    """A store whose waits end on ``abort`` from another thread, and after ``timeout_seconds``."""

    def __init__(self, store: Store, timeout_seconds: float) -> None:
        super().__init__()
        self._store = store
        self._timeout_seconds = timeout_seconds
        self._is_aborted = False

    def abort(self) -> None:
        self._is_aborted = True

    def set(self, key: str, value: str | bytes) -> None:
        put: Any = self._store.set  # the stubs do not know bytes
        put(key, value if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._store.get(key)

    def check(self, keys: list[str]) -> bool:
        return self._store.check(keys)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(key, amount)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all ``keys`` are set. Ignores ``timeout``, in which the library passes that of a connection. Raises
        RuntimeError on ``abort``, or when the store's own time is over.
        """
        deadline = time.monotonic() + self._timeout_seconds
        while not self._store.check(keys):
            if self._is_aborted or time.monotonic() > deadline:
                raise RuntimeError("the transfers were aborted" if self._is_aborted else "a rank did not join in time")
            time.sleep(_POLL_SECONDS)


class StoreServer:
    """A store that other processes can join (``join_store``), on a free port of one address. It lasts as long as ``store``."""

    def __init__(self, address: str) -> None:
        """Raises PipedecError if ``address`` is not one of this machine's."""
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            with socket.socket(family) as listener:
                listener.bind((address, 0))
                listener.listen()
                self.port = int(listener.getsockname()[1])
                self.store = TCPStore(
                    address, self.port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
                    timeout=timedelta(seconds=CONNECT_SECONDS),
                )  # fmt: skip
        except (OSError, DistError) as error:
            raise PipedecError(f"cannot listen on {address}: {error}") from None


def join_store(address: str, port: int) -> Store:
    """Join the store of a ``StoreServer``. Raises RankLost if it does not answer within CONNECT_SECONDS."""
    try:
        return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
    except (RuntimeError, DistError):
        raise RankLost(f"rank 0 does not answer at {address}, port {port}") from None


def store_from_environment(timeout_seconds: float) -> Store:
    """The store named by MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE of torchrun. Raises RankLost if it is silent."""
    try:
        store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout_seconds))))
    except (RuntimeError, ValueError, DistError) as error:
        raise RankLost(f"could not join torchrun's store: {str(error).splitlines()[0]}") from None
    return store


def file_store(path: str | Path, world_size: int) -> Store:
    """A store in a file that all processes of one machine reach."""
    return FileStore(str(path), world_size)


def part_of_store(store: Store, number: int) -> Store:
    """A part of ``store`` for the meeting of this number, if there are several in it."""
    return PrefixStore(f"meeting {number}", store)


def wait_for_key(store: Store, key: str, seconds: float) -> bool:
    """Whether ``key`` is set within ``seconds``."""
    try:
        store.wait([key], timedelta(seconds=seconds))
        return True
    except (RuntimeError, DistError):
        return False
