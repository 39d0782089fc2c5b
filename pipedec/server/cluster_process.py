"""The cluster that ``pipedec serve`` starts for itself: ``pipedec up`` in a child process, which has torch; the server has not.

The child runs in a session of its own, so that Ctrl-C does not take the cluster from answers that are still being finished. It
ends with the *thread* that started it, however that ends: start it from the main thread, which runs the server's event loop.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress

from pipedec.cluster.place import RunAddress

STOP_SECONDS = 20.0
_HURRY_SECONDS = 2.0
_ANNOUNCEMENT_BYTES = 1 << 16


class ClusterEnded(Exception):
    """The cluster has ended, and has printed the reason on standard error.

    Attributes:
        status: exit status of its process, 0 if it was asked to stop; 128 + N if signal N ended it, as in a shell. Ctrl-C
            may do so in the moment in which the process is started, before it has left the terminal's process group.
    """

    def __init__(self, returncode: int) -> None:
        self.status = returncode if returncode >= 0 else 128 - returncode
        super().__init__(f"the cluster has ended with status {self.status}")


class ClusterProcess:
    """A process that starts a cluster and supervises it.

    Args:
        arguments: of ``pipedec up``.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._arguments = arguments
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> RunAddress:
        """Start it; return when the cluster takes requests. Raises ClusterEnded if it ends instead."""
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "pipedec.cli", "up", "--for-parent", *self._arguments,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, start_new_session=True,
            limit=_ANNOUNCEMENT_BYTES,
        )  # fmt: skip
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            news = json.loads(line)
            if "run_id" in news:
                return RunAddress(news["redis_url"], news["run_id"])
        raise ClusterEnded(await self._process.wait())

    @property
    def has_ended(self) -> bool:
        return self._process is not None and self._process.returncode is not None

    async def ended(self) -> int:
        """Wait until it ends; its exit status."""
        assert self._process is not None
        return await self._process.wait()

    async def stop(self, hurry: asyncio.Event) -> None:
        """End the cluster in order; by force after ``STOP_SECONDS``, or soon after ``hurry`` is set. May be called twice."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        process.terminate()
        in_order, in_hurry = asyncio.ensure_future(process.wait()), asyncio.ensure_future(hurry.wait())
        await asyncio.wait([in_order, in_hurry], timeout=STOP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        in_hurry.cancel()
        await asyncio.wait([in_order], timeout=_HURRY_SECONDS)
        if not in_order.done():
            with suppress(ProcessLookupError):
                process.kill()
        await in_order
