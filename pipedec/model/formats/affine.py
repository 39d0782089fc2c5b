"""Integers of 4 or 8 bits with scales, as GPTQ, AWQ, AutoRound and compressed-tensors store them (``pipedec.formats.affine``).

However they lie in the file, they are kept by output: 4 bits in ``packed_halves``, 8 bits as int8. Nothing is rounded.

Shape legend: R rows in this step, N outputs, n of them, K inputs, G groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import torch
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.formats import Affine, Format, Integers
from pipedec.model.formats.base import LOADED_VALUES, Held, QuantizedMatrix
from pipedec.model.formats.packing import int4_kernel, packed_halves, suits_int4_kernel, unpacked_halves
from pipedec.model.kernels.affine import affine_weights
from pipedec.model.kernels.matmul import Weights

_SCALE_TYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, None: torch.float16}
_PART_STEP = 32  # outputs; parts of a file's tensor begin at a multiple of it


class AffineMatrix(QuantizedMatrix):
    """Attributes of ``held``:
    codes: q − 8 in ``packed_halves``, or q − 128, int8 [N, K].
    scales: [N, G], in the dtype of the file.
    zeros: z, uint8 [N, G]; not there if all are 8, or 128.
    groups: int32 [K], the group of each input; not there if the inputs of each group follow each other.
    """

    format: Affine
    steps: Mapping[str, int] = {"groups": 0}

    @classmethod
    def empty(cls, format: Format, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device) -> Self:
        """A matrix without values. Raises UserError if its sizes do not suit the format."""
        assert isinstance(format, Affine)
        format.tensors((outputs, inputs))
        groups = format.num_groups(inputs)
        held = {
            "codes": torch.empty(outputs, inputs * format.bits // 8, dtype=torch.int8, device=device),
            "scales": torch.empty(outputs, groups, dtype=_SCALE_TYPES[format.scales.dtype], device=device),
        }
        if format.zeros is not None:
            held["zeros"] = torch.empty(outputs, groups, dtype=torch.uint8, device=device)
        if format.is_ordered:
            held["groups"] = torch.empty(inputs, dtype=torch.int32, device=device)
        return cls(format, (outputs, inputs), dtype, held)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Take these tensors, slice by slice. Raises UserError if groups or zero points are not those of the format."""
        self._take_groups(tensors)
        stored = self.format.tensors(tuple(self.shape))
        step = max(LOADED_VALUES[self.device.type] // self.shape[1] // _PART_STEP, 1) * _PART_STEP
        for first in range(0, len(self), step):
            outputs = slice(first, min(first + step, len(self)))
            part = {suffix: tensor[stored[suffix].places(outputs)].to(self.device) for suffix, tensor in tensors.items()}
            self[outputs]._take(part)

    def _take_groups(self, tensors: Mapping[str, Tensor]) -> None:
        if self.format.groups is None or (groups_K := tensors.get(self.format.groups)) is None:
            return
        natural_K = self._natural_groups(groups_K.device)
        if bool((groups_K < 0).all()):
            groups_K = natural_K
        if "groups" not in self.held and not torch.equal(groups_K, natural_K.to(groups_K.dtype)):
            raise UserError(f"{self.format.groups} orders the inputs, though the quantization_config does not (desc_act)")
        if not 0 <= int(groups_K.min()) <= int(groups_K.max()) < self.format.num_groups(self.shape[1]):
            raise UserError(f"{self.format.groups} names groups that are not there")
        if "groups" in self.held:
            self.held["groups"].copy_(groups_K)

    def _take(self, tensors: Mapping[str, Tensor]) -> None:
        format, (outputs, inputs) = self.format, self.shape
        groups, middle = format.num_groups(inputs), 1 << (format.bits - 1)
        codes_NK = _numbers(tensors[format.codes.suffix], format.codes, format.bits, outputs, inputs)
        signed_NK = (codes_NK - middle).view(torch.int8)
        self.held["codes"].copy_(packed_halves(signed_NK) if format.bits == 4 else signed_NK)
        scales = tensors[format.scales.suffix]
        self.held["scales"].copy_(scales.T if format.scales.is_transposed else scales)
        if format.zeros is not None:
            self.held["zeros"].copy_(_numbers(tensors[format.zeros.suffix], format.zeros, format.bits, outputs, groups))
        if (same := format.same_zeros) is not None and same.suffix in tensors:
            low, high = (int(one) for one in _numbers(tensors[same.suffix], same, format.bits, outputs, groups).aminmax())
            if low != high or low not in (middle - 1, middle):
                raise UserError(f"{same.suffix} is not that of symmetric weights, as quantization_config has it (sym)")

    def values(self, held: Held) -> Tensor:
        codes, inputs, is_even = held["codes"], self.shape[1], not self.format.group or self.shape[1] % self.format.group == 0
        wide_NK = (unpacked_halves(codes) if self.format.bits == 4 else codes).float()
        scales_NG, zeros_NG = held["scales"].float(), None
        if "zeros" in held:
            zeros_NG = held["zeros"].float().sub_(1 << (self.format.bits - 1))
        if "groups" in held or not is_even:
            groups_K = held["groups"] if "groups" in held else self._natural_groups(codes.device)
            if zeros_NG is not None:
                wide_NK.sub_(zeros_NG.index_select(1, groups_K))
            return wide_NK.mul_(scales_NG.index_select(1, groups_K))
        grouped = wide_NK.view(len(codes), scales_NG.shape[1], -1)
        if zeros_NG is not None:
            grouped.sub_(zeros_NG[..., None])
        return grouped.mul_(scales_NG[..., None]).view(len(codes), inputs)

    def _natural_groups(self, device: torch.device) -> Tensor:
        inputs_K = torch.arange(self.shape[1], dtype=torch.int32, device=device)
        return inputs_K // self.format.group if self.format.group else torch.zeros_like(inputs_K)

    def prepared(self, keeps_rows: bool = False) -> Self:
        if "groups" in self.held and torch.equal(self.held["groups"], self._natural_groups(self.device)):
            del self.held["groups"]
        if self.takes_torch_kernel(keeps_rows) and "groups" not in self.held:
            self._take_kernel()
        return self

    def stored(self) -> Weights:
        held, format = self.held, self.format
        zeros, groups = held.get("zeros"), held.get("groups")
        return affine_weights(format.bits, self.shape[1], format.group, held["codes"], held["scales"], zeros, groups)

    def _take_kernel(self) -> None:
        """Use torch's kernel if there is one for these sizes; it has scales and zero points in bfloat16."""
        format, codes, scales_NG = self.format, self.held["codes"], self.held["scales"]
        if format.bits == 4 and format.group and self.shape[1] % format.group == 0:
            if suits_int4_kernel(self.shape, format.group):
                parts = (part._scales_and_zeros() for part in self.slices(LOADED_VALUES))
                self._kernel, self.held = int4_kernel(codes, parts, format.group)
        elif format.bits == 8 and scales_NG.shape[1] == 1 and "zeros" not in self.held:
            scales_N = scales_NG[:, 0].to(torch.bfloat16)
            self._kernel = lambda rows_RK: torch._weight_int8pack_mm(rows_RK, codes, scales_N)
            self.held = {"codes": codes, "scales": scales_N}

    def _scales_and_zeros(self) -> tuple[Tensor, Tensor]:
        """As torch's kernel for 4 bits has them: it multiplies q − 8, and adds the weight of 8."""
        scales_NG = self.held["scales"].float()
        zeros_NG = self.held["zeros"].float() if "zeros" in self.held else torch.full_like(scales_NG, 8)
        return scales_NG, (8 - zeros_NG) * scales_NG


def _numbers(tensor: Tensor, stored: Integers, bits: int, outputs: int, columns: int) -> Tensor:
    """The numbers of a tensor of the file, uint8 [outputs, columns]."""
    by_output = tensor.T if stored.is_transposed else tensor
    if stored.along == "none":
        numbers = by_output.view(torch.uint8)
    elif stored.along == "outputs":
        numbers = _fields_of_rows(by_output.contiguous(), bits, stored.order)[:outputs]
    else:
        numbers = _fields_of_columns(by_output.contiguous(), bits)[:, :columns]
    return numbers if not stored.added else (numbers + stored.added) & ((1 << bits) - 1)


def _fields_of_rows(words: Tensor, bits: int, order: tuple[int, ...]) -> Tensor:
    """The numbers of int32 words which hold one of each of several rows."""
    fields = [((words >> bits * field) & ((1 << bits) - 1)).to(torch.uint8) for field in order or range(32 // bits)]
    return torch.stack(fields, 1).flatten(0, 1)


def _fields_of_columns(words: Tensor, bits: int) -> Tensor:
    """The numbers of int32 words which hold several of a row."""
    pairs = words.view(torch.uint8)
    return pairs if bits == 8 else torch.stack((pairs & 15, pairs >> 4), 2).flatten(1)
