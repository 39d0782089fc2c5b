"""What rank 0 has learned from verdicts and timings, kept from one answer to the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from pipedec.core import MaskParams, MethodOptions, Request, SamplingParams
from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.candidates import RankChances
from pipedec.decoding.controller import Controller

_MAX_KEPT = 64  # entries of each kind
_T = TypeVar("_T")
_Key = tuple[SamplingParams, MethodOptions | None, str | None, bool]


class Experience:
    """Learned state by sampling parameters, method options, dialect, and whether there is a structure: all change acceptance.

    Args:
        passage: number of timesteps that a row takes to pass through the pipeline.

    Attributes:
        controller: of all requests.
    """

    def __init__(self, passage: int) -> None:
        self.controller = Controller(passage)
        self._acceptances: dict[_Key, Acceptance] = {}
        self._rank_chances: dict[_Key, RankChances] = {}

    def acceptance(self, request: Request, prior: tuple[float, ...]) -> Acceptance:
        return _kept(self._acceptances, _key(request), lambda: Acceptance(prior))

    def rank_chances(self, request: Request, masks: MaskParams) -> RankChances:
        return _kept(self._rank_chances, _key(request), lambda: RankChances(masks))


def _kept(known: dict[_Key, _T], key: _Key, make: Callable[[], _T]) -> _T:
    """The entry for ``key``, created if it is new. The least recently used entry is evicted."""
    found = known.pop(key, None) or make()
    known[key] = found
    if len(known) > _MAX_KEPT:
        del known[next(iter(known))]
    return found


def _key(request: Request) -> _Key:
    sampling = replace(
        request.sampling, seed=None, max_tokens=1, stop=(), stop_token_ids=(), logprobs=None, ignore_eos=False,
        structured_outputs=None,
    )  # fmt: skip
    return sampling, request.options, request.threads, request.sampling.structured_outputs is not None
