"""The tokens of a checkpoint as parsers of structured outputs need them."""

from __future__ import annotations

from functools import lru_cache, partial

from llguidance import LLMatcher, LLTokenizer

from pipedec.core import StructuredOutputs, UserError
from pipedec.grammar.bitmask import Bitmask
from pipedec.grammar.grammar import Grammar
from pipedec.grammar.structures import check, one_line, source
from pipedec.text.tokenizer import Tokenizer

_MAX_KEPT = 16  # structures


class Vocabulary:
    """A tokenizer's tokens. Those of a model that its tokenizer does not have are never allowed.

    Args:
        end_token_ids: the model's end tokens; without any the tokenizer's, which is enough to check structures.

    Raises:
        UserError: structured outputs are not possible with this tokenizer, or without end tokens.
    """

    def __init__(self, tokenizer: Tokenizer, end_token_ids: tuple[int, ...] = ()) -> None:
        where = f"structured_outputs are not possible with the model in {tokenizer.directory}"
        own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        self._end_token_ids = end_token_ids or own
        if not self._end_token_ids:
            raise UserError(f"{where}: it names no end token")
        try:
            self._tokens = LLTokenizer(tokenizer.to_json(), eos_token=list(self._end_token_ids))
        except ValueError as error:
            raise UserError(f"{where}: its tokenizer cannot be used: {one_line(str(error))}") from None
        self._started = lru_cache(maxsize=_MAX_KEPT)(self._start)

    def check(self, structure: StructuredOutputs) -> None:
        """Raises UserError as ``structures.check``; also if a grammar names a special token that is not in the vocabulary, or if
        nothing can match, because everything contains itself.
        """
        check(structure, self._tokens)
        matcher = self.matcher(structure)
        if not matcher.is_accepting() and set(Bitmask(matcher.compute_bitmask())) <= set(self._end_token_ids):
            raise UserError(f"structured_outputs.{structure.kind}: no text is possible")

    def matcher(self, structure: StructuredOutputs) -> LLMatcher:
        """At the structure's start. Raises UserError as ``check``, but for the place."""
        return self._started(structure).deep_copy()

    def grammar(self, structure: StructuredOutputs) -> Grammar:
        """The grammar of a new answer. Its ``allowed`` and ``forced`` raise UserError as ``matcher``."""
        return Grammar(partial(self.matcher, structure), self._end_token_ids)

    def _start(self, structure: StructuredOutputs) -> LLMatcher:
        matcher = LLMatcher(self._tokens, source(structure), log_level=0)
        if matcher.is_error():
            raise UserError(f"structured_outputs.{structure.kind}: {one_line(matcher.get_error())}")
        return matcher
