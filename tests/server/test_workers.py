"""Threads that read prompts: how many wait, and what becomes of work that nobody waits for."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable

import pytest

from pipedec.server.errors import ApiError
from pipedec.server.workers import Workers


def run(body: Callable[[], Awaitable[None]]) -> None:
    async def limited() -> None:
        async with asyncio.timeout(60):
            await body()

    asyncio.run(limited())


@pytest.mark.failure_case("K11")
def test_work_that_nobody_waits_for_is_not_begun() -> None:
    done: list[int] = []

    async def body() -> None:
        workers, may_end = Workers(1, most=9, seconds=60.0), threading.Event()
        tasks = [asyncio.create_task(workers.run(may_end.wait))]
        tasks += [asyncio.create_task(workers.run(lambda number=number: done.append(number))) for number in range(3)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(*tasks, return_exceptions=True)

    run(body)
    assert done == [0, 2]


@pytest.mark.failure_case("K11")
def test_what_is_too_much_or_takes_too_long_is_refused() -> None:
    async def body() -> None:
        workers, may_end = Workers(1, most=2, seconds=0.05), threading.Event()
        both = [asyncio.create_task(workers.run(may_end.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="too many prompts"):
            await workers.run(may_end.wait)
        for task in both:
            with pytest.raises(ApiError, match="not read within") as refused:
                await task
            assert refused.value.status_code == 503
        may_end.set()
        with pytest.raises(ZeroDivisionError):
            await Workers(1, most=2, seconds=60.0).run(lambda: 1 // 0)

    run(body)


@pytest.mark.failure_case("K11")
def test_who_waits_while_the_server_ends_is_refused() -> None:
    async def body() -> None:
        workers, may_end = Workers(1, most=2, seconds=60.0), threading.Event()
        both = [asyncio.create_task(workers.run(may_end.wait)) for _ in range(2)]
        await asyncio.sleep(0)
        workers.give_up()
        for task in both:
            with pytest.raises(ApiError, match="shutting down"):
                await task
        may_end.set()

    run(body)
