"""``pipedec serve`` as a process of its own, in front of a cluster that is running, and what it uses of the machine."""

from __future__ import annotations

import json
import subprocess
import sys
from threading import Timer
from types import TracebackType
from typing import Self

import psutil

from pipedec.cluster.address import RunAddress
from pipedec.config import environment_with
from pipedec.core import PipedecError

_START_SECONDS = 60.0
_STOP_SECONDS = 30.0


class ServerUnderTest:
    """A server on a free port of this machine. Use as a context manager.

    Attributes:
        url, model: where it serves, and what.

    Raises:
        PipedecError: it does not start within a minute.
    """

    def __init__(self, address: RunAddress) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "pipedec.cli", "serve", "--run", address.run_id, "--port", "0"],
            env=environment_with(PIPEDEC_REDIS_URL=address.redis_url), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self._usage = psutil.Process(self._process.pid)
        self.url, self.model = self._wait_until_ready()
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def cpu_seconds(self) -> float:
        """That the server has used so far."""
        times = self._usage.cpu_times()
        return times.user + times.system

    @property
    def memory_bytes(self) -> int:
        """That are the server's alone."""
        return int(self._usage.memory_full_info().uss)

    def kill(self) -> None:
        """End it at once, with its connections open."""
        self._process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _wait_until_ready(self) -> tuple[str, str]:
        assert self._process.stdout is not None
        deadline = Timer(_START_SECONDS, self._process.kill)
        deadline.start()
        try:
            for line in self._process.stdout:
                event = json.loads(line)
                if event.get("event") == "ready":
                    return event["url"], event["model"]
        finally:
            deadline.cancel()
        self._process.kill()
        raise PipedecError("pipedec serve did not start: run it with the same --redis and --run to see why")
