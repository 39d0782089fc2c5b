"""The report of ``pipedec verify`` on two sources of answers, and the requests that it sends to a cluster."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from pipedec.cli.show import console
from pipedec.client.client import Client
from pipedec.core import Completion, PipedecError
from pipedec.messages import PromptRequest
from pipedec.verify.divergence import Divergence

Shape = tuple[int, int]  # stages, groups


@dataclass(frozen=True)
class ComparedAnswer:
    """One answer: how it differs from the expected one, and what it took."""

    divergence: Divergence | None
    num_tokens: int
    timesteps: int


class Report:
    """The results of a comparison: a line and a table row per method and pipeline; near ties and differences."""

    def __init__(self, title: str, dtype: str) -> None:
        self._dtype = dtype
        self._differences: list[str] = []
        self._table = Table(title=f"{title}, {dtype}", title_justify="left")
        for name in ("stages", "groups", "method", "equal", "near ties", "tokens", "timesteps per token"):
            self._table.add_column(name, justify="left" if name == "method" else "right")

    def add(self, shape: Shape, method: str, outcomes: Iterable[ComparedAnswer]) -> None:
        """The outcomes of the prompts in their order."""
        outcomes = list(outcomes)
        found = [(index, outcome.divergence) for index, outcome in enumerate(outcomes) if outcome.divergence is not None]
        ties = 0
        for index, divergence in found:
            line = f"{shape[0]} stages, {method}, prompt {index}: {divergence}"
            if divergence.is_near_tie(self._dtype):
                ties += 1
                console.print(f"{line}: a near tie in {self._dtype}")
            else:
                self._differences.append(line)
        equal, tokens = len(outcomes) - len(found), sum(outcome.num_tokens for outcome in outcomes)
        per_token = sum(outcome.timesteps for outcome in outcomes) / max(1, tokens - len(outcomes))
        share = f"{equal}/{len(outcomes)}"
        self._table.add_row(str(shape[0]), str(shape[1]), method, share, str(ties), str(tokens), f"{per_token:.2f}")
        console.print(
            f"{shape[0]} stages in {shape[1]} groups, {method}: {share} equal" + (f", near ties: {ties}" if ties else "")
        )

    def finish(self) -> None:
        """Print the table. Raises PipedecError if answers differ."""
        Console(width=None if Console().is_terminal else 110).print(self._table)
        if self._differences:
            raise PipedecError("; ".join(self._differences[:3]))


def answers_of(client: Client, method: str, requests: list[PromptRequest], concurrency: int) -> Iterator[Completion]:
    """The answers in order; ``concurrency`` requests are in the pipeline at the same time."""
    for first in range(0, len(requests), concurrency):
        asked = [replace(request, method=method) for request in requests[first : first + concurrency]]
        for reply in client.ask_all(asked):
            yield reply.completed()
