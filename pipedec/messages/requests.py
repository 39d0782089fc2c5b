"""Requests, before their prompts are tokenized."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from pipedec.core import Record, SamplingParams, UserError
from pipedec.messages.encoding import to_json
from pipedec.validation import parse_json


class PromptRequest(Record, frozen=True):
    """A client's request before tokenization.

    Attributes:
        prompt: text, or token ids, which are taken as they are.
        raw: skip the chat template.
        method: None for the default.
        options: what is set of the method's options, by name; rank 0 fills in the rest.
        trace: record every task of every rank.
        threads: a dialect as JSON text (``Dialect.to_json``); None for an answer in one thread.
        show_threads: send the text of every thread as it grows.
        priority: requests of a lower one are served first.
        resume: token ids of the answer so far: it continues after them, and only the rest is streamed. They need the seed
            with which they were drawn, if they were.
    """

    prompt: str | tuple[int, ...]
    raw: bool = False
    method: str | None = None
    sampling: SamplingParams = SamplingParams()
    options: Mapping[str, Any] = {}
    trace: bool = False
    threads: str | None = None
    show_threads: bool = False
    priority: int = 0
    resume: tuple[int, ...] = ()

    def __hash__(self) -> int:
        return hash((self.prompt, self.method))  # options are a mapping

    def seeded(self) -> PromptRequest:
        """The request as it is submitted: with a seed, if its tokens are drawn. Another attempt then draws the same tokens.

        Raises:
            UserError: it goes on with an answer that was drawn with a seed that it does not give.
        """
        if self.resume and self.sampling.is_stochastic and self.sampling.seed is None:
            raise UserError("the answer to resume was drawn at random: give its seed, which was reported with it")
        return replace(self, sampling=self.sampling.seeded())

    def to_json(self) -> str:
        """Raises UserError for a text that is not UTF-8."""
        try:
            return to_json(self)
        except UnicodeEncodeError:
            raise UserError("the request: a text that is not UTF-8") from None

    @classmethod
    def from_json(cls, text: str) -> PromptRequest:
        """Raises UserError for anything that is not such a request. Options are checked when the method is known."""
        return parse_json(cls, text, "the request")
