"""A client's request, as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import replace

from pipedec.core.errors import UserError
from pipedec.core.records import Record
from pipedec.core.sampling import SamplingParams
from pipedec.validation import parse_json, to_json

LOCAL_TENANT = "local"  # that of all requests without an HTTP server: who can send them can also read the others


class PromptRequest(Record, frozen=True):
    """A client's request before tokenization.

    Attributes:
        prompt: text, or token ids, which are taken as they are.
        raw: skip the chat template.
        method: None for the default.
        options: the method's options that are set, by name; rank 0 fills in the rest.
        threads: a dialect as JSON text (``Dialect.to_json``); None for an answer in one thread.
        priority: requests of a lower one are served first.
        resume: token ids of the answer so far: it continues after them, and only the rest is streamed. They need the seed
            with which they were drawn, if they were.
        tenant: requests of the same tenant draft from each other's answers; None: from no other answer.
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
    tenant: Annotated[str, Meta(min_length=1, max_length=64)] | None = None

    def __hash__(self) -> int:
        return hash((self.prompt, self.method))  # options are a mapping

    def seeded(self) -> PromptRequest:
        """The request as it is submitted: with a seed, if its tokens are drawn. Another attempt then draws the same tokens.

        Raises UserError if it resumes an answer that was drawn at random, without its seed.
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
