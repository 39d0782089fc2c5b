"""The best static tree for a pipeline: every depth and size of a grid, on the prompts of the sweep, by the computed clock.

Gives the static baselines their best tree. Needs an emulated pipeline: only that has a computed clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import asdict, replace

from pipedec.bench.record import Row
from pipedec.bench.sweep.runners import OneProcess
from pipedec.messages import PromptRequest
from pipedec.methods import StaticTreeOptions


@dataclass(frozen=True)
class TuningGrid:
    """Depths of the layer-wise tree; depths and sizes of the best-first tree."""

    layer_depths: tuple[int, ...] = (1, 2, 3, 4)
    depths: tuple[int, ...] = (4, 6, 8, 10)
    rows: tuple[int, ...] = (24, 48, 72)

    def layer_wise(self, limits: StaticTreeOptions) -> list[StaticTreeOptions]:
        """Trees of whole layers: the paper's tree, cut at a depth."""
        return [replace(limits, depth=depth, rows=None) for depth in self.layer_depths]

    def best_first(self, limits: StaticTreeOptions) -> list[StaticTreeOptions]:
        """Trees of the most probable rows."""
        return [replace(limits, depth=depth, rows=rows) for depth in self.depths for rows in self.rows if rows > depth]


def best_tree(
    pipeline: OneProcess,
    trees: Sequence[StaticTreeOptions],
    prompts: Sequence[PromptRequest],
) -> tuple[StaticTreeOptions, list[Row]]:
    """The tree with which ``stpp`` decodes ``prompts`` fastest, and ms per token of every tree."""
    tried: list[tuple[float, StaticTreeOptions]] = []
    for tree in trees:
        answers = [pipeline.answer(replace(prompt, method="stpp", options=asdict(tree))) for prompt in prompts]
        tokens = sum(len(answer.token_ids) - 1 for answer in answers)
        tried.append((sum(answer.decode_ms for answer in answers) / max(1, tokens), tree))
    best = min(tried, key=lambda entry: entry[0])[1]
    return best, [{"tree": asdict(tree), "ms_per_token": round(time_ms, 2)} for time_ms, tree in tried]
