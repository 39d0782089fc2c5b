"""Stages without a model, to measure everything else: no layers, and a last stage that is given the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import cast

import torch
from torch import Tensor

from pipedec.model import KVPool, KVShape, LaneRows, StageModel
from pipedec.stage.final_lane import FinalLane
from pipedec.stage.slot_tokens import SlotTokens

_SHAPE = KVShape(num_layers=0, num_kv_heads=0, head_dim=0, dtype=torch.float32)


class NoLayers:
    """Computes nothing: its activations are zeros, [R, E]. Stands in for a ``StageModel``."""

    def __init__(self, hidden_size: int = 1) -> None:
        self.config = SimpleNamespace(vocab_size=1)
        self._hidden_size = hidden_size
        self._zeros: dict[int, Tensor] = {}  # by number of rows

    @classmethod
    def model(cls, hidden_size: int = 1) -> StageModel:
        return cast(StageModel, cls(hidden_size))

    def make_pool(self, slots: int, block: int = 16) -> KVPool:
        """A pool that takes no memory."""
        return KVPool(_SHAPE, slots, block)

    def forward(self, inputs: Tensor, lanes: Sequence[LaneRows]) -> Tensor:
        rows = len(inputs)
        if rows not in self._zeros:
            self._zeros[rows] = torch.zeros(rows, self._hidden_size)
        return self._zeros[rows]


class _NoTokens(SlotTokens):
    """Remembers nothing: nobody asks which tokens count for penalties."""

    def __init__(self) -> None:
        super().__init__(0)

    def read(self, slots: Iterable[range]) -> Tensor:
        return torch.zeros(sum(map(len, slots)), dtype=torch.int64)

    def write(self, slots: Iterable[range], token_ids: Tensor) -> None:
        """Nothing is remembered."""


class _AnsweringLane(FinalLane):
    """Says the next token of a known answer after each row. Rows that are not on its path get tokens that nobody looks at."""

    answer: Sequence[int]
    arrived: Callable[[list[int]], None]
    _arrivals: list[int]

    def say(self) -> None:
        """The tokens after the rows that entered last."""
        last = len(self.answer) - 1
        positions = self._entered.positions[self._entered.num_rows - self.num_judged :].tolist()
        self.settle([self.answer[min(position - self._prompt_length + 1, last)] for position in positions])
