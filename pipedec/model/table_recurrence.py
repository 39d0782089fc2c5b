"""Recurrent layers of a forward's rows from tables: rows of trees of all requests at once, and chunks of prompts one by one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from pipedec.model.kernels import delta_rule, short_convolution
from pipedec.model.kernels.language import has_kernels
from pipedec.model.recurrent import Chunk, RuleInputs, chunks_of
from pipedec.model.row_tables import RowTables
from pipedec.model.rows import LaneRows
from pipedec.model.states import StatePool


class TableRecurrence:
    """See ``Recurrence``.

    Args:
        lanes: of which chunks of prompts are computed beside the rows of ``tables``; none in captured forwards.
    """

    def __init__(self, tables: RowTables, pool: StatePool, lanes: Sequence[LaneRows] = ()) -> None:
        self._tables, self._pool = tables, pool
        self._chunks: list[Chunk] = chunks_of(lanes)

    def convolve(self, layer: int, inputs_RC: Tensor, weight_CW: Tensor, bias_C: Tensor | None = None) -> Tensor:
        """See ``Recurrence``."""
        memory = self._pool.layer(layer)
        compute = (
            short_convolution.short_convolution if has_kernels(inputs_RC.device, inputs_RC.dtype) else short_convolution.reference
        )
        out_RC = compute(inputs_RC, weight_CW, bias_C, self._tables, memory)
        for chunk in self._chunks:
            out_RC[chunk.rows] = chunk.convolve(memory, inputs_RC[chunk.rows], weight_CW, bias_C)
        return out_RC

    def mix(self, layer: int, queries: Tensor, keys: Tensor, values: Tensor, decays: Tensor, rates: Tensor) -> Tensor:
        """See ``Recurrence``."""
        memory = self._pool.layer(layer)
        compute = delta_rule.gated_delta_rule if has_kernels(values.device, values.dtype) else delta_rule.reference
        out_RHV = compute(queries, keys, values, decays, rates, self._tables, memory)
        for chunk in self._chunks:
            own, dtype = chunk.rows, memory.states.dtype
            rows = RuleInputs.of(queries[own], keys[own], values[own], decays[own], rates[own], dtype)
            out_RHV[own] = chunk.mix(memory, rows).to(values.dtype)
        return out_RHV
