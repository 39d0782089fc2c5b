"""The best static trees for a pipeline: every depth and size of a grid, on the prompts at hand, by the computed clock.

Makes the static baselines as good as their tree can make them. Needs an emulation: only then does a computed clock exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

from pipedec.bench.record import Row
from pipedec.bench.sweep_runners import OneProcess
from pipedec.messages import PromptRequest
from pipedec.methods import StaticTreeOptions


@dataclass(frozen=True)
class TuningGrid:
    """Depths of the layer-wise tree; depths and sizes of the best-first tree."""

    layer_depths: tuple[int, ...] = (1, 2, 3, 4)
    depths: tuple[int, ...] = (4, 6, 8, 10)
    rows: tuple[int, ...] = (24, 48, 72)

    def layer_wise(self, limits: StaticTreeOptions) -> list[StaticTreeOptions]:
        """Trees of whole layers: the paper's growth, stopped at a depth."""
        return [replace(limits, depth=depth, rows=None) for depth in self.layer_depths]

    def best_first(self, limits: StaticTreeOptions) -> list[StaticTreeOptions]:
        """Trees of the likeliest rows."""
        return [replace(limits, depth=depth, rows=rows) for depth in self.depths for rows in self.rows if rows > depth]


def best_tree(
    pipeline: OneProcess,
    trees: Sequence[StaticTreeOptions],
    prompts: Sequence[PromptRequest],
    on_tree: Callable[[], None] = lambda: None,
) -> tuple[StaticTreeOptions, list[Row]]:
    """The tree with which ``stpp`` decodes ``prompts`` fastest, and milliseconds per token of every tree."""
    tried: list[tuple[float, StaticTreeOptions]] = []
    for tree in trees:
        answers = [pipeline.answer(replace(prompt, method="stpp", options=asdict(tree))) for prompt in prompts]
        tokens = sum(len(answer.token_ids) - 1 for answer in answers)
        tried.append((sum(answer.decode_ms for answer in answers) / max(1, tokens), tree))
        on_tree()
    best = min(tried, key=lambda entry: entry[0])[1]
    return best, [{"tree": asdict(tree), "ms_per_token": round(time_ms, 2)} for time_ms, tree in tried]
