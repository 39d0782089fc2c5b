"""The sequences of answers, as every rank makes them: where an answer ends and, in a dialect, which tokens open threads.

Every rank reads the target's tokenizer itself, at the first request that asks for threads.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from pathlib import Path

from tokenizers import Tokenizer

from pipedec.core import Opening, SamplingParams, UserError
from pipedec.model import ModelConfig
from pipedec.threads import BoundDialect, Dialect, NewSequence, Sequence, bind, single_thread


class Sequences:
    """Makes the sequences of answers of one target.

    Args:
        target: its checkpoint.
    """

    def __init__(self, target: Path) -> None:
        self._target = target
        self.bound = lru_cache(maxsize=8)(self._bound)

    def of(self, opening: Opening) -> NewSequence:
        """A function that creates the sequence of an answer that begins or goes on. Raises as ``maker``."""
        return self.maker(opening.prompt_length, opening.sampling, opening.threads, opening.said)

    def maker(
        self, prompt_length: int, sampling: SamplingParams, dialect: str | None = None, said: tuple[int, ...] = ()
    ) -> NewSequence:
        """A function that creates the sequence of one answer.

        Args:
            dialect: as ``Dialect.to_json`` writes it; None for an answer in one thread.
            said: tokens of an answer in one thread that were accepted before.

        Raises:
            UserError: ``dialect`` is invalid, or the target lacks tokens for it.
        """
        ends = frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else self._config.eos_token_ids)
        if dialect is None:
            return partial(single_thread, prompt_length, ends, sampling.max_tokens, said)
        return partial(Sequence, self.bound(dialect), prompt_length, ends, sampling.max_tokens, self._config.max_positions)

    @cached_property
    def _config(self) -> ModelConfig:
        return ModelConfig.from_directory(self._target)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The fast tokenizer alone, which loads without ``transformers``."""
        path = self._target / "tokenizer.json"
        if not path.exists():
            raise UserError(f"--threads needs a tokenizer.json in {self._target}")
        return Tokenizer.from_file(str(path))

    def _bound(self, dialect: str) -> BoundDialect:
        tokenizer = self._tokenizer
        return bind(Dialect.from_json(dialect), tokenizer.token_to_id, self._text_of)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)
