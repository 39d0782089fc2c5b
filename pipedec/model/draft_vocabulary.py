"""The tokens that a draft knows, if they are not all of its target's: few tokens make up most text, and a small draft would
otherwise consist of embeddings. Or both have the same tokenizer, and their embeddings are padded to different numbers.

Owns ``draft_vocabulary.safetensors`` beside the draft's weights. Shapes: D tokens of the draft, V of the target.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import pad

from pipedec.checkpoints.digests import VOCABULARY_FILE
from pipedec.core.errors import UserError


@dataclass(frozen=True)
class DraftVocabulary:
    """One of the draft's tokens stands for every token that the draft does not know: the first one, or its last padding."""

    tokens: Tensor  # int64 [D], the target's token for each of the draft's; −1 for those that are never proposed
    draft_ids: Tensor  # int64 [V], the draft's token for each of the target's
    of: str = ""  # the digest of the target's vocabulary (see ``text.prompt.vocabulary_digest``), if the draft has its own

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

    @classmethod
    def between(
        cls, directory: Path, num_tokens: int, vocab_size: int, device: torch.device | str = "cpu"
    ) -> DraftVocabulary | None:
        """The tokens that the draft in ``directory``, with D = ``num_tokens``, knows of a target with V = ``vocab_size``; None if
        they are the same. Raises UserError as ``load``.
        """
        own = cls.load(directory, device)
        if own is None and num_tokens == vocab_size:
            return None
        tokens = torch.arange(num_tokens, device=device) if own is None else own.tokens
        draft_ids = torch.arange(vocab_size, device=device).clamp(max=num_tokens - 1)
        if own is not None:
            draft_ids = pad(own.draft_ids[:vocab_size], (0, max(vocab_size - len(own.draft_ids), 0)))
        return cls(tokens.masked_fill(tokens >= vocab_size, -1), draft_ids)

    def save(self, directory: Path) -> None:
        """Write the file beside the draft's weights."""
        about = {"vocab_size": str(len(self.draft_ids)), "of": self.of}
        save_file({"tokens": self.tokens[1:].cpu().contiguous()}, directory / VOCABULARY_FILE, metadata=about)

    def to(self, device: torch.device | str) -> DraftVocabulary:
        """The vocabulary on another device."""
        return DraftVocabulary(self.tokens.to(device), self.draft_ids.to(device), self.of)
