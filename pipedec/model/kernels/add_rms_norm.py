"""Root mean square norms of rows, with the addition before or after them, in one launch.

A program norms a row, of which its registers hold all numbers: the result may take the place of the rows.

Shape legend: R rows, X numbers of a row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.model.kernels import language
from pipedec.model.kernels.language import jit, power_of_two, tl, wide

_NUMBERS = 16  # of a thread


def add_rms_norm(
    rows_RX: Tensor, weight_X: Tensor, eps: float, before_RX: Tensor | None = None, after_RX: Tensor | None = None,
    out_RX: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """norm(rows + before) · weight + after, computed in float32 and rounded where ``reference`` rounds.

    Args:
        rows_RX: become rows + before, if ``before_RX`` is given.
        before_RX, after_RX: at most one of them.
        out_RX: takes the result, and is returned; may be ``rows_RX`` unless ``before_RX`` is given. None for a new tensor.
    """
    rows, size = rows_RX.shape
    out_RX = torch.empty_like(rows_RX, memory_format=torch.contiguous_format) if out_RX is None else out_RX
    others = [other for other in (before_RX, after_RX) if other is not None]
    added, width = others[0] if others else rows_RX, power_of_two(size)
    language.launch(
        _norm, (rows,), rows_RX, added, weight_X, out_RX, rows_RX.stride(0), added.stride(0), out_RX.stride(0), eps,
        SIZE=size, WIDTH=width, BEFORE=before_RX is not None, AFTER=after_RX is not None, WIDE=wide(rows_RX.dtype),
        num_warps=max(1, min(16, width // (32 * _NUMBERS))),
    )  # fmt: skip
    return out_RX


def reference(
    rows_RX: Tensor, weight_X: Tensor, eps: float, before_RX: Tensor | None = None, after_RX: Tensor | None = None,
    out_RX: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """As ``add_rms_norm``, in operations of torch, for rows [..., X]."""
    if before_RX is not None:
        rows_RX.add_(before_RX)
    if rows_RX.dtype == torch.float32:
        normed_RX = torch.rms_norm(rows_RX, weight_X.shape, weight_X, eps)
    else:
        normed_RX = torch.rms_norm(rows_RX.float(), weight_X.shape, eps=eps).to(weight_X.dtype) * weight_X
    if after_RX is not None:
        normed_RX.add_(after_RX)
    return normed_RX if out_RX is None else out_RX.copy_(normed_RX)


@jit
def _norm(
    rows, added, weight, out, row_stride, added_stride, out_stride, eps,
    SIZE: tl.constexpr, WIDTH: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    dtype: tl.constexpr = rows.dtype.element_ty
    mask = columns < SIZE
    found = tl.load(rows + row * row_stride + columns, mask=mask, other=0.0)
    if BEFORE:
        other = tl.load(added + row * added_stride + columns, mask=mask, other=0.0)
        found = (found.to(WIDE) + other.to(WIDE)).to(dtype)
        tl.store(rows + row * row_stride + columns, found, mask=mask)
    numbers = found.to(tl.float32)
    normed = (numbers * tl.rsqrt(tl.sum(numbers * numbers, 0) / SIZE + eps)).to(dtype)
    scale = tl.load(weight + columns, mask=mask, other=0.0)
    normed = (normed.to(WIDE) * scale.to(WIDE)).to(dtype)
    if AFTER:
        other = tl.load(added + row * added_stride + columns, mask=mask, other=0.0)
        normed = (normed.to(WIDE) + other.to(WIDE)).to(dtype)
    tl.store(out + row * out_stride + columns, normed, mask=mask)
