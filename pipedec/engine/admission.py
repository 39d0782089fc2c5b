"""Admits requests on rank 0, and makes the sequences of their answers on every rank. A sequence knows where its answer ends, and
which tokens open threads.

A rank reads the target's tokenizer at the first request that asks for threads or a structured output, and before that at most
once for its end token. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path

from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.core.stage_message import NewRequest
from pipedec.decoding import Batch
from pipedec.engine.answer import EarlierOutput, RunningAnswer
from pipedec.families import ModelConfig, model_config
from pipedec.grammar import Grammar, Vocabulary
from pipedec.kv import KVManager
from pipedec.messages.request import PromptRequest
from pipedec.methods import LayerTreeOptions, make_options
from pipedec.scheduler.protocol import RankMessage
from pipedec.text.prompt import Prompter, end_token_ids, load_tokenizer
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import BoundDialect, Dialect, NewSequence, Sequence, ThreadedSequence, bind, replay

_ROWS_IN_FLIGHT = 256  # most of an answer in threads, beside its cached tokens


class Sequences:
    """Makes the sequences of answers of the target in a checkpoint directory."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self._bound = lru_cache(maxsize=8)(self._bind)

    def of(self, opening: NewRequest) -> NewSequence:
        """A function that creates the sequence of a new or continued answer. Raises as ``maker``."""
        return self.maker(opening.prompt_length, opening.sampling, opening.threads, opening.output_token_ids)

    def maker(
        self, prompt_length: int, sampling: SamplingParams, dialect: str | None = None, output_token_ids: tuple[int, ...] = ()
    ) -> NewSequence:
        """A function that creates the sequence of one answer. Raises UserError if ``dialect`` is invalid or given with a
        structure, or the target lacks tokens; so does the function if no answer contains ``output_token_ids``.

        Args:
            dialect: as ``Dialect.to_json`` writes it; None for a single thread.
            output_token_ids: earlier tokens, in document order, after which the answer continues.
        """
        structure = sampling.structured_outputs
        ends = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else self._end_token_ids)
        new_sequence: NewSequence = partial(Sequence, prompt_length, ends, sampling.max_tokens)
        if structure is not None and dialect is not None:
            raise UserError("structured_outputs are not possible for an answer in several threads: leave out one of them")
        if structure is not None:
            new_sequence = partial(self._structured, structure, new_sequence)
        elif dialect is not None:
            bound = self._bound(dialect)
            new_sequence = partial(ThreadedSequence, bound, prompt_length, ends, sampling.max_tokens, self._config.context_length)
        if not output_token_ids:
            return new_sequence
        if not 0 <= min(output_token_ids) <= max(output_token_ids) < self._config.vocab_size:
            raise UserError(f"the answer to resume has tokens that the target lacks: give ids below {self._config.vocab_size}")
        return partial(_replayed, new_sequence, output_token_ids)

    def check(self, structure: StructuredOutputs, output_token_ids: tuple[int, ...] = ()) -> None:
        """Raises UserError if the structure is invalid or impossible with the target, or excludes the earlier tokens."""
        if not self._end_token_ids:
            raise UserError(f"structured_outputs end with an end token, and the model in {self._target} names none")
        self._vocabulary.check(structure)
        grammar = self._vocabulary.grammar(structure)
        grammar.advance(output_token_ids)
        if not grammar.is_possible:
            raise UserError("the answer to resume is impossible: it does not follow its structured_outputs")

    def _structured(self, structure: StructuredOutputs, new_sequence: Callable[..., Sequence]) -> Sequence:
        return new_sequence(grammar=Grammar(lambda: self._vocabulary.matcher(structure), self._end_token_ids))

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._tokenizer, self._end_token_ids, self._config.vocab_size)

    @cached_property
    def _end_token_ids(self) -> tuple[int, ...]:
        return end_token_ids(self._target)

    @cached_property
    def _config(self) -> ModelConfig:
        return model_config(self._target)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._target)

    def _bind(self, dialect: str) -> BoundDialect:
        text_of = partial(self._tokenizer.decode, skip_special_tokens=False)
        return bind(Dialect.from_json(dialect), self._token_id, lambda token: text_of([token]))

    def _token_id(self, text: str) -> int | None:
        """None for a token that the tokenizer or the model lacks."""
        token = self._tokenizer.token_id(text)
        return None if token is None or token >= self._config.vocab_size else token


def _replayed(new_sequence: NewSequence, output_token_ids: tuple[int, ...]) -> Sequence:
    """A sequence that has reached the end of these tokens. Raises UserError if no answer contains them."""
    sequence = new_sequence()
    try:
        replay(sequence, output_token_ids)
    except ValueError as error:
        raise UserError(f"the answer to resume is impossible: {error}") from None
    return sequence


@dataclass(frozen=True)
class Admission:
    """Tokenizes requests, and checks that a pipeline of ``num_stages`` stages can answer them.

    ``shares_suffixes``: requests of a tenant draft from its earlier answers.
    """

    prompter: Prompter
    sequences: Sequences
    num_stages: int
    tree: LayerTreeOptions | None  # the cluster's own limits of layer-wise trees, for requests that give none
    shares_suffixes: bool = True

    def admit(self, message: RankMessage, batch: Batch) -> tuple[RunningAnswer, NewSequence]:
        """The answer to a request, and what makes sequences for its method. Raises UserError if it cannot be answered here."""
        prompt = PromptRequest.from_json(message.text)
        received = prompt.resume + message.output_token_ids
        request = self._request(message.number, prompt, received, batch.kv)
        maker = partial(self.sequences.maker, len(request.prompt_token_ids), request.sampling, request.threads)
        brought, known = (
            EarlierOutput(maker(output_token_ids), len(output_token_ids)) if output_token_ids else None
            for output_token_ids in (prompt.resume, received)
        )
        new_sequence = maker(request.output_token_ids)
        answer = RunningAnswer(request, new_sequence, self.prompter, self.num_stages, prompt.show_threads, brought, known)
        if not answer.is_complete:
            batch.check(request, new_sequence())
        return answer, new_sequence

    def _request(self, number: int, prompt: PromptRequest, received: tuple[int, ...], kv: KVManager) -> TokenizedRequest:
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
        threads = threads_within(prompt.threads, kv)
        return TokenizedRequest(
            number, token_ids, sampling, name, options, prompt.trace, threads, prompt.priority, output_token_ids,
            prompt.tenant if self.shares_suffixes else None,
        )  # fmt: skip


def threads_within(dialect: str | None, kv: KVManager) -> str | None:
    """Limit a dialect so that its answers end as ``cache_full`` before the KV memory is full. Raises UserError if invalid."""
    if dialect is None:
        return None
    checked, most = Dialect.from_json(dialect), max(kv.capacity - _ROWS_IN_FLIGHT, 1)
    return dialect if checked.max_cached_tokens <= most else replace(checked, max_cached_tokens=most).to_json()
