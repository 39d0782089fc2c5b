"""What travels between a client and rank 0 through Redis, as JSON: a request on the way in, events on the way out.

The events of an answer, by their keys:

- ``text``, ``token_ids`` and, if asked for, ``threads``: new text
- ``logprobs``: of sampled tokens, in the order of sampling, from the last stage
- ``trace``: rows of a ``TraceEvent``, from every rank
- ``overran``: timesteps in which a rank's work took longer than its emulated time
- ``completion`` and, for an answer in threads, ``sampled``: the answer is complete
- ``error``: the request was refused
- ``kind`` ``cancelled`` or ``abort``, written by Lua: the request never began, or a rank was lost (``text`` says why)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipedec.core import Completion, Metrics, SamplingParams
from pipedec.validation import parse_json


@dataclass(frozen=True)
class PromptRequest:
    """A client's request before tokenization.

    Attributes:
        raw: skip the chat template.
        method: None for the default.
        options: what is set of the method's options, by name; rank 0 fills in the rest.
        trace: record every task of every rank.
        threads: a dialect as JSON text (``Dialect.to_json``); None for an answer in one thread.
        show_threads: send the text of every thread as it grows.
    """

    prompt: str
    raw: bool = False
    method: str | None = None
    sampling: SamplingParams = SamplingParams()
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    trace: bool = False
    threads: str | None = None
    show_threads: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> PromptRequest:
        """Raises UserError for anything that is not such a request. Options are checked when the method is known."""
        return parse_json(cls, text, "the request")


def sampling_from_payload(payload: dict) -> SamplingParams:
    bias = payload.get("logit_bias")
    return SamplingParams(**{**payload, "logit_bias": bias and {int(token): value for token, value in bias.items()}})


def completion_to_event(completion: Completion) -> dict[str, object]:
    return {"completion": asdict(completion)}


def completion_from_event(event: dict) -> Completion:
    raw = dict(event["completion"])
    return Completion(**{**raw, "metrics": Metrics(**raw["metrics"])})
