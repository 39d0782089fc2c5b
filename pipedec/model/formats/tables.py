"""Matrices of 4-bit numbers that are places in a table, as they are in the file: MXFP4, and the NF4 and FP4 of bitsandbytes.

Shape legend: N outputs, K inputs, G groups of inputs that share a scale, P scales of the scales of an output.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.core.values import shortened
from pipedec.formats import Bnb4, Format
from pipedec.formats.tables import BNB_GROUP, MXFP4_GROUP, NESTED_SCALES, whole_groups
from pipedec.model.formats.base import Held, QuantizedMatrix
from pipedec.model.formats.float8 import powers_of_two
from pipedec.model.kernels.matmul import Weights
from pipedec.model.kernels.tables import mxfp4_weights, table_weights

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_FP4 = tuple(one / 12 for one in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
TABLES = {"mxfp4": (*_E2M1, 0.0, *(-one for one in _E2M1[1:])), "nf4": _NF4, "fp4": (*_FP4, 0.0, *(-one for one in _FP4[1:]))}


class TableMatrix(QuantizedMatrix):
    """Attributes of ``held``:
    codes: two places in the table per byte, uint8 [N, K / 2].
    scales: [N, G].
    """

    table: str
    group: int
    low_first: bool

    def values(self, held: Held) -> Tensor:
        codes = held["codes"]
        pairs = _pairs(self.table, self.low_first, codes.device)
        wide_NK = pairs.index_select(0, codes.flatten().int()).view(torch.float32).view(len(codes), -1)
        wide_NK.unflatten(1, (-1, self.group)).mul_(self.scales(held)[:, :, None])
        return wide_NK

    @abstractmethod
    def scales(self, held: Held) -> Tensor:
        """float32 [n, G]."""


class Mxfp4Matrix(TableMatrix):
    """``scales`` are the bits of powers of 2, uint8 (see ``powers_of_two``)."""

    table, group, low_first = "mxfp4", MXFP4_GROUP, True

    @classmethod
    def empty(cls, format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A matrix without values. Raises UserError if its sizes do not suit the format."""
        groups = whole_groups(format.title, inputs, MXFP4_GROUP)
        codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device)
        exponents_NG = torch.empty(outputs, groups, dtype=torch.uint8, device=device)
        return cls(format, (outputs, inputs), dtype, {"codes": codes, "scales": exponents_NG})

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        self.held["codes"].copy_(tensors["weight_blocks"].flatten(1))
        self.held["scales"].copy_(tensors["weight_scales"].view(torch.uint8))

    def scales(self, held: Held) -> Tensor:
        return powers_of_two(held["scales"])

    def stored(self) -> Weights:
        return mxfp4_weights(self.held["codes"], self.held["scales"], self.group)


class Bnb4Matrix(TableMatrix):
    """``scales`` are float32, or nested: places in ``map``, uint8.

    Attributes of ``held`` if they are nested:
    map: float32 [256], the same for all outputs.
    nested: float32 [N, P + 1]: the scales that those of an output need, then what is added.
    starts: uint8 [N]: the place of an output's first scale among the 256 that share ``nested[:, 0]``.
    """

    format: Bnb4
    group, low_first = BNB_GROUP, False
    steps: Mapping[str, int] = {"map": 0}

    def __init__(self, format: Bnb4, shape: tuple[int, int], dtype: torch.dtype, held: Held) -> None:
        super().__init__(format, shape, dtype, held)
        self.table = format.table

    @classmethod
    def empty(cls, format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A matrix without values. Raises UserError if its sizes do not suit the format."""
        assert isinstance(format, Bnb4)
        format.tensors((outputs, inputs))
        kind = torch.uint8 if format.is_nested else torch.float32
        held = {
            "codes": torch.empty(outputs, inputs // 2, dtype=torch.uint8, device=device),
            "scales": torch.empty(outputs, inputs // BNB_GROUP, dtype=kind, device=device),
        }
        if format.is_nested:
            held["map"] = torch.full((256,), torch.nan, device=device)
            held["nested"] = torch.empty(outputs, format.nested_scales(inputs) + 1, device=device)
            held["starts"] = torch.empty(outputs, dtype=torch.uint8, device=device)
        return cls(format, (outputs, inputs), dtype, held)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises UserError if the description in the file does not suit the matrix, or its map is not that of matrices with which
        it is fused.
        """
        state = self._state(tensors[self.format.state])
        self.held["codes"].copy_(tensors["weight"].view(self.held["codes"].shape))
        self.held["scales"].copy_(tensors["weight.absmax"].view(self.held["scales"].shape))
        if not self.format.is_nested:
            return
        map, given = self.held["map"], tensors["weight.nested_quant_map"].to(self.device)
        if not torch.equal(map, given) and not bool(map.isnan().all()):
            raise UserError("its nested_quant_map differs from those of the matrices beside it")
        map.copy_(given)
        outputs, groups = self.held["scales"].shape
        nested, num_nested = tensors["weight.nested_absmax"], self.held["nested"].shape[1] - 1
        first_N = torch.arange(outputs) * groups
        places_NP = (first_N // NESTED_SCALES)[:, None] + torch.arange(num_nested)
        self.held["nested"][:, :-1].copy_(nested[places_NP.clamp_(max=len(nested) - 1)])
        self.held["nested"][:, -1].fill_(state["nested_offset"])
        self.held["starts"].copy_(first_N % NESTED_SCALES)

    def _state(self, text: Tensor) -> Mapping[str, Any]:
        try:
            state = dict(json.loads(bytes(text.tolist())))
        except (ValueError, TypeError, RecursionError):
            raise UserError(f"its {self.format.state} is not JSON: download the checkpoint again") from None
        expected: dict[str, Any] = {"quant_type": self.format.table, "blocksize": BNB_GROUP}
        if self.format.is_nested:
            expected["nested_blocksize"] = NESTED_SCALES
        for key, value in expected.items():
            if state.get(key) != value:
                raise UserError(f"its {key} is {shortened(state.get(key))}, but only {value} is supported")
        shape = state.get("shape")
        if not isinstance(shape, list) or len(shape) != 2 or shape[1] != self.shape[1]:
            raise UserError(f"its quant_state has shape {shortened(shape)}, but config.json asks for {self.shape[1]} inputs")
        if self.format.is_nested and not isinstance(state.get("nested_offset"), float | int):
            raise UserError(f"its nested_offset is {shortened(state.get('nested_offset'))}, not a number")
        return state

    def scales(self, held: Held) -> Tensor:
        scales_NG = held["scales"]
        if not self.format.is_nested:
            return scales_NG
        nested, groups = held["nested"], scales_NG.shape[1]
        wide_NG = held["map"].index_select(0, scales_NG.flatten().int()).view(scales_NG.shape)
        if nested.shape[1] == 2:
            wide_NG.mul_(nested[:, :1])
        else:
            places_NG = held["starts"].long()[:, None] + torch.arange(groups, device=scales_NG.device)
            wide_NG.mul_(nested.gather(1, places_NG // NESTED_SCALES))
        return wide_NG.add_(nested[:, -1:])

    def stored(self) -> Weights:
        held = self.held
        numbers = torch.tensor(TABLES[self.table], device=self.device)
        table = torch.cat((numbers, held["map"])) if self.format.is_nested else numbers
        return table_weights(held["codes"], held["scales"], self.group, table, held.get("nested"), held.get("starts"))


@cache
def _pairs(table: str, low_first: bool, device: torch.device) -> Tensor:
    """The two values of each byte, float64 [256] whose bits are those of two float32."""
    values = torch.tensor(TABLES[table], device=device)
    bytes = torch.arange(256, device=device)
    halves = (bytes & 15, bytes >> 4) if low_first else (bytes >> 4, bytes & 15)
    return torch.stack([values[half] for half in halves], 1).view(torch.float64).view(256)
