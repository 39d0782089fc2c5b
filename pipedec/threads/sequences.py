"""Makes the sequences of answers on every rank. A sequence knows where its answer ends, and which tokens open threads.

A rank reads the target's tokenizer at the first request that asks for threads or a structured output, and before that at most
once for its end token. Knows no rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from pathlib import Path

from pipedec.core.errors import UserError
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.core.stage_message import NewRequest
from pipedec.families import ModelConfig, model_config
from pipedec.grammar import Vocabulary, new_grammar
from pipedec.text.prompt import end_token_ids, load_tokenizer
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads.dialect import BoundDialect, Dialect, bind
from pipedec.threads.sequence import NewSequence, Sequence, replay
from pipedec.threads.threaded import ThreadedSequence


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
        new_sequence: NewSequence = partial(Sequence, prompt_length, ends, sampling.max_tokens, min_tokens=sampling.min_tokens)
        if structure is not None and dialect is not None:
            raise UserError("structured_outputs are not possible for an answer in several threads: leave out one of them")
        if structure is not None:
            new_sequence = partial(self._structured, structure, new_sequence)
        elif dialect is not None:
            bound = self._bound(dialect)
            new_sequence = partial(
                ThreadedSequence, bound, prompt_length, ends, sampling.max_tokens, self._config.context_length,
                sampling.min_tokens,
            )  # fmt: skip
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
        grammar.consume(output_token_ids)
        if not grammar.is_possible:
            raise UserError("the answer to resume is impossible: it does not follow its structured_outputs")

    def _structured(self, structure: StructuredOutputs, new_sequence: Callable[..., Sequence]) -> Sequence:
        return new_sequence(grammar=new_grammar(structure, lambda: self._vocabulary, self._end_token_ids))

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
        bound = bind(Dialect.from_json(dialect), self._token_id, lambda token: text_of([token]))
        if bound.join is not None and self._config.is_recurrent:
            raise UserError(
                f"dialect {bound.dialect.name} joins threads, which attend to each other's tokens from there on, but some layers "
                f"of {self._config.model_type} keep a state of one thread: use a dialect without joins, such as apar"
            )
        return bound

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
