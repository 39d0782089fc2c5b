"""The engine's interface for the HTTP side: ``AsyncClient`` implements it, and tests have a scripted one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from pipedec.client.reply import Delta
from pipedec.core import Completion
from pipedec.live.view import Frame
from pipedec.messages import PromptRequest
from pipedec.scheduler.protocol import RunStatus


class AnswerStream(Protocol):
    """One answer while it is generated. Waiting for it may raise RankLost or SchedulerLost."""

    @property
    def number(self) -> int: ...

    def __aiter__(self) -> AsyncIterator[Delta]:
        """All that arrived since the last delta at once, until the answer has ended."""

    async def completed(self) -> Completion:
        """Wait for the end. Raises UserError if the request was refused, or cancelled before it began."""

    async def cancel(self) -> None:
        """End it; it then completes with the reason ``cancelled``. May be called twice, and after its end."""


class Engine(Protocol):
    """A running cluster.

    Attributes:
        last_status: its latest report, a second or two old; None before the first.
    """

    last_status: RunStatus | None

    def live(self) -> AsyncIterator[list[Frame]]:
        """The live feed, in batches. Raises RankLost or SchedulerLost."""

    async def submit(self, request: PromptRequest) -> AnswerStream:
        """Raises UserError, QueueFull, RankLost or SchedulerLost."""
