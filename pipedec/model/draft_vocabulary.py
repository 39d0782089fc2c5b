"""The tokens that a draft knows, if it does not know all of its target's: few tokens make up most text, and a small draft
would otherwise consist of embeddings.

Owns ``draft_vocabulary.safetensors`` beside the draft's weights. Shapes: D tokens of the draft, V of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from pipedec.checkpoints.digests import VOCABULARY_FILE
from pipedec.core import UserError


@dataclass(frozen=True)
class DraftVocabulary:
    """A draft's token 0 stands for every token that the draft does not know."""

    tokens: Tensor  # int64 [D], the target's token for each of the draft's; −1 for the first one
    draft_ids: Tensor  # int64 [V], the draft's token for each of the target's
    of: str  # the digest of the target's vocabulary (see ``text.prompt.vocabulary_digest``)

    @classmethod
    def create(cls, tokens: Tensor, vocab_size: int, of: str) -> DraftVocabulary:
        """The vocabulary of the target's ``tokens``, int64, in this order. Raises ValueError if one repeats or is not below V."""
        if len(tokens.unique()) != len(tokens) or not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab_size:
            raise ValueError(f"a draft's tokens must be different, and below {vocab_size}")
        draft_ids = torch.zeros(vocab_size, dtype=torch.int64, device=tokens.device)
        draft_ids[tokens] = torch.arange(1, len(tokens) + 1, device=tokens.device)
        return cls(torch.cat([tokens.new_tensor([-1]), tokens]), draft_ids, of)

    @classmethod
    def load(cls, directory: Path, device: torch.device | str = "cpu") -> DraftVocabulary | None:
        """Read the file of the draft in ``directory``; None if it knows all tokens. Raises UserError for a damaged file."""
        path = directory / VOCABULARY_FILE
        if not path.exists():
            return None
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                about = file.metadata() or {}
                return cls.create(file.get_tensor("tokens"), int(about["vocab_size"]), about["of"])
        except (SafetensorError, OSError, KeyError, ValueError, RuntimeError) as error:
            raise UserError(f"{path} is damaged ({str(error)[:160]}): train the draft again, or copy it again") from None

    def save(self, directory: Path) -> None:
        """Write the file beside the draft's weights."""
        about = {"vocab_size": str(len(self.draft_ids)), "of": self.of}
        save_file({"tokens": self.tokens[1:].cpu().contiguous()}, directory / VOCABULARY_FILE, metadata=about)

    def to(self, device: torch.device | str) -> DraftVocabulary:
        """The vocabulary on another device."""
        return DraftVocabulary(self.tokens.to(device), self.draft_ids.to(device), self.of)
