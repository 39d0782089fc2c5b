"""Threads for what would hold up the event loop: tokenizing, and chat templates."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from pipedec.server.errors import unavailable

_T = TypeVar("_T")
_RETRY_SECONDS = 5


class Workers:
    """``count`` threads, which keep no process from ending.

    Args:
        most: requests whose work waits or is done at a time; further ones are refused.
        seconds: after which a request waits no longer.
    """

    def __init__(self, count: int, most: int, seconds: float) -> None:
        self._count, self._most, self._seconds = count, most, seconds
        self._waiting = set[asyncio.Future[Any]]()
        self._threads: list[threading.Thread] = []
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()

    async def run(self, work: Callable[[], _T]) -> _T:
        """The result of ``work``, which is not begun any more once the caller is cancelled. Raises ApiError (503) if there is too
        much to do, and what ``work`` raises.
        """
        if len(self._waiting) >= self._most:
            raise unavailable("too many prompts are being read: try again in a few seconds", _RETRY_SECONDS)
        if len(self._threads) < self._count:
            self._threads.append(threading.Thread(target=self._work, name="prompts", daemon=True))
            self._threads[-1].start()
        result: Future[_T] = Future()
        self._queue.put((result, work))
        waiting = asyncio.wrap_future(result)
        self._waiting.add(waiting)
        try:
            async with asyncio.timeout(self._seconds):
                return await waiting
        except TimeoutError:
            raise unavailable(f"the prompt was not read within {self._seconds:g} seconds: try again", _RETRY_SECONDS) from None
        except asyncio.CancelledError:
            if waiting in self._waiting:
                raise
            raise unavailable("the server is shutting down: ask another one, or try again", _RETRY_SECONDS) from None
        finally:
            self._waiting.discard(waiting)

    def give_up(self) -> None:
        """Let those who wait now wait no longer."""
        while self._waiting:
            self._waiting.pop().cancel()

    def _work(self) -> None:
        while True:
            result, work = self._queue.get()
            if not result.set_running_or_notify_cancel():
                continue
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)
