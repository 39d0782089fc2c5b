"""Log-probabilities of tokens in the two shapes of OpenAI's API."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from pipedec.text.tokenizer import Tokenizer

TokenLogprob = tuple[int, Mapping[int, float] | None]  # token id, log-probabilities by token id with the chosen one first


class LogprobWriter:
    """Writes the log-probabilities of one answer, piece by piece.

    Args:
        most_probable: how many tokens to show besides the chosen one.
        as_ids: show tokens as ``token_id:ID``.
        offset: characters of the response's text before the first token.
    """

    def __init__(self, tokenizer: Tokenizer, most_probable: int, as_ids: bool = False, offset: int = 0) -> None:
        self._tokenizer = tokenizer
        self._most_probable = most_probable
        self._as_ids = as_ids
        self._offset = offset
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def completion(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As ``/v1/completions`` shows them. The first token of a prompt has none."""
        return {
            "tokens": [self._name(token) for token, _ in tokens],
            "token_logprobs": [None if known is None else known[token] for token, known in tokens],
            "top_logprobs": [None if known is None else self._by_name(token, known) for token, known in tokens],
            "text_offset": [self._offset_of(token) for token, _ in tokens],
        }

    def chat(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As ``/v1/chat/completions`` shows them."""
        return {
            "content": [
                self._entry(token, known[token]) | {"top_logprobs": [self._entry(*one) for one in self._best(known)]}
                for token, known in tokens
                if known is not None
            ]
        }

    def _best(self, known: Mapping[int, float]) -> list[tuple[int, float]]:
        """The most probable tokens, best first; the chosen one is among them only if it is one of them."""
        is_among = len(known) <= self._most_probable
        return sorted(list(known.items())[0 if is_among else 1 :], key=lambda pair: -pair[1])

    def _by_name(self, chosen: int, known: Mapping[int, float]) -> dict[str, float]:
        """The chosen token, and the most probable ones. Of tokens that look alike, the more probable one."""
        values: dict[str, float] = {}
        for token, value in [(chosen, known[chosen]), *self._best(known)]:
            values.setdefault(self._name(token), value)
        return values

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": value, "bytes": list(self._tokenizer.token_bytes(token))}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token(token)

    def _offset_of(self, token: int) -> int:
        """Where its text begins; of a token that ends a character, where that character begins."""
        offset = self._offset
        self._offset += len(self._characters.decode(self._tokenizer.token_bytes(token)))
        return offset
