"""What the target says by itself: greedy continuations of prompts, which are cut out of documents or made of their words.

Owns the prompts, their generation in large batches and the files that keep what was generated, so that a killed run
continues. It does not know the draft, which learns from these sequences because greedy decoding is what it has to predict.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from pipedec.core import UserError
from pipedec.train import requests
from pipedec.train.corpus import ASSISTANT, BEGIN, Document, conversation

Model = Any  # a causal language model of transformers, whose classes share no usable type

_MAX_PROMPT_TOKENS = 224
_MIN_PASSAGE_TOKENS = 256
_MAX_DRAWS = 20  # for one prompt of a fitting length
_CUT_TOKENS = (32, 160)  # of source text, which has no question to stop at
_BATCH = 96
_BATCH_TOKENS = 16_384  # of prompts, with their padding


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's greedy continuation of it, up to and with an end token."""

    ids: list[int]
    prompt_length: int


def prompts(documents: list[Document], tokenizer: PreTrainedTokenizerFast, num_prompts: int, seed: int) -> list[list[int]]:
    """Token ids of ``num_prompts`` prompts: the user's turns of conversations, and pieces of source text."""
    rng = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < num_prompts:
        shuffled = (_prompt(document.text, tokenizer, rng) for document in rng.sample(documents, len(documents)))
        short = [ids for ids in shuffled if len(ids) <= _MAX_PROMPT_TOKENS]
        if not short:
            break
        found.extend(short)
    return found[:num_prompts]


def _prompt(text: str, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[int]:
    question, separator, _ = text.partition(ASSISTANT)
    if separator:
        return tokenizer.encode(question + separator, add_special_tokens=False)
    lines = text.removeprefix(BEGIN).splitlines(keepends=True)
    first = rng.randrange(len(lines))
    ids = tokenizer.encode(BEGIN + "".join(lines[first : first + 40]), add_special_tokens=False)
    return ids[: rng.randint(*_CUT_TOKENS)]


def request_prompts(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, num_prompts: int, seed: int
) -> list[list[int]]:
    """Token ids of ``num_prompts`` short requests made of the documents' prose; fewer if few fit."""
    texts = requests.prose(documents)
    drawn = islice(requests.requests(texts, random.Random(seed)), _MAX_DRAWS * num_prompts) if texts else iter(())
    return list(islice((ids for ids in _turns(drawn, tokenizer) if len(ids) <= _MAX_PROMPT_TOKENS), num_prompts))


def passage_prompts(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, num_prompts: int, max_tokens: int, seed: int
) -> list[list[int]]:
    """Token ids of ``num_prompts`` passages of the documents' prose, each with an instruction; fewer if few fit."""
    texts = requests.prose(documents)
    drawn = islice(requests.passages(texts, random.Random(seed)), _MAX_DRAWS * num_prompts) if texts else iter(())
    fitting = (ids for ids in _turns(drawn, tokenizer) if _MIN_PASSAGE_TOKENS <= len(ids) <= max_tokens)
    return list(islice(fitting, num_prompts))


def _turns(texts: Iterator[str], tokenizer: PreTrainedTokenizerFast) -> Iterator[list[int]]:
    """What a user says, up to where the assistant begins."""
    for text in texts:
        question, separator, _ = conversation(text, "").partition(ASSISTANT)
        yield tokenizer.encode(question + separator, add_special_tokens=False)


def continue_greedily(target: Model, prompt_ids: list[list[int]], new_tokens: int, store: Path) -> list[Continuation]:
    """The target's greedy continuations of all prompts, shortest prompts first; ``store`` keeps one file per batch.

    Raises:
        UserError: ``store`` holds continuations of other prompts.
    """
    store.mkdir(parents=True, exist_ok=True)
    batches = _batches(sorted(prompt_ids, key=len))
    found: list[Continuation] = []
    for number, batch in enumerate(track(batches, f"continuations: {store.name}")):
        path = store / f"{number:04}.safetensors"
        if not path.exists():
            _save(_generate(target, batch, new_tokens), path)
        stored = _load(path)
        if [continuation.ids[: continuation.prompt_length] for continuation in stored] != batch:
            raise UserError(f"{path} comes from other prompts: give another --work, or remove it")
        found.extend(stored)
    return found


def _batches(ordered: list[list[int]]) -> list[list[list[int]]]:
    """Prompts, shortest first, in batches that fit both limits; one that fits none has a batch of its own."""
    batches: list[list[list[int]]] = []
    for ids in ordered:
        if not batches or len(batches[-1]) >= min(_BATCH, _BATCH_TOKENS // len(ids)):
            batches.append([])
        batches[-1].append(ids)
    return batches


@dataclass(frozen=True)
class Rows:
    """Packed token ids, and which of them are followed by a token that the target said: int64 and bool, [rows, length]."""

    ids: Tensor
    before_own: Tensor


def pack_whole(continuations: list[Continuation], length: int, seed: int) -> Rows:
    """Rows of ``length`` tokens that begin with a prompt.

    A continuation that a row's end cuts off comes again, whole, at the start of the next row; none may be longer than a row.
    """
    rows: list[list[tuple[int, bool]]] = []
    row: list[tuple[int, bool]] = []
    for continuation in random.Random(seed).sample(continuations, len(continuations)):
        last = len(continuation.ids) - 1
        sequence = [(token, continuation.prompt_length - 1 <= place < last) for place, token in enumerate(continuation.ids)]
        row = row + sequence
        if len(row) >= length:
            rows.append(row[:length])
            row = sequence if len(row) > length else []
    packed = torch.tensor(rows, dtype=torch.int64).view(-1, length, 2)
    return Rows(packed[..., 0].contiguous(), packed[..., 1].bool())


@torch.no_grad()
def _generate(target: Model, batch: list[list[int]], new_tokens: int) -> Iterator[Continuation]:
    """One batch through transformers' ``generate``, padded on the left."""
    ends = _end_tokens(target)
    pad = target.config.pad_token_id if target.config.pad_token_id is not None else 0
    longest = max(map(len, batch))
    ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in batch], device=target.device)
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch], device=target.device)
    how = {"max_new_tokens": new_tokens, "do_sample": False, "repetition_penalty": 1.0, "use_cache": True, "pad_token_id": pad}
    output_BT = target.generate(ids_BT, attention_mask=mask_BT, **how)
    for prompt, row in zip(batch, output_BT[:, longest:].tolist(), strict=True):
        length = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
        yield Continuation(prompt + row[:length], len(prompt))


def _end_tokens(target: Model) -> tuple[int, ...]:
    """The tokens that end an answer of ``generate``: its generation config names one, several or none."""
    named = target.generation_config.eos_token_id
    return () if named is None else tuple(named) if isinstance(named, list) else (named,)


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
