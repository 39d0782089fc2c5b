"""What rank 0 has learned from verdicts and timesteps, kept from one answer to the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch

from pipedec.core import MaskParams, MethodOptions, Request, SamplingParams
from pipedec.decoding.acceptance import Acceptance
from pipedec.decoding.candidates import RankChances
from pipedec.decoding.controller import Controller
from pipedec.methods import BestFirstOptions, options_of

_MOST = 64  # ways to decode that are remembered
_T = TypeVar("_T")
_Key = tuple[SamplingParams, MethodOptions | None, str | None]


class Experience:
    """One of each kind for each way to sample, each set of limits and each dialect of threads: greedy and stochastic differ.

    Args:
        passage: timesteps that a row is in the pipeline.
    """

    def __init__(self, passage: int) -> None:
        self._passage = passage
        self._acceptances: dict[_Key, Acceptance] = {}
        self._controllers: dict[_Key, Controller] = {}
        self._rank_chances: dict[_Key, RankChances] = {}

    def acceptance(self, request: Request, prior: tuple[float, ...], device: torch.device | str) -> Acceptance:
        return _kept(self._acceptances, _key(request), lambda: Acceptance(prior, device))

    def controller(self, request: Request) -> Controller:
        return _kept(self._controllers, _key(request), lambda: Controller(options_of(request, BestFirstOptions), self._passage))

    def rank_chances(self, request: Request, masks: MaskParams) -> RankChances:
        return _kept(self._rank_chances, _key(request), lambda: RankChances(masks))


def _kept(known: dict[_Key, _T], key: _Key, make: Callable[[], _T]) -> _T:
    """What is known for ``key``, made if it is new; what was asked for longest ago makes room for it."""
    found = known.pop(key, None) or make()
    known[key] = found
    if len(known) > _MOST:
        del known[next(iter(known))]
    return found


def _key(request: Request) -> _Key:
    sampling = replace(request.sampling, seed=None, max_tokens=1, stop=(), stop_token_ids=(), logprobs=None, ignore_eos=False)
    return sampling, request.options, request.threads
