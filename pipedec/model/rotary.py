"""Rotary position embedding for every rope type that transformers knows for LLaMA.

Owns which frequencies a row gets, also where they depend on the length of the sequence. Knows nothing of attention.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pipedec.core import UserError
from pipedec.model.config import ModelConfig

LENGTH_DEPENDENT = ("dynamic", "longrope")


class Rotary:
    """Cosines and sines of positions.

    Args:
        config: the model's shape; its ``hf.rope_parameters`` decide the frequencies.
        dtype: of the cosines and sines. They are computed in float32, as transformers does.
        device: where rows live.

    Raises:
        UserError: a rope type that the installed transformers does not know, or one that rotates part of a head.
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
                f"config.json rotates {2 * len(frequencies)} of {config.head_dim} numbers of a head; only all is supported"
            )
        self._frequencies_D = _both_halves(frequencies).to(self._device)
        if self.rope_type == "longrope":
            self._short_length: int = parameters["original_max_position_embeddings"]
            long_frequencies, _ = self._initialise(config.hf, seq_len=self._short_length + 1)
            self._long_frequencies_D = _both_halves(long_frequencies).to(self._device)

    def cos_sin(self, positions_R: Tensor, prefill_length: int | None = None) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines for ``rotate``.

        Rope types that depend on the length of the sequence use, for a decoded row at position p, the frequencies of
        length p + 1 (what decoding token by token uses), and for a row of the prompt those of the whole prompt.

        Args:
            positions_R: int64 position ids.
            prefill_length: tokens of the whole prompt if these rows belong to it, else None.

        Returns:
            cos_RD, sin_RD: the first half of the sines is negated, which saves ``rotate`` a negation per layer.
        """
        angles_RD = positions_R[:, None].float() * self._row_frequencies(positions_R, prefill_length)
        cos_RD, sin_RD = angles_RD.cos(), angles_RD.sin()
        if self._scaling != 1.0:
            cos_RD, sin_RD = cos_RD * self._scaling, sin_RD * self._scaling
        return cos_RD.to(self._dtype), sin_RD.to(self._dtype)

    def _row_frequencies(self, positions_R: Tensor, prefill_length: int | None) -> Tensor:
        """Frequencies [D] for all rows, or [R, D] where each row has its own."""
        if self.rope_type not in LENGTH_DEPENDENT:
            return self._frequencies_D
        lengths_R = positions_R + 1 if prefill_length is None else torch.full_like(positions_R, prefill_length)
        if self.rope_type == "longrope":
            is_long_R1 = (lengths_R > self._short_length)[:, None]
            return torch.where(is_long_R1, self._long_frequencies_D, self._frequencies_D)
        frequencies, _ = self._initialise(self._hf, self._device, seq_len=lengths_R[:, None])
        return _both_halves(frequencies)


def rotate(x_RHD: Tensor, cos_RD: Tensor, sin_RD: Tensor) -> Tensor:
    """Rotate every head of every row by its position; the arguments come from ``Rotary.cos_sin``."""
    swapped_RHD = x_RHD.roll(x_RHD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_RHD * cos_RD[:, None], swapped_RHD, sin_RD[:, None])


def _both_halves(frequencies: Tensor) -> Tensor:
    """Frequencies of half a head for the whole head: minus and plus. A cosine does not see the sign, a sine keeps it."""
    return torch.cat((-frequencies, frequencies), dim=-1).float()
