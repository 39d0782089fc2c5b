"""Training BiTA over the stages of a target: which layers each has, and the memory and the time that it takes."""

from __future__ import annotations

from math import prod

from pipedec.checkpoints import KnownTensors, LayerSpan, span_shapes
from pipedec.families import ModelConfig
from pipedec.hardware import GIGA
from pipedec.plan.placement import balance, explicit_layers


def training_cut(config: ModelConfig, stages: int) -> list[LayerSpan]:
    """The layers of each stage, with embeddings and head balanced by size. Raises UserError if there are fewer layers."""

    def billions(layers: range, first: bool = False, last: bool = False) -> float:
        span = LayerSpan(layers, first, last)
        return sum(map(prod, span_shapes(config, span, KnownTensors(config).names).values())) / GIGA

    count, ends = config.num_hidden_layers, range(stages)
    of_layers = [billions(range(layer, layer + 1)) for layer in range(count)]
    of_ends = [billions(range(0), end == 0, end == stages - 1) for end in ends]
    layers = explicit_layers(balance([of_layers] * stages, of_ends, [0] * count, [0] * stages), count)
    return [LayerSpan(own, end == 0, end == stages - 1) for end, own in zip(ends, layers, strict=True)]
