"""The gate of an MLP: silu(gate) · up, of rows in which the two follow each other, in one launch.

Shape legend: R rows, I inner size of the MLP.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional

from pipedec.model.kernels import language
from pipedec.model.kernels.language import jit, tl, wide

_BLOCK = 1024  # numbers of a program: eight of a thread


def silu_mul(gate_up: Tensor) -> Tensor:
    """[R, I] of rows [R, 2 · I], computed in float32 and rounded where ``reference`` rounds."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out_RI = gate_up.new_empty((rows, inner))
    grid = rows, -(-inner // _BLOCK)
    language.launch(_gate, grid, gate_up, out_RI, gate_up.stride(0), inner, BLOCK=_BLOCK, WIDE=wide(gate_up.dtype))
    return out_RI


def reference(gate_up: Tensor, activation: Callable[[Tensor], Tensor] = functional.silu) -> Tensor:
    """As ``silu_mul``, in operations of torch, with any activation."""
    gate_RI, up_RI = gate_up.chunk(2, dim=-1)
    return activation(gate_RI).mul_(up_RI)


@jit
def _gate(gate_up, out, row_stride, inner, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    dtype: tl.constexpr = out.dtype.element_ty
    mask = columns < inner
    gate = tl.load(gate_up + row * row_stride + columns, mask=mask, other=0.0).to(WIDE)
    up = tl.load(gate_up + row * row_stride + inner + columns, mask=mask, other=0.0).to(WIDE)
    gated = (gate / (1 + tl.exp(-gate))).to(dtype)
    tl.store(out + row * inner + columns, (gated.to(WIDE) * up).to(dtype), mask=mask)
