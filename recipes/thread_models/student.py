"""Prepares a model for learning threads: a chat template with dialects, the control tokens that it lacks, their embeddings.

Owns the state of model and tokenizer before the first step. Knows no samples and no training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from pipedec.checkpoints import fingerprint
from pipedec.core import UserError
from pipedec.model import ModelConfig
from pipedec.text.tokenizer import load_for_training
from pipedec.threads import load_dialect
from recipes.thread_models.rows import with_marker

_ALIKE = 0.99  # cosine above which two embeddings count as equal


@dataclass(frozen=True)
class Student:
    """A model to train, in float32 on its device, and its tokenizer, which has the marker and all control tokens."""

    model: Any
    tokenizer: Any
    config: ModelConfig
    name: str

    @classmethod
    def load(cls, path: Path, dialects: list[str], device: torch.device, seed: int = 0) -> Student:
        """Load a model; missing control tokens are added, and control tokens that it never learned get new embeddings.

        Raises:
            UserError: there is no model, chat template or end token.
        """
        config = ModelConfig.from_directory(path)
        tokenizer = load_for_training(path)
        if tokenizer.chat_template is None:
            raise UserError(f"{path} has no chat template, which is needed to name the dialect in the prompt")
        if tokenizer.eos_token_id is None:
            raise UserError(f"the tokenizer in {path} has no end token")
        tokenizer.chat_template = with_marker(tokenizer.chat_template)
        tokenizer.model_max_length = config.max_positions
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
        known = [load_dialect(name) for name in dialects]
        control = list(dict.fromkeys(text for one in known for text in (*one.control_tokens, *one.opener_tokens)))
        added = [text for text in control if text not in tokenizer.get_vocab()]
        if added:
            tokenizer.add_special_tokens({"additional_special_tokens": added}, replace_extra_special_tokens=False)
            model.resize_token_embeddings(max(len(tokenizer), model.config.vocab_size), mean_resizing=False)
        renew_embeddings(model, tokenizer, control, added, seed)
        return cls(model.to(device).eval(), tokenizer, config, fingerprint(path))

    def check_companion(self, path: Path, knows_all: bool) -> None:
        """Check that another model has the same token ids.

        Args:
            knows_all: it must also have all control tokens, because it reads answers in threads.

        Raises:
            UserError: its tokenizer differs.
        """
        own, other = self.tokenizer.get_vocab(), load_for_training(path).get_vocab()
        if not other.items() <= own.items() or (knows_all and len(other) < len(own)):
            raise UserError(
                f"{path} has a different tokenizer ({len(other)} tokens, not {len(own)}): use a model of the same family"
            )

    def save(self, out: Path) -> None:
        """Write the model in bfloat16, with its tokenizer."""
        self.model.to(torch.bfloat16).save_pretrained(out)
        self.tokenizer.save_pretrained(out)


@torch.no_grad()
def renew_embeddings(model: Any, tokenizer: Any, control: list[str], added: list[str], seed: int) -> None:
    """Draw new embeddings, distributed like the others, for tokens that were never learned: those ``added``, and special tokens
    with nearly equal embeddings (pretraining pushes all tokens that never occur in the same direction).

    Only control tokens and the chat template's special tokens around the marker are considered.
    """
    special = {token for token, added_token in tokenizer.added_tokens_decoder.items() if added_token.special}
    turn = tokenizer.apply_chat_template([{"role": "user", "content": "?"}], threads="?", return_dict=False)
    wanted = torch.tensor(sorted({*tokenizer.convert_tokens_to_ids(control), *(token for token in turn if token in special)}))
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    directions = nn.functional.normalize(embeddings[wanted], dim=-1)
    alike = (directions @ directions.T - torch.eye(len(wanted))).amax(1) > _ALIKE
    renewed = wanted[alike | torch.isin(wanted, torch.tensor(tokenizer.convert_tokens_to_ids(added), dtype=torch.int64))]
    generator = torch.Generator().manual_seed(seed)
    for weights in (embeddings,) if head is embeddings else (embeddings, head):
        others = torch.ones(len(weights), dtype=torch.bool)
        others[renewed] = False
        noise = torch.randn(len(renewed), weights.shape[1], generator=generator)
        weights[renewed] = weights[others].mean(0) + noise * weights[others].std(0)
