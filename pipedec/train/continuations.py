"""The target's own greedy continuations of prompts: the text that drafts and BiTA learn to predict.

Owns their generation in large batches and the files that keep them, so that a killed run continues. It does not know where
prompts come from, nor who learns.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedec.core import UserError
from pipedec.train.prompts import SplitPrompts
from pipedec.transport.replicas import ALONE, Replicas

Model = Any  # a causal language model of transformers, whose classes share no usable type

BATCH_PROMPTS = 96
BATCH_TOKENS = 16_384


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's greedy continuation of it, up to and with an end token."""

    ids: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Continuations:
    """Prompts with the target's greedy answers, by set: to learn from, and held out."""

    training: dict[str, list[Continuation]]
    held_out: dict[str, list[Continuation]]

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt with its answer."""
        everything = [*self.training.values(), *self.held_out.values()]
        return max(len(answered.ids) for found in everything for answered in found)

    def digest(self) -> str:
        """A short name for the training part, equal for equal tokens."""
        total = hashlib.sha256()
        for name, found in self.training.items():
            total.update(f"{name} {[(answered.ids, answered.prompt_length) for answered in found]}".encode())
        return total.hexdigest()[:16]


def answer(
    target: Model, prompts: dict[str, SplitPrompts], new_tokens: int, work: Path, replicas: Replicas = ALONE
) -> Continuations:
    """The target's greedy answers to all prompts; ``work`` keeps them, so that a second run does not generate them again."""

    def answers(prompt_ids: list[list[int]], folder: str, name: str) -> list[Continuation]:
        return continue_greedily(target, prompt_ids, new_tokens, work / folder / name, replicas)

    training = {name: answers(part.training, "continuations", name) for name, part in prompts.items()}
    return Continuations(training, {name: answers(part.held_out, "held-out", name) for name, part in prompts.items()})


def continue_greedily(
    target: Model, prompt_ids: list[list[int]], new_tokens: int, store: Path, replicas: Replicas = ALONE,
    batch_prompts: int = BATCH_PROMPTS, batch_tokens: int = BATCH_TOKENS,
) -> list[Continuation]:  # fmt: skip
    """The target's greedy continuations of all prompts, shortest prompts first; ``store`` keeps one file per batch.

    Several processes share the batches; all of them read ``store``.

    Args:
        batch_prompts: the most prompts of a batch.
        batch_tokens: the most tokens of its prompts, with their padding.

    Raises:
        UserError: ``store`` holds continuations of other prompts.
    """
    store.mkdir(parents=True, exist_ok=True)
    batches = _batches(sorted(prompt_ids, key=len), batch_prompts, batch_tokens)
    paths = [store / f"{number:04}.safetensors" for number in range(len(batches))]
    for number, path in enumerate(track(paths, f"continuations: {store.name}", disable=not replicas.is_first)):
        if replicas.shares(number) and not path.exists():
            _save(_generate(target, batches[number], new_tokens), path)
    replicas.wait()
    found: list[Continuation] = []
    for path, batch in zip(paths, batches, strict=True):
        stored = _load(path)
        if [continuation.ids[: continuation.prompt_length] for continuation in stored] != batch:
            raise UserError(f"{path} comes from other prompts: give another --work, or remove it")
        found.extend(stored)
    return found


def _batches(ordered: list[list[int]], most_prompts: int, most_tokens: int) -> list[list[list[int]]]:
    """Prompts, shortest first, in batches that fit both limits; one that fits none has a batch of its own."""
    batches: list[list[list[int]]] = []
    for ids in ordered:
        if not batches or len(batches[-1]) >= min(most_prompts, most_tokens // len(ids)):
            batches.append([])
        batches[-1].append(ids)
    return batches


@torch.no_grad()
def _generate(target: Model, batch: list[list[int]], new_tokens: int) -> Iterator[Continuation]:
    """One batch through transformers' ``generate``, padded on the left."""
    ends = end_tokens(target)
    pad = target.config.pad_token_id if target.config.pad_token_id is not None else 0
    longest = max(map(len, batch))
    ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in batch], device=target.device)
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch], device=target.device)
    how = {"max_new_tokens": new_tokens, "do_sample": False, "repetition_penalty": 1.0, "use_cache": True, "pad_token_id": pad}
    output_BT = target.generate(ids_BT, attention_mask=mask_BT, **how)
    for prompt, row in zip(batch, output_BT[:, longest:].tolist(), strict=True):
        length = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
        yield Continuation(prompt + row[:length], len(prompt))


def end_tokens(target: Model) -> frozenset[int]:
    """The tokens that end an answer of ``generate``: its generation config names one, several or none."""
    named = target.generation_config.eos_token_id
    return frozenset() if named is None else frozenset(named) if isinstance(named, list) else frozenset([named])


def _save(continuations: Iterator[Continuation], path: Path) -> None:
    sequences = list(continuations)
    tensors = {
        "ids": torch.tensor([token for sequence in sequences for token in sequence.ids]),
        "lengths": torch.tensor([len(sequence.ids) for sequence in sequences]),
        "prompt_lengths": torch.tensor([sequence.prompt_length for sequence in sequences]),
    }
    partial = path.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(path)


def _load(path: Path) -> list[Continuation]:
    tensors = load_file(path)
    pieces: tuple[Tensor, ...] = tensors["ids"].split(tensors["lengths"].tolist())
    lengths = tensors["prompt_lengths"].tolist()
    return [Continuation(ids.tolist(), length) for ids, length in zip(pieces, lengths, strict=True)]
