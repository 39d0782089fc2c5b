"""Rotary position embedding for every rope type that transformers supports for LLaMA.

Owns the choice of frequencies for a row, including types that depend on the sequence length. Knows nothing of attention.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from pipedec.core import UserError
from pipedec.model.config import ModelConfig

LENGTH_DEPENDENT = ("dynamic", "longrope")
_KEPT_LENGTHS = 4096  # of which the frequencies are not computed again


class Rotary:
    """Cosines and sines for position ids.

    Args:
        config: the model's shape; its ``hf.rope_parameters`` determine the frequencies.
        dtype: dtype of the returned cosines and sines. They are computed in float32, as in transformers.
        device: device of the rows.

    Raises:
        UserError: the installed transformers does not know the rope type, or it rotates only part of a head.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> None:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        self._hf = config.hf
        self._dtype = dtype
        self._device = torch.device(device)
        parameters = config.hf.rope_parameters
        self.rope_type: str = parameters["rope_type"]
        if self.rope_type == "default":
            exponents_D = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
            frequencies, self._scaling = 1.0 / (parameters["rope_theta"] ** exponents_D), 1.0
        elif self.rope_type in ROPE_INIT_FUNCTIONS:
            self._initialise = ROPE_INIT_FUNCTIONS[self.rope_type]
            frequencies, self._scaling = self._initialise(config.hf)
        else:
            known = ", ".join(["default", *ROPE_INIT_FUNCTIONS])
            raise UserError(f"rope type {self.rope_type!r} in config.json is not known; transformers knows {known}")
        if 2 * len(frequencies) != config.head_dim:
            raise UserError(
                f"config.json rotates {2 * len(frequencies)} of {config.head_dim} numbers of a head; it must rotate all"
            )
        self._frequencies_D = _both_halves(frequencies).to(self._device)
        self._of_length = lru_cache(maxsize=_KEPT_LENGTHS)(self._frequencies_of)
        if self.rope_type == "longrope":
            self._original_length: int = parameters["original_max_position_embeddings"]
            long_frequencies, _ = self._initialise(config.hf, seq_len=self._original_length + 1)
            self._long_frequencies_D = _both_halves(long_frequencies).to(self._device)

    @property
    def depends_on_length(self) -> bool:
        """Whether the frequencies of a row depend on a sequence length."""
        return self.rope_type in LENGTH_DEPENDENT

    def cos_sin(self, positions_R: Tensor, lengths_R: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for ``rotate``.

        Rope types that depend on the sequence length use, for a decoded row at position p, the frequencies of length p + 1 (as
        when decoding token by token), and for a row of the prompt those of the whole prompt's length.

        Args:
            positions_R: int64 position ids.
            lengths_R: int64, the length whose frequencies each row uses. None if the type does not depend on it.

        Returns:
            cos_RD, sin_RD. The first half of the sines is negated, which saves ``rotate`` a negation per layer.
        """
        angles_RD = positions_R[:, None].float() * self._row_frequencies(lengths_R)
        cos_RD, sin_RD = angles_RD.cos(), angles_RD.sin()
        if self._scaling != 1.0:
            cos_RD, sin_RD = cos_RD * self._scaling, sin_RD * self._scaling
        return cos_RD.to(self._dtype), sin_RD.to(self._dtype)

    def _row_frequencies(self, lengths_R: Tensor | None) -> Tensor:
        """Frequencies: [D] if all rows share them, else [R, D]."""
        if not self.depends_on_length:
            return self._frequencies_D
        assert lengths_R is not None
        if self.rope_type == "longrope":
            is_long_R1 = (lengths_R > self._original_length)[:, None]
            return torch.where(is_long_R1, self._long_frequencies_D, self._frequencies_D)
        lengths, which_R = lengths_R.unique(return_inverse=True)
        return torch.stack([self._of_length(length) for length in lengths.tolist()])[which_R]

    def _frequencies_of(self, length: int) -> Tensor:
        """Frequencies of one length, [D]. One length at a time, so that their last bits do not depend on a row's company."""
        frequencies, _ = self._initialise(self._hf, self._device, seq_len=length)
        return _both_halves(frequencies)


def rotate(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    """Rotate every head of every row by its position, with the result of ``Rotary.cos_sin``."""
    swapped_RHD = x_RHD.roll(x_RHD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_RHD * cos_RD[:, None], swapped_RHD, sin_RD[:, None])


def _both_halves(frequencies: Tensor) -> Tensor:
    """Frequencies of half a head, extended to the whole head. The first half is negated: this changes the sines only."""
    return torch.cat((-frequencies, frequencies), dim=-1).float()
