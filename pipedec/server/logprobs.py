"""Log-probabilities of tokens, in the shapes of OpenAI's and vLLM's APIs."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from pipedec.server.answers import TokenLogprob
from pipedec.text.tokenizer import Tokenizer


class LogprobWriter:
    """Writes the log-probabilities of one answer, piece by piece, in the two shapes of OpenAI's API."""

    def __init__(self, tokenizer: Tokenizer, most_probable: int, as_ids: bool) -> None:
        self._tokenizer = tokenizer
        self._most_probable = most_probable  # how many tokens to show besides the chosen one
        self._as_ids = as_ids  # show tokens as ``token_id:ID``
        self._offset = 0  # characters of the response's text before the next token
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")

    def completion(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """As ``/v1/completions`` shows them. The first token of a prompt has none."""
        best: list[dict[str, float] | None] = []
        offsets = []
        for chosen, known in tokens:
            offsets.append(self._offset)  # where a token only ends a character, the offset of that character
            self._offset += len(self._characters.decode(self._tokenizer.token_bytes(chosen)))
            if known is None:
                best.append(None)
                continue
            values: dict[str, float] = {}  # where tokens look alike, the more probable one
            for token, value in [(chosen, known[chosen]), *self._best(known)]:
                values.setdefault(self._name(token), value)
            best.append(values)
        return {
            "tokens": [self._name(token) for token, _ in tokens],
            "token_logprobs": [None if known is None else known[token] for token, known in tokens],
            "top_logprobs": best,
            "text_offset": offsets,
        }

    def chat(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                self._entry(token, known[token]) | {"top_logprobs": [self._entry(*one) for one in self._best(known)]}
                for token, known in tokens
                if known is not None
            ]
        }

    def prompt(self, tokens: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
        """As vLLM shows those of a prompt."""
        return [None if known is None else self._ranked(known) for _, known in tokens]

    def _ranked(self, known: Mapping[int, float]) -> dict[str, Any]:
        ranks = {token: rank for rank, (token, _) in enumerate(self._best(known), start=1)}
        return {
            str(token): {"logprob": value, "rank": ranks.get(token), "decoded_token": self._name(token)}
            for token, value in known.items()
        }

    def _best(self, known: Mapping[int, float]) -> list[tuple[int, float]]:
        """The most probable tokens, best first; the chosen one is among them only if it is one of them."""
        is_among = len(known) <= self._most_probable
        return sorted(list(known.items())[0 if is_among else 1 :], key=lambda pair: -pair[1])

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        return {"token": self._name(token), "logprob": value, "bytes": list(self._tokenizer.token_bytes(token))}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.token(token)
