"""The Python API for programs with an event loop: ``async for delta in llm.generate(prompt, SamplingParams(...))``."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from pipedec.client.async_client import AsyncClient, AsyncReply
from pipedec.client.reply import Delta
from pipedec.client.resident import ChatMessage, Prompt, Resident
from pipedec.core import MethodOptions, SamplingParams
from pipedec.scheduler import RunStatus


class AsyncLLM(Resident):
    """A resident cluster on this machine, for one event loop. Its arguments are those of ``Resident``.

    Starts in the constructor, as ``LLM``; the end of an ``async with`` block, or ``aclose``, stops it. To use a cluster that is
    already running, see ``AsyncClient.connect``.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._client: AsyncClient | None = None
        self._connecting = asyncio.Lock()  # for the first call of several tasks

    async def submit(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        raw_prompt: bool = False,
        options: MethodOptions | Mapping[str, Any] | None = None,
        threads: str | Path | None = None,
        priority: int = 0,
    ) -> AsyncReply:
        """Begin an answer, to iterate over, wait for (``completed``) or ``cancel``. The arguments are those of ``LLM.generate``.

        Raises:
            QueueFull: as many requests run and wait as the cluster allows.
            UserError: the prompt has no valid form, or the method has no such option.
            RankLost, SchedulerLost: the cluster died.
        """
        client = await self._connected()
        return await client.submit(self._request(prompt, sampling_params, raw_prompt, options, threads, priority))

    async def generate(self, prompt: Prompt, sampling_params: SamplingParams | None = None, **named: Any) -> AsyncIterator[Delta]:
        """The answer in pieces. Leaving the iteration (``aclose``) cancels it.

        Args:
            named: as of ``submit``.

        Raises:
            UserError: the request was refused.
            QueueFull, RankLost, SchedulerLost: as ``submit``.
        """
        reply = await self.submit(prompt, sampling_params, **named)
        try:
            async for delta in reply:
                yield delta
            await reply.completed()
        finally:
            await reply.cancel()

    async def chat(
        self, messages: Sequence[ChatMessage], sampling_params: SamplingParams | None = None, **named: Any
    ) -> AsyncReply:
        """Begin the next answer of a conversation, a list of ``{"role": ..., "content": ...}``; otherwise as ``submit``."""
        return await self.submit(self._rendered(messages, named.get("threads")), sampling_params, **named)

    async def status(self) -> RunStatus:
        """The state of the run, including the running and waiting requests.

        Raises:
            SchedulerLost: Redis cannot be reached.
        """
        return await (await self._connected()).status()

    async def aclose(self) -> None:
        """Cancel open requests and stop the cluster. No process keeps running."""
        if self._client is not None:
            await self._client.aclose()
        self._cluster.stop()

    async def __aenter__(self) -> AsyncLLM:
        await self._connected()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _connected(self) -> AsyncClient:
        async with self._connecting:
            if self._client is None:
                address = self._cluster.address
                self._client = await AsyncClient.connect(address.redis_url, address.run_id, check=self._cluster.check)
            return self._client
