"""Rows whose activations are not finite: which stage was the first to compute such a row, without waiting for a device.

A stage replaces such a row by a mark, which is NaN except for its first value, the number of the stage. Later stages compute NaN
from it and pass the mark on. Behind the last stage a mark becomes a token id that no vocabulary has, so that it is read together
with the tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_HOST = torch.device("cpu")
_CORRUPTED = -(2**32)  # less the number of a stage; masks are negative, too, but near 0


def known_finite(values: Tensor) -> bool:
    """Whether all values are finite, as far as that can be known without waiting for a device: then there is nothing to mark.

    Their sum is asked, which costs a hundredth of asking each of them: it is finite only if all of them are. (It may overflow
    although they are; then they are all looked at.)
    """
    return values.device == _HOST and math.isfinite(values.sum(dtype=torch.float32))


def marked(inputs: Tensor, hidden_RE: Tensor, stage: int) -> Tensor:
    """The activations, with a mark in place of each row that is not finite. Does not wait for a device.

    Args:
        inputs: what they were computed from: activations of the stage before, or token ids.
        stage: that has computed them.
    """
    mark_E = torch.full_like(hidden_RE[0], torch.nan)
    mark_E[0] = stage
    hidden_RE = torch.where(hidden_RE.isfinite().all(1, keepdim=True), hidden_RE, mark_E)
    if not inputs.is_floating_point():
        return hidden_RE
    return torch.where(inputs.isnan().any(1, keepdim=True), inputs, hidden_RE)


def first_stage(hidden_RE: Tensor) -> Tensor:
    """The least of the stages in the marks among these rows, float32 [1]; infinity without any."""
    stages_R = torch.where(hidden_RE.isnan().any(1), hidden_RE[:, 0].float(), torch.inf)
    return stages_R.amin(0, keepdim=True)


def corrupted_tokens(token_ids_R: Tensor, bad_R: Tensor, stage_1: Tensor) -> Tensor:
    """The token ids, int64, with one that names the stage after each row that is bad: bool [R]."""
    return torch.where(bad_R, _CORRUPTED - stage_1.nan_to_num(posinf=0).long(), token_ids_R)


def bad_stage(token_ids: tuple[int, ...]) -> int | None:
    """The stage that one of these names; None if none does."""
    return next((_CORRUPTED - token for token in token_ids if token <= _CORRUPTED), None)
