"""Dialects on a rank: their control tokens as token ids of the target, and the threads of one answer.

Every rank reads the target's tokenizer itself, at the first request that asks for threads.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from pathlib import Path

from tokenizers import Tokenizer

from pipedec.core import SamplingParams, UserError
from pipedec.model import ModelConfig
from pipedec.threads import BoundDialect, Dialect, NewSequence, Sequence, bind


class Dialects:
    """The dialects of requests, bound to the token ids of one target."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.bound = lru_cache(maxsize=8)(self._bound)

    def new_sequence(self, dialect: str, prompt_length: int, sampling: SamplingParams) -> NewSequence:
        """A function that creates the threads of one answer.

        Args:
            dialect: as ``Dialect.to_json`` writes it.

        Raises:
            UserError: ``dialect`` is invalid, or the target lacks tokens for it.
        """
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._config.eos_token_ids))
        limits = sampling.max_tokens, self._config.max_positions
        return partial(Sequence, self.bound(dialect), prompt_length, frozenset(ends), *limits)

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
