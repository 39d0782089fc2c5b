"""Statistics that rank 0 learns from verdicts and timings, kept from one answer to the next."""

from __future__ import annotations

from typing import Any, TypeVar, cast

from msgspec.structs import replace

from pipedec.core import MethodOptions, Request, SamplingParams
from pipedec.decoding.controller import Controller

_MAX_KEPT = 64  # entries of each kind
_T = TypeVar("_T")
_Key = tuple[SamplingParams, MethodOptions | None, str | None, bool]


class Experience:
    """Learned state by sampling parameters, method options, dialect, and structured or not: all of these change acceptance.

    Args:
        passage: number of timesteps that a row takes to pass through the pipeline.

    Attributes:
        controller: of all requests.
    """

    def __init__(self, passage: int) -> None:
        self.controller = Controller(passage)
        self._learned: dict[type, dict[_Key, Any]] = {}

    def learned(self, request: Request, kind: type[_T], *args: Any) -> _T:
        """Return the statistics of similar requests; ``kind(*args)`` for the first of them. Evicts the least recently used."""
        known, key = self._learned.setdefault(kind, {}), _key(request)
        found = known.pop(key, None)
        known[key] = kind(*args) if found is None else found
        if len(known) > _MAX_KEPT:
            del known[next(iter(known))]
        return cast(_T, known[key])


def _key(request: Request) -> _Key:
    sampling = replace(
        request.sampling, seed=None, max_tokens=1, stop=(), stop_token_ids=(), logprobs=None, ignore_eos=False,
        structured_outputs=None,
    )  # fmt: skip
    return sampling, request.options, request.threads, request.sampling.structured_outputs is not None
