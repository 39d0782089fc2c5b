"""Rotary position embedding for every rope type that transformers supports for LLaMA.

Owns the choice of frequencies for a row, including types that depend on the sequence length. Knows nothing of attention.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.families.base import LENGTH_DEPENDENT, DecoderConfig

CosSin = tuple[Tensor, Tensor]  # [R, 1, D] each


class Rotary:
    """Cosines and sines for position ids.

    Args:
        config: the model's; its ``rope`` determines the frequencies.
        dtype: dtype of the returned cosines and sines. They are computed in float32, as in transformers.

    Raises:
        UserError: the installed transformers does not know the rope type, or it rotates only part of a head.
    """

    def __init__(self, config: DecoderConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        rope, head_dim = config.rope, config.layers[0].key_dim
        self._dtype = dtype
        self._device = torch.device(device)
        self.rope_type: str = rope["rope_type"]
        self._scaling = 1.0
        if self.rope_type == "default":
            frequencies = _plain_frequencies(rope, head_dim)
        elif self.rope_type == "llama3":
            frequencies = _llama3_frequencies(rope, head_dim)
        else:
            self._initialise = _frequencies_by_transformers(self.rope_type, config.directory)
            frequencies, self._scaling = self._initialise(self._device)
        if 2 * len(frequencies) != head_dim:
            raise UserError(f"config.json rotates {2 * len(frequencies)} of {head_dim} numbers of a head; it must rotate all")
        self._frequencies_D = _both_halves(frequencies).to(self._device)
        if self.rope_type == "longrope":
            self._original_length: int = rope["original_max_position_embeddings"]
            long_frequencies, _ = self._initialise(self._device, self._original_length + 1)
            self._long_frequencies_D = _both_halves(long_frequencies).to(self._device)
        if self.rope_type == "dynamic":
            self._theta, self._factor, self._context = rope["rope_theta"], rope["factor"], config.max_position_embeddings
            self._exponents_D = torch.arange(0, head_dim, 2, dtype=torch.float64, device=self._device) / head_dim

    def cos_sin(self, positions_R: Tensor, lengths_R: Tensor) -> CosSin:
        """Cosines and signed sines for ``rotate``.

        Rope types that depend on the sequence length use, for a decoded row at position p, the frequencies of length p + 1 (as
        when decoding token by token), and for a row of the prompt those of the whole prompt's length.

        Args:
            lengths_R: int64, the length whose frequencies each row uses, if the type depends on it.

        Returns:
            cos_R1D, sin_R1D. The first half of the sines is negated, which saves ``rotate`` a negation per layer.
        """
        if self.rope_type not in LENGTH_DEPENDENT:
            frequencies = self._frequencies_D
        elif self.rope_type == "longrope":
            is_long_R1 = (lengths_R > self._original_length)[:, None]
            frequencies = torch.where(is_long_R1, self._long_frequencies_D, self._frequencies_D)
        else:
            frequencies = self._dynamic_frequencies(lengths_R)
        angles_RD = positions_R[:, None].float() * frequencies
        cos_RD, sin_RD = angles_RD.cos(), angles_RD.sin()
        if self._scaling != 1.0:
            cos_RD, sin_RD = cos_RD * self._scaling, sin_RD * self._scaling
        return cos_RD.to(self._dtype)[:, None], sin_RD.to(self._dtype)[:, None]

    def _dynamic_frequencies(self, lengths_R: Tensor) -> Tensor:
        """Frequencies of each row's length, [R, D]: the base grows with the length beyond the context.

        Computed in float64, so that their bits in float32 do not depend on a row's company.
        """
        rotated, factor, context = 2 * len(self._exponents_D), self._factor, self._context
        stretch_R1 = (factor * lengths_R.clamp(min=context).double() / context - (factor - 1))[:, None]
        bases_R1 = self._theta * stretch_R1 ** (rotated / (rotated - 2))
        return _both_halves(1.0 / bases_R1**self._exponents_D)


def rotate(x_RHD: Tensor, cos_R1D: Tensor, sin_R1D: Tensor) -> Tensor:
    """Rotate every head of every row by its position, with the result of ``Rotary.cos_sin``."""
    swapped_RHD = x_RHD.roll(x_RHD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_RHD * cos_R1D, swapped_RHD, sin_R1D)


def _both_halves(frequencies: Tensor) -> Tensor:
    """Frequencies of half a head, extended to the whole head. The first half is negated: this changes the sines only."""
    return torch.cat((-frequencies, frequencies), dim=-1).float()


def _plain_frequencies(rope: Mapping[str, Any], head_dim: int, share: float = 1.0) -> Tensor:
    rotated = int(head_dim * share)
    exponents_D = torch.arange(0, rotated, 2, dtype=torch.float32) / rotated
    return 1.0 / (rope["rope_theta"] ** exponents_D)


def _llama3_frequencies(rope: Mapping[str, Any], head_dim: int) -> Tensor:
    """The frequencies of Llama 3.1 and later: long wavelengths are scaled by ``factor``, medium ones interpolated.

    Operations and their order are those of transformers, so the results are equal bit by bit.
    """
    length, low, high = rope["original_max_position_embeddings"], rope["low_freq_factor"], rope["high_freq_factor"]
    plain_D = _plain_frequencies(rope, head_dim, rope.get("partial_rotary_factor", 1.0))
    waves_D = 2 * math.pi / plain_D
    stretched_D = torch.where(waves_D > length / low, plain_D / rope["factor"], plain_D)
    smooth_D = (length / waves_D - low) / (high - low)
    partly_D = (1 - smooth_D) * stretched_D / rope["factor"] + smooth_D * stretched_D
    is_between_D = (waves_D >= length / high) & (waves_D <= length / low)
    return torch.where(is_between_D, partly_D, stretched_D)


def _frequencies_by_transformers(rope_type: str, directory: Path) -> Callable[..., tuple[Tensor, float]]:
    """transformers' function for the other rope types; it takes a device and, for some types, a sequence length.

    Importing transformers takes two seconds.
    """
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if rope_type not in ROPE_INIT_FUNCTIONS:
        known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
        raise UserError(f"rope type {rope_type!r} in config.json is not known; transformers knows {known}")
    try:
        hf = AutoConfig.from_pretrained(directory, local_files_only=True)
    except Exception as error:  # transformers validates with many exception types of its own
        reason = " ".join(str(error).split())
        raise UserError(f"{directory / 'config.json'} is refused by transformers: {reason}") from None
    return functools.partial(ROPE_INIT_FUNCTIONS[rope_type], hf)
