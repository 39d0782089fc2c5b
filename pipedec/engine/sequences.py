"""Makes the sequences of answers on every rank: where an answer ends and, in a dialect, which tokens open threads.

A rank reads the target's tokenizer itself, at the first request that asks for threads or for a structured output.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, lru_cache, partial
from pathlib import Path

from pipedec.core import NewRequest, SamplingParams, StructuredOutputs, UserError
from pipedec.gguf import model_files
from pipedec.grammar import Grammar, Vocabulary
from pipedec.model import ModelConfig
from pipedec.text.prompt import load_tokenizer
from pipedec.text.tokenizer import Tokenizer
from pipedec.threads import BoundDialect, Dialect, NewSequence, Sequence, ThreadedSequence, bind, replay


class Sequences:
    """Makes the sequences of answers of one target.

    Args:
        target: its checkpoint.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self.bound = lru_cache(maxsize=8)(self._bound)

    def of(self, opening: NewRequest) -> NewSequence:
        """A function that creates the sequence of a new or continued answer. Raises as ``maker``."""
        return self.maker(opening.prompt_length, opening.sampling, opening.threads, opening.output_token_ids)

    def maker(
        self, prompt_length: int, sampling: SamplingParams, dialect: str | None = None, output_token_ids: tuple[int, ...] = ()
    ) -> NewSequence:
        """A function that creates the sequence of one answer.

        Args:
            dialect: as ``Dialect.to_json`` writes it; None for an answer in one thread.
            said: tokens, in document order, after which the answer continues. The function raises UserError if no answer contains
                them.

        Raises:
            UserError: ``dialect`` is invalid or given with a structure, or the target lacks tokens for it or for ``said``.
        """
        structure = sampling.structured_outputs
        new_sequence: NewSequence
        ends = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else self._config.eos_token_ids)
        if dialect is None and structure is not None:
            new_sequence = partial(self._structured, structure, partial(Sequence, prompt_length, ends, sampling.max_tokens))
        elif dialect is None:
            new_sequence = partial(Sequence, prompt_length, ends, sampling.max_tokens)
        elif structure is not None:
            raise UserError("structured_outputs are not possible for an answer in several threads: leave out one of them")
        else:
            bound = self.bound(dialect)
            new_sequence = partial(ThreadedSequence, bound, prompt_length, ends, sampling.max_tokens, self._config.max_positions)
        if not output_token_ids:
            return new_sequence
        if not 0 <= min(output_token_ids) <= max(output_token_ids) < self._config.vocab_size:
            raise UserError(f"the answer to resume has tokens that the target lacks: give ids below {self._config.vocab_size}")
        return partial(_replayed, new_sequence, output_token_ids)

    def check_prompt(self, token_ids: tuple[int, ...]) -> None:
        """Raises UserError if the target lacks an embedding for one of them: tokens that were added to its tokenizer."""
        if (largest := max(token_ids)) >= self._config.vocab_size:
            raise UserError(
                f"the prompt has the token {largest}, which was added to the tokenizer, but the target has only "
                f"{self._config.vocab_size} embeddings: leave its text out"
            )

    def check(self, structure: StructuredOutputs, output_token_ids: tuple[int, ...] = ()) -> None:
        """Raises UserError if the structure is invalid, not supported, not possible with the target and its tokenizer, or if no
        such answer begins with ``said``.
        """
        if not self._config.eos_token_ids:
            raise UserError(f"structured_outputs end with an end token, and the model in {self._target} names none")
        self._vocabulary.check(structure)
        grammar = self._vocabulary.grammar(structure)
        grammar.advance(output_token_ids)
        if not grammar.is_possible:
            raise UserError("the answer to resume is impossible: it does not follow its structured_outputs")

    def _structured(self, structure: StructuredOutputs, new_sequence: Callable[..., Sequence]) -> Sequence:
        grammar = Grammar(lambda: self._vocabulary.matcher(structure), self._config.eos_token_ids)
        return new_sequence(grammar=grammar)

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(load_tokenizer(self._target), self._config.eos_token_ids)

    @cached_property
    def _config(self) -> ModelConfig:
        return ModelConfig.from_directory(self._target)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        if not (model_files(self._target) / "tokenizer.json").exists():
            raise UserError(f"--threads needs a tokenizer.json in {self._target}")
        return Tokenizer(self._target)

    def _bound(self, dialect: str) -> BoundDialect:
        return bind(Dialect.from_json(dialect), self._tokenizer.token_id, self._text_of)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)


def _replayed(new_sequence: NewSequence, output_token_ids: tuple[int, ...]) -> Sequence:
    """A sequence that has reached the end of ``said``. Raises UserError if no answer contains it."""
    sequence = new_sequence()
    try:
        replay(sequence, output_token_ids)
    except ValueError as error:
        raise UserError(f"the answer to resume is impossible: {error}") from None
    return sequence
