"""A running cluster: its description, and a client. Needs no torch and no checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from pipedec.client.client import Client
from pipedec.core.errors import RankLost, UserError
from pipedec.messages.request import PromptRequest
from pipedec.messages.run import RunDescription
from pipedec.methods import METHODS, find_method, possible_methods
from pipedec.scheduler import ClientScheduler, read_description
from pipedec.topology import Topology


class _Begun(Exception):
    """The answer has begun."""


@dataclass(frozen=True)
class RunHandle:
    """A run that answers requests."""

    run_id: str
    description: RunDescription
    client: Client

    @classmethod
    def of(cls, scheduler: ClientScheduler, run_id: str, check: Callable[[], None] | None = None) -> RunHandle:
        """Connect to the run that ``scheduler`` serves.

        Args:
            check: see ``Client``.

        Raises:
            UserError: it has ended, or another version runs it.
            SchedulerLost: Redis cannot be reached.
        """
        description = read_description(scheduler.client, run_id)
        if description is None:
            raise UserError(f"the cluster {run_id!r} has ended: start it again")
        return cls(run_id, description, Client(scheduler, check))

    def check_accepts(self, request: PromptRequest) -> None:
        """Submit a request and cancel it when its answer begins.

        Raises:
            UserError: the cluster refuses it.
            RankLost: the cluster has ended.
        """

        def enough(text: str) -> NoReturn:
            raise _Begun

        try:
            self.client.ask(request, on_text=enough)
        except _Begun:
            return
        except UserError as error:
            if not self.client.is_up():
                raise RankLost(f"run {self.run_id} has ended: {error}") from None
            raise

    @property
    def topology(self) -> Topology:
        return Topology(self.description.groups)

    def methods(self) -> list[str]:
        """The methods with which it can decode."""
        return possible_methods(self.description.draft is not None, self.description.bita is not None)

    def check_method(self, name: str) -> None:
        """Raises UserError for an unknown method, or one that the cluster cannot decode with."""
        find_method(name)
        if name not in self.methods():
            missing = "a draft model" if self.description.draft is None and METHODS[name].draft == "required" else "a BiTA"
            raise UserError(f"method {name} needs {missing}, which run {self.run_id} does not have: leave it out of --methods")
