"""A draft for a target that has none yet: a small Llama, whose embeddings begin as the main directions of the target's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from pipedec.core import UserError
from pipedec.flags import Help, check_fields
from pipedec.model import DraftVocabulary
from pipedec.text.prompt import vocabulary_digest
from pipedec.text.tokenizer import Tokenizer
from pipedec.train.continuations import Continuation, Model

HEAD_DIM = 64
_STD = 0.02  # of new weights
_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


@dataclass(frozen=True)
class DraftShape:
    """The size of a new draft. Raises UserError for a number that is out of range."""

    hidden_size: Annotated[int, Help("Hidden size of a new draft.")] = 320
    layers: Annotated[int, Meta(ge=1), Help("Layers of a new draft.")] = 4
    vocabulary: Annotated[
        int | None,
        Meta(ge=2),
        Help("Number of tokens that a new draft knows, the most frequent ones of the text that it learns from (default: all)."),
    ] = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden_size < HEAD_DIM or self.hidden_size % HEAD_DIM:
            raise UserError(f"--hidden-size must be a multiple of {HEAD_DIM}, not {self.hidden_size}")


def frequent_tokens(learned: list[Continuation], count: int, tokenizer: Tokenizer, vocab_size: int) -> DraftVocabulary:
    """The ``count`` most frequent tokens of prompts and answers, the most frequent one first."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for found in learned:
        counts += torch.bincount(torch.tensor(found.ids), minlength=vocab_size)
    tokens = counts.sort(descending=True, stable=True).indices[:count]
    return DraftVocabulary.create(tokens, vocab_size, vocabulary_digest(tokenizer))


def new_draft(target: Model, shape: DraftShape, vocabulary: DraftVocabulary | None, seed: int, out: Path) -> Path:
    """Write a draft that has learned nothing yet to ``out``, its vocabulary beside it; returns ``out``."""
    torch.manual_seed(seed)
    embedding_VE: Tensor = target.get_input_embeddings().weight.detach().float()
    embedding_DE = embedding_VE if vocabulary is None else embedding_VE[vocabulary.tokens.clamp(min=0)]
    heads = shape.hidden_size // HEAD_DIM
    config = LlamaConfig(
        vocab_size=len(embedding_DE), hidden_size=shape.hidden_size,
        intermediate_size=-(-shape.hidden_size * 8 // 3 // 32) * 32, num_hidden_layers=shape.layers,
        num_attention_heads=heads, num_key_value_heads=heads, head_dim=HEAD_DIM,
        max_position_embeddings=target.config.max_position_embeddings, rope_parameters=_ROPE, tie_word_embeddings=True,
        initializer_range=_STD, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    draft = LlamaForCausalLM(config)
    draft.get_input_embeddings().weight.data.copy_(_main_directions(embedding_DE, shape.hidden_size))
    draft.generation_config.eos_token_id = target.generation_config.eos_token_id
    draft.save_pretrained(out)
    if vocabulary is not None:
        vocabulary.save(out)
    return out


def _main_directions(embedding_DE: Tensor, size: int) -> Tensor:
    """The embeddings, projected to their ``size`` main directions and scaled to the deviation of new weights, [D, size]."""
    centred = embedding_DE - embedding_DE.mean(0)
    _, vectors = torch.linalg.eigh(centred.T @ centred)  # eigenvalues ascend
    found = centred @ vectors[:, -size:].flip(-1)
    missing = size - found.shape[1]  # where the draft is wider than its target
    found = torch.nn.functional.pad(found, (0, max(missing, 0)))
    return found * (_STD / found.std())
