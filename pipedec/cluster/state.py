"""Running clusters: how a client finds one, and how several on one machine are kept apart.

A cluster started here by ``pipedec up``, ``launch`` or ``serve`` leaves a state file in a private directory; any other cluster
is named by its Redis URL and run. The file holds the Redis password, so only its owner may read it.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shlex
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import quote

from pipedec.config import state_directory
from pipedec.config.redis import redis_config
from pipedec.core.errors import PipedecError, SchedulerLost, UserError
from pipedec.scheduler import ClientScheduler, connect, read_description
from pipedec.topology import Topology

STOP_SECONDS = 20.0
DEFAULT_RUN = "default"  # name of the run if the user names a Redis but no run


@dataclass(frozen=True)
class RunningCluster:
    """A run and its Redis."""

    redis_url: str
    run_id: str
    pid: int | None = None  # process id of its supervisor, if that runs on this machine
    began: int | None = None  # when the supervisor started (see ``process_start``)
    outlives_supervisor: bool = False  # whether the run goes on if that is killed

    def connect(self) -> ClientScheduler:
        """The run's scheduler for a client. Raises SchedulerLost, or UserError if there is no such run in this version."""
        client = connect(self.redis_url)
        description = read_description(client, self.run_id)
        if description is None:
            raise no_such_run(self.run_id)
        return ClientScheduler(client, self.run_id, Topology(description.groups))

    def save(self) -> None:
        """Let clients here find it. Raises UserError as ``check_unused``, and PipedecError if the file cannot be written."""
        path = _state_file(self.run_id)
        partial = path.with_suffix(f".{os.getpid()}")
        try:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(asdict(self)))
            with _locked(path.parent):
                check_unused(self.run_id)
                partial.rename(path)
        except OSError as error:
            raise PipedecError(f"{path} cannot be written ({error.strerror}): make room there") from error
        finally:
            partial.unlink(missing_ok=True)

    def forget(self) -> None:
        """Remove the state file if it is (still) this cluster's."""
        if read_state(self.run_id) == self:
            _state_file(self.run_id).unlink(missing_ok=True)

    def is_alive(self) -> bool:
        """Whether the supervisor's process exists. A zombie does not count, nor another process with a reused process id."""
        return self.pid is not None and (start := process_start(self.pid)) is not None and self.began in (None, start)

    def goes_on(self) -> bool:
        """Whether the run is up, with its supervisor or without."""
        if self.is_alive() or not self.outlives_supervisor:
            return self.is_alive()
        try:
            return read_description(connect(self.redis_url), self.run_id) is not None
        except SchedulerLost:
            return False

    def wait_until_gone(self) -> bool:
        """Wait for the supervisor to end; False if it did not within ``STOP_SECONDS``."""
        deadline = time.monotonic() + STOP_SECONDS
        while self.is_alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True


def find_run(redis_url: str | None, run_id: str | None) -> RunningCluster:
    """The cluster named by flags, else by the environment, else the one started here. Raises UserError if there is none."""
    if (named := redis_config(redis_url).connection_url) is not None:
        return RunningCluster(named, run_id or DEFAULT_RUN)
    running = running_here()
    names = " or ".join(f"{state.run_id} (process {state.pid})" for state in running)
    found = running if run_id is None else [state for state in running if state.run_id == run_id]
    if not found:
        if running:
            raise UserError(f"no cluster named {run_id!r} is running here: give --run {names}")
        raise UserError(
            "no cluster is running here: start one with `pipedec up` or `pipedec launch`, or give --redis URL --run NAME"
        )
    if len(found) > 1:
        raise UserError(f"{len(found)} clusters are running here: choose one, --run {names}")
    return found[0]


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Context that one process at a time is in, where the file system has locks. Leaves no file."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def no_such_run(run_id: str) -> UserError:
    """The error if Redis does not have a run."""
    return UserError(f"no cluster named {run_id!r} is running on that Redis: start one, or give --run NAME")


def running_here() -> list[RunningCluster]:
    """The clusters that were started here and go on, by run. PipedecError for a damaged state file."""
    states = [state for path in sorted(_state_file("*").parent.glob(_state_file("*").name)) if (state := _read(path)) is not None]
    running = [state for state in states if state.goes_on()]
    for state in states:
        if state not in running and not state.outlives_supervisor:  # it was killed
            state.forget()
    return running


def read_state(run_id: str) -> RunningCluster | None:
    """The cluster that was started here under this name, running or not. PipedecError if its state file is damaged."""
    return _read(_state_file(run_id))


def check_unused(run_id: str) -> None:
    """Raise UserError if a cluster of this name runs here."""
    if (state := read_state(run_id)) is not None and state.goes_on():
        command = f"pipedec down --run {shlex.quote(run_id)}"
        raise UserError(
            f"a cluster named {run_id!r} is already running here: stop it with `{command}`, or give another --run NAME"
        )


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process or it is a zombie.

    (Where orphans are not reaped, as in some containers, signal 0 would report a zombie as alive.)
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _read(path: Path) -> RunningCluster | None:
    try:
        return RunningCluster(**json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise PipedecError(f"{path} is damaged: remove it ({error})") from error


def _state_file(run_id: str) -> Path:
    """Hosts and containers may share the directory: each place where process ids are unique has its own files."""
    place = [socket.gethostname()]
    with suppress(OSError):  # not Linux
        place += [Path("/proc/sys/kernel/random/boot_id").read_text(), str(os.stat("/proc/self/ns/pid").st_ino)]
    name = run_id if run_id == "*" else quote(run_id, safe="")
    return state_directory() / f"cluster-{hashlib.sha256(' '.join(place).encode()).hexdigest()[:8]}-{name}.json"
