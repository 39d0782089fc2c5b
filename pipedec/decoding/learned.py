"""Statistics that outlive a process, as plain data: chances of acceptance, and the costs of timesteps.

Weights are kept by draft source and feature, so that a process with other sources begins with what fits. Knows no file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from msgspec import Meta, Struct

from pipedec.core.limits import MAX_PASSAGE
from pipedec.core.request import TokenizedRequest
from pipedec.methods import PROPOSERS, BestFirstOptions

GREEDY = "greedy"
LARGEST_WEIGHT = 1e3
Weight = Annotated[float, Meta(ge=-LARGEST_WEIGHT, le=LARGEST_WEIGHT)]
Share = Annotated[float, Meta(ge=0, le=1)]
Positive = Annotated[float, Meta(gt=0, le=1e9)]
Priors = Mapping[str, Mapping[str, float]]  # weights by draft source and feature


def kind_of(request: TokenizedRequest) -> str:
    """A name for requests whose tokens are accepted alike: ``GREEDY``, or sampled, structured, in threads, by other sources."""
    words = ["sampled" if request.sampling.is_stochastic else GREEDY]
    words += ["structured"] * (request.sampling.structured_outputs is not None) + ["threads"] * (request.threads is not None)
    if isinstance(request.options, BestFirstOptions) and request.options.proposers != PROPOSERS:
        words += sorted(request.options.proposers)
    return " ".join(words)


class LearnedRates(Struct, frozen=True, kw_only=True):
    """Learned from requests of one kind. Empty where nothing was.

    Attributes:
        acceptance: weights of the ``AcceptanceModel``, by source and feature.
        matches: ``MatchRates``, by source and length.
    """

    acceptance: dict[str, dict[str, Weight]] = {}
    matches: dict[str, dict[str, Share]] = {}


class LearnedAcceptance(Struct, frozen=True, kw_only=True, tag_field="schema", tag="pipedec.acceptance/1"):
    """Statistics that depend on the models: which proposed tokens are accepted.

    Attributes:
        kinds: by kind of request (see ``kind_of``).
        unproposed_share, proposes_seen: as in ``Controller``.
    """

    kinds: dict[str, LearnedRates] = {}
    unproposed_share: Share = 0.0
    proposes_seen: bool = False


NOTHING_LEARNED = LearnedAcceptance()


class MeasuredRows(Struct, frozen=True):
    """The mean duration of timesteps with about so many rows; ``age`` in timesteps."""

    rows: Annotated[float, Meta(ge=1, le=1e6)]
    seconds: Positive
    age: Annotated[int, Meta(ge=0)]


class LearnedCosts(Struct, frozen=True, kw_only=True, tag_field="schema", tag="pipedec.costs/1"):
    """Statistics that depend on devices and plan: how long timesteps take. Attributes as in ``Controller`` and ``RowCosts``."""

    rows: list[MeasuredRows] = []
    forwards: Annotated[int, Meta(ge=1)] = 1
    tokens: Annotated[float, Meta(ge=0, le=1e3)] = 1.0  # per timestep and running request
    speculates: bool = True
    interval: Positive = 16.0  # tokens between trials of the other way
    passage: Annotated[int, Meta(ge=1, le=MAX_PASSAGE)] | None = None  # the best on slow links
