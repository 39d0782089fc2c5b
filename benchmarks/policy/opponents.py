"""Opponents of the default policy that only the replay knows: a chain of tokens, segments of a tree ordered by score, and static
trees and chains of other shapes.

They are policies within ``benchmarks.methods.registered(*OPPONENTS)``.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Annotated

from benchmarks.policy.shapes import Eagle2Options, EvictOptions, MtpOptions, OptTreeOptions, SequoiaOptions
from pipedec.core.request import TokenizedRequest
from pipedec.decoding.best_first import BestFirst
from pipedec.decoding.budget import Demand
from pipedec.decoding.method import DraftRoom, Resources
from pipedec.decoding.sources import DraftAlone, DraftSources, fixed_sources
from pipedec.methods import BestFirstOptions, Children, Forwards, MethodEntry, Option, PipeDecOptions, Proposers, Rows, options_of
from pipedec.threads import Sequence as ThreadSequence


class ChainOptions(PipeDecOptions, frozen=True):
    """``chain``: one token per timestep, as SPD (arXiv 2605.30852) sends them, from any draft model."""

    width: Annotated[Rows, Option("Rows per timestep")] = 1
    children: Annotated[Children, Option("Children per row")] = 1


class FlowSpecOptions(BestFirstOptions, frozen=True):
    """``flowspec``: the limits of segments and of the tree in flight."""

    width: Annotated[Rows | None, Option("Rows of a segment, one of which enters per timestep")] = 16
    children: Annotated[Children | None, Option("Children per row, and rows of a draft forward")] = 10
    forwards: Annotated[Forwards | None, Option("Draft forwards per timestep")] = 2
    proposers: Proposers = ("draft",)
    rows: Annotated[Rows, Option("Rows in flight")] = 80


class FlowSpec(BestFirst):
    """FlowSpec (arXiv 2507.02620): a draft tree is ordered by the scores of its paths and cut into segments, which enter at
    successive timesteps. Every verdict prunes what is in flight and what waits. Drafting goes on from the best rows that are
    left; what it adds is merged by score. Unlike the paper's, a root enters at once, and no segment waits for the whole tree.

    Differs from ``BestFirst`` in that the draft's probabilities are scores as they are, and that all limits are fixed.
    """

    def __init__(self, request: TokenizedRequest, sequence: ThreadSequence, resources: Resources, thread: int = 0) -> None:
        super().__init__(request, sequence, resources, thread)
        options = options_of(request, FlowSpecOptions)
        self._rows, self._drafted_rows = options.rows, options.children or self.children

    def _new_sources(self) -> DraftAlone | DraftSources:
        return fixed_sources(self, self._options.proposers)

    def demand(self) -> Demand:
        demand, left = super().demand(), max(self._rows - self.tree.num_entered, 0)
        return replace(demand, chances=islice(demand.chances, left))

    def draft(self, room: DraftRoom) -> list[int]:
        return list(super().draft(room._replace(rows=min(room.rows, self._drafted_rows))))

    def _guess(self) -> None:
        """Copied tokens are drafted like all others."""


OPPONENTS = (
    MethodEntry("chain", "One drafted token per timestep.", ChainOptions, "pipedec.decoding.pipedec:PipeDec", draft="required"),
    MethodEntry(
        "flowspec", "Segments of a draft tree, ordered by score.", FlowSpecOptions, "benchmarks.policy.opponents:FlowSpec",
        draft="required",
    ),
    MethodEntry(
        "eagle2", "Static trees of EAGLE-2.", Eagle2Options, "pipedec.decoding.static_tree:StaticTree", draft="required"
    ),
    MethodEntry("opt-tree", "Static trees of OPT-Tree.", OptTreeOptions, "benchmarks.policy.shapes:OptTree", draft="required"),
    MethodEntry("sequoia", "Static trees of Sequoia.", SequoiaOptions, "benchmarks.policy.shapes:Sequoia", draft="required"),
    MethodEntry("evict", "Trees of EVICT, cut by cost.", EvictOptions, "benchmarks.policy.shapes:Evict", draft="required"),
    MethodEntry(
        "mtp", "A chain of drafted tokens per round.", MtpOptions, "pipedec.decoding.static_tree:StaticTree", draft="required"
    ),
)  # fmt: skip
FREE_DRAFTS = ("mtp",)  # methods whose draft forwards take no time: counted as if the target's own pass drafted
