"""Dialects on a rank: in the tokens of the target, and the threads of one answer.

Every rank reads the target's tokenizer by itself, when the first request in threads comes.
"""

from __future__ import annotations

from functools import cached_property, lru_cache, partial
from pathlib import Path

from tokenizers import Tokenizer

from pipedec.core import SamplingParams, UserError
from pipedec.model import ModelConfig
from pipedec.threads import BoundDialect, Dialect, NewSequence, Sequence, bind


class Dialects:
    """What is known of dialects in the tokens of one target."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.bound = lru_cache(maxsize=8)(self._bound)

    def new_sequence(self, dialect: str, prompt_length: int, sampling: SamplingParams) -> NewSequence:
        """What makes the threads of an answer.

        Args:
            dialect: as ``Dialect.to_json`` writes it.

        Raises:
            UserError: it is no dialect, or the target has no tokens for it.
        """
        ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else set(self._config.eos_token_ids))
        limits = sampling.max_tokens, self._config.max_positions
        return partial(Sequence, self.bound(dialect), prompt_length, frozenset(ends), *limits)

    @cached_property
    def _config(self) -> ModelConfig:
        return ModelConfig.from_directory(self._target)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        """The fast tokenizer by itself: loading it takes no ``transformers``."""
        path = self._target / "tokenizer.json"
        if not path.exists():
            raise UserError(f"--threads needs a tokenizer.json in {self._target}")
        return Tokenizer.from_file(str(path))

    def _bound(self, dialect: str) -> BoundDialect:
        tokenizer = self._tokenizer
        return bind(Dialect.from_json(dialect), tokenizer.token_to_id, self._text_of)

    def _text_of(self, token: int) -> str:
        return self._tokenizer.decode([token], skip_special_tokens=False)
