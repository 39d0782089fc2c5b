"""Admits requests on rank 0: tokenizes them and checks what needs the target's tokenizer or configuration. Knows no rows."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import NamedTuple

from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.engine.output import Answer
from pipedec.messages.request import PromptRequest
from pipedec.methods import LayerTreeOptions, make_options
from pipedec.scheduler.protocol import RankMessage
from pipedec.text.prompt import Prompter
from pipedec.threads import Dialect, NewSequence
from pipedec.threads.sequences import Sequences

_ROWS_IN_FLIGHT = 256  # most of an answer in threads, beside its cached tokens


@dataclass(frozen=True)
class Admitted:
    """A request that the target can answer, unless its method or memory cannot."""

    answer: Answer
    new_sequence: NewSequence  # makes the sequence of its answer


class Arrived(NamedTuple):
    """A request from the queue."""

    message: RankMessage
    admitted: Admitted | Exception  # an exception if it cannot be answered


@dataclass(frozen=True)
class Admission:
    """Tokenizes requests, and checks that a pipeline of ``num_stages`` stages can answer them.

    Args:
        capacity: slots of the KV memory.
        tree: the cluster's own limits of layer-wise trees, for requests that give none.
        shares_suffixes: requests of a tenant draft from its earlier answers.
    """

    prompter: Prompter
    sequences: Sequences
    num_stages: int
    capacity: int
    tree: LayerTreeOptions | None = None
    shares_suffixes: bool = True
    _admitting: Lock = field(default_factory=Lock, repr=False)

    def arrived(self, message: RankMessage) -> Arrived:
        """``admit``, by any thread; never raises."""
        with self._admitting:
            try:
                return Arrived(message, self.admit(message))
            except Exception as error:
                return Arrived(message, error)

    def admit(self, message: RankMessage) -> Admitted:
        """The answer to a request. Raises UserError if the target cannot answer it."""
        prompt = PromptRequest.from_json(message.text)
        received = prompt.resume + message.output_token_ids
        asked = self._tokenized(message.number, prompt, received)
        maker = partial(self.sequences.maker, len(asked.prompt_token_ids), asked.sampling, asked.threads)
        new_sequence = maker(asked.output_token_ids)
        if asked.threads is None:
            ended = new_sequence().finished if received else None
            return Admitted(Answer(asked, self.prompter, self.num_stages, len(prompt.resume), ended), new_sequence)
        from pipedec.engine.threaded_output import EarlierOutput, ThreadedAnswer  # only answers in threads need it

        brought, known = (
            EarlierOutput(maker(output_token_ids), len(output_token_ids)) if output_token_ids else None
            for output_token_ids in (prompt.resume, received)
        )
        answer = ThreadedAnswer(asked, self.prompter, self.num_stages, new_sequence, brought, known, prompt.show_threads)
        return Admitted(answer, new_sequence)

    def _tokenized(self, number: int, prompt: PromptRequest, received: tuple[int, ...]) -> TokenizedRequest:
        """The tokenized and checked request. ``received``: tokens of the answer that the client has already."""
        name, sampling = prompt.method or DEFAULT_METHOD, prompt.sampling
        dialect = None if prompt.threads is None else Dialect.from_json(prompt.threads).name
        token_ids = self.prompter.token_ids(prompt.prompt, prompt.raw, sampling.max_tokens, dialect)
        self.prompter.check(sampling)
        if sampling.structured_outputs is not None:
            self.sequences.check(sampling.structured_outputs, received)
        if sampling.is_stochastic and sampling.seed is None:
            raise UserError("the answer is to be drawn at random and has no seed: the client that submits it must choose one")
        options = make_options(name, prompt.options, self.tree)
        output_token_ids = () if prompt.threads else received  # an answer in threads is generated again from its first token
        threads = threads_within(prompt.threads, self.capacity)
        return TokenizedRequest(
            number, token_ids, sampling, name, options, prompt.trace, threads, prompt.priority, output_token_ids,
            prompt.tenant if self.shares_suffixes else None,
        )  # fmt: skip


def threads_within(dialect: str | None, capacity: int) -> str | None:
    """Limit a dialect so that its answers end as ``cache_full`` before ``capacity`` slots of KV memory are full. Raises UserError
    if it is invalid.
    """
    if dialect is None:
        return None
    checked, most = Dialect.from_json(dialect), max(capacity - _ROWS_IN_FLIGHT, 1)
    return dialect if checked.max_cached_tokens <= most else replace(checked, max_cached_tokens=most).to_json()
