"""Styles: how an answer is asked for and put together. In one thread, in a dialect's threads, or as Skeleton-of-Thought."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipedec.bench.threads.exchange import Exchange
from pipedec.bench.threads.rows import SEQUENTIAL, SKELETON
from pipedec.bench.threads.skeleton import SkeletonOfThought
from pipedec.bench.threads.written import Written, sequential_metrics
from pipedec.messages import PromptRequest
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, load_dialect, measure


class Style(Protocol):
    """One way to answer a prompt."""

    @property
    def name(self) -> str:
        """In tables and flags."""

    @property
    def settings(self) -> str | None:
        """What the answer depends on besides prompt, model and sampling; None for nothing."""

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        """The prompt of the first request for the answer to ``request``. Raises UserError like ``Prompter.token_ids``."""

    def answer(self, exchange: Exchange) -> Written:
        """The answer to ``exchange.request``. Raises UserError like ``LocalPipeline.run_all``."""


def find_style(name_or_path: str) -> Style:
    """A style by its name; any other name is a dialect's, or its file. Raises UserError like ``load_dialect``."""
    own: dict[str, Style] = {SEQUENTIAL: OneThread(), SKELETON: SkeletonOfThought()}
    return own[name_or_path] if name_or_path in own else InThreads(load_dialect(name_or_path))


@dataclass(frozen=True)
class OneThread:
    """One request, one thread."""

    name: str = SEQUENTIAL
    settings: str | None = None

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        return prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens)

    def answer(self, exchange: Exchange) -> Written:
        reply = exchange.begin(self.prompt(exchange.prompter, exchange.request))
        special = exchange.prompter.tokenizer.all_special_ids
        is_text = [token not in special for token in reply.token_ids]
        metrics = sequential_metrics(reply.prompt_tokens, len(is_text), sum(is_text))
        document: list[tuple[object, int]] = [(0, token) for token in reply.token_ids]
        return Written(document, reply.finish_reason, sum(is_text[1:]), metrics)


@dataclass(frozen=True)
class InThreads:
    """One request, decode threads in a dialect."""

    dialect: Dialect

    @property
    def name(self) -> str:
        return self.dialect.name

    @property
    def settings(self) -> str | None:
        return self.dialect.to_json()

    def prompt(self, prompter: Prompter, request: PromptRequest) -> tuple[int, ...]:
        return prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens, self.dialect.name)

    def answer(self, exchange: Exchange) -> Written:
        """The document contains thread paths, not numbers: numbers depend on the order in which threads opened."""
        reply = exchange.begin(self.prompt(exchange.prompter, exchange.request), self.settings)
        sequence = reply.sequence
        written = sequence.document()
        document: list[tuple[object, int]] = [
            (list(sequence.threads[token.thread].path), token.token_id) for token in written
        ]  # fmt: skip
        decoded_text = sum(not token.is_control for token in written[1:])
        return Written(document, reply.finish_reason, decoded_text, measure(sequence), sequence.anomalies)
