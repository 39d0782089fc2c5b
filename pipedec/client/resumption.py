"""An answer that was begun before, and the request that continues it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields

from msgspec.structs import replace

from pipedec.core.completion import Completion
from pipedec.core.errors import UserError
from pipedec.messages.request import PromptRequest
from pipedec.validation import validated


@dataclass(frozen=True)
class Resumption:
    """An answer to continue.

    Attributes:
        token_ids: in the order of ``Completion.token_ids``.
        seed: the seed with which they were drawn; None if they were not, or if it is unknown.
        logprobs: as in ``Completion``; None if unknown.
    """

    token_ids: tuple[int, ...]
    seed: int | None = None
    logprobs: tuple[dict[int, float], ...] | None = None

    @classmethod
    def of(cls, answer: Completion | Sequence[int]) -> Resumption:
        if not isinstance(answer, Completion):
            return cls(tuple(answer))
        return cls(tuple(answer.token_ids), answer.seed, None if answer.logprobs is None else tuple(answer.logprobs))

    @classmethod
    def from_json(cls, text: str, source: str) -> Resumption:
        """Build from a completion as ``--json`` prints it, or from an object with only its ``token_ids`` and ``seed``. Raises
        UserError, which begins with ``source``, if it is neither.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise UserError(f'{source}: give one completion as --json prints it, or {{"token_ids": […], "seed": …}}')
        known = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        return validated(cls, known, source)

    def resumed(self, request: PromptRequest) -> PromptRequest:
        """The request that continues the answer, with its seed unless the request has one."""
        seed = self.seed if request.sampling.seed is None else request.sampling.seed
        return replace(request, resume=self.token_ids, sampling=replace(request.sampling, seed=seed))

    def complete(self, completion: Completion) -> None:
        """Add the log-probabilities of the earlier tokens to the completion of a request that asked for some; unknown ones are
        empty.
        """
        known = (self.logprobs or ())[: len(completion.token_ids)]
        found = completion.logprobs or [{} for _ in completion.token_ids]
        completion.logprobs = [ours or theirs for ours, theirs in zip(found, [*known, *found[len(known) :]], strict=True)]
