"""Running clusters: how a client finds one, and how two on one machine are kept apart.

A cluster started here by ``pipedec up`` or ``pipedec launch`` leaves a state file in a private directory; any other cluster is
named by its Redis URL and run. The file holds the Redis password, so only its owner may read it.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from pipedec.config import state_directory
from pipedec.config.redis import redis_config
from pipedec.core import PipedecError, SchedulerLost, UserError
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
        """Make this the machine's running cluster. Raises PipedecError if the file cannot be written."""
        path = _state_file()
        partial = path.with_suffix(".partial")
        try:
            partial.touch(mode=0o600)
            partial.write_text(json.dumps(asdict(self)))
            partial.rename(path)
        except OSError as error:
            raise PipedecError(f"{path} cannot be written ({error.strerror}): make room there") from error

    def forget(self) -> None:
        """Remove the state file if it is (still) this cluster's."""
        if read_state() == self:
            _state_file().unlink(missing_ok=True)

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


class MachineLock:
    """The lock of a state directory, for the one ``pipedec up`` or ``launch`` that may run under it. Raises UserError if another
    process holds the lock, or the state file names a cluster that is alive.

    The kernel releases the lock when the process that holds it ends for any reason. A detached process inherits the lock from the
    command that started it, as an open file descriptor (``fileno``, then ``inherited``).
    """

    def __init__(self, inherited: int | None = None) -> None:
        if inherited is not None:
            self._descriptor = inherited
            return
        self._descriptor = os.open(state_directory(), os.O_RDONLY)  # locking the directory itself leaves no file behind
        other = None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            other = "another cluster is starting or stopping here: wait until that is done"
        state = read_state()
        if state is not None and state.goes_on():
            who = f"process {state.pid}" if state.is_alive() else f"run {state.run_id}"
            other = f"a cluster is already running here ({who}): stop it with `pipedec down`"
        if other is not None:
            self.release()
            raise UserError(other)

    def fileno(self) -> int:
        return self._descriptor

    def release(self) -> None:
        """Release the lock; a process that has inherited it still holds it."""
        os.close(self._descriptor)


def find_run(redis_url: str | None, run_id: str | None) -> RunningCluster:
    """The cluster named by flags, else by the environment, else the one started here. Raises UserError if there is none."""
    if (named := redis_config(redis_url).connection_url) is not None:
        return RunningCluster(named, run_id or DEFAULT_RUN)
    state = read_state()
    if state is None or run_id not in (None, state.run_id) or not state.goes_on():
        raise UserError(
            "no cluster is running here: start one with `pipedec up` or `pipedec launch`, or give --redis URL --run NAME"
        )
    return state


def no_such_run(run_id: str) -> UserError:
    """The error if Redis does not have a run."""
    return UserError(f"no cluster named {run_id!r} is running on that Redis: start one, or give --run NAME")


def read_state() -> RunningCluster | None:
    """The cluster in the state file, running or not."""
    try:
        return RunningCluster(**json.loads(_state_file().read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise PipedecError(f"{_state_file()} is damaged: remove it ({error})") from error


def process_start(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process or it is a zombie.

    (Where orphans are not reaped, as in some containers, signal 0 would report a zombie as alive.)
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _state_file() -> Path:
    return state_directory() / "cluster.json"
