"""A model of no layers, for benchmarks of what surrounds the model, and the sequences of a stage that runs it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from pipedec.core import NewRequest
from pipedec.model import KVPool, KVShape, LaneRows, StageModel
from pipedec.threads import NewSequence, replay
from pipedec.threads import Sequence as ThreadSequence

_NOTHING = KVShape(num_layers=0, num_kv_heads=0, head_dim=0, dtype=torch.float32)


class _NoLayers:
    """Stands in for a ``StageModel`` (see ``no_layers``)."""

    config = SimpleNamespace(vocab_size=1)

    def __init__(self, hidden_size: int) -> None:
        self._hidden_size = hidden_size
        self._zeros: dict[int, Tensor] = {}  # by number of rows

    def make_pool(self, slots: int, block: int) -> KVPool:
        return _EmptyPool(_NOTHING, slots, block)

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        for lane in lanes:
            lane.append()
        rows = len(inputs)
        if rows not in self._zeros:
            self._zeros[rows] = torch.zeros(rows, self._hidden_size)
        return self._zeros[rows]


def no_layers(hidden_size: int = 1) -> StageModel:
    """A model of no layers, whose activations are zeros, [R, ``hidden_size``]."""
    return cast(StageModel, _NoLayers(hidden_size))


class _EmptyPool(KVPool):
    """Of any number of slots that hold nothing."""

    def copy(self, sources: Sequence[int], targets: Iterable[range]) -> None:
        """There is nothing to copy."""


def sequence_of(opening: NewRequest, max_tokens: int = sys.maxsize) -> NewSequence:
    """Makes sequences that end after ``max_tokens`` tokens, and begin with what was said before."""
    return partial(_sequence, opening, max_tokens)


def _sequence(opening: NewRequest, max_tokens: int) -> ThreadSequence:
    sequence = ThreadSequence(opening.prompt_length, (), max_tokens)
    replay(sequence, opening.output_token_ids)
    return sequence
