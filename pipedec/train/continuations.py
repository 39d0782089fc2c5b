"""The prompts and the target's greedy continuations of them, from which drafts and BiTA learn, some held out to measure on.

Owns prompts of files, their invention and continuation in large batches, and the files that keep both, so that a killed run
continues. A draft must be right where the target is asked what its users ask. A target that was tuned for chats knows such
questions: it writes them where its chat template has the user speak (Magpie, Xu et al. 2024).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, track
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedec.core import UserError
from pipedec.data import PromptSet, PromptSource
from pipedec.model import load_transformers
from pipedec.text.prompt import Prompter
from pipedec.text.tokenizer import Tokenizer
from pipedec.train.run import COLUMNS, Run, replacing
from pipedec.transport.replicas import ALONE, Replicas

_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class SplitPrompts:
    """Token ids of the prompts of one set: to learn from, and held out."""

    training: list[list[int]]
    held_out: list[list[int]]


def file_prompts(
    prompter: Prompter, sources: tuple[PromptSource, ...], new_tokens: int, max_prompts: int | None = None,
    taken: Container[str] = (),
) -> dict[str, SplitPrompts]:  # fmt: skip
    """The prompts of files, through the chat template, by set.

    Args:
        new_tokens: of an answer, at most.
        max_prompts: of each set; None = all.
        taken: names that no set may have.

    Raises UserError if a prompt file is unsound, two sets have one name, or no prompt of a set fits the target's context.
    """
    sets: dict[str, SplitPrompts] = {}
    for source in sources:
        if source.name in sets or source.name in taken:
            raise UserError(f"two sets of prompts are called {source.name}: name one of them, --prompts NAME={source.path}")
        prompts = source.read()
        found: list[list[int]] = []
        for number in prompts.shuffled():  # with a fixed seed
            if len(found) == max_prompts:
                break
            with suppress(UserError):  # it does not fit the context
                found.append(list(prompter.token_ids(prompts.prompts[number], raw=False, max_tokens=new_tokens)))
        if not found:
            raise UserError(f"no prompt of {prompts.name} fits into the target's context: use shorter ones")
        sets[source.name] = split(found)
    return sets


def split(prompts: list[list[int]]) -> SplitPrompts:
    """Hold out one prompt in twenty (at least one of several), the same ones in any order."""
    shuffled = sorted(prompts, key=lambda ids: hashlib.sha256(str(ids).encode()).digest())
    num_held_out = max(len(prompts) // _HELD_OUT_ONE_IN, int(len(prompts) > 1))
    return SplitPrompts(shuffled[num_held_out:], shuffled[:num_held_out])


Model = Any  # a causal language model of transformers, whose classes share no usable type

BATCH_PROMPTS = 96
BATCH_TOKENS = 16_384
NAME = "invented"  # of the set of prompts
_LONGEST = 96  # tokens of an invented prompt
_PLACE = "\N{WHITE SQUARE}\N{BLACK SQUARE}\N{WHITE SQUARE}"  # a text that no template has


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

    Several processes share the batches, which have at most ``batch_prompts`` prompts and ``batch_tokens`` tokens with their
    padding; all of them read ``store``. Raises UserError if ``store`` holds continuations of other prompts.
    """
    store.mkdir(parents=True, exist_ok=True)
    batches = _batches(sorted(prompt_ids, key=len), batch_prompts, batch_tokens)
    paths = [store / f"{number:04}.safetensors" for number in range(len(batches))]
    for number, path in enumerate(track(paths, f"continuations: {store.name}", disable=not replicas.is_first)):
        if replicas.shares(number) and not path.exists():
            generated = list(_generate(target, batches[number], new_tokens))
            tensors = {
                "ids": torch.tensor([token for one in generated for token in one.ids]),
                "lengths": torch.tensor([len(one.ids) for one in generated]),
                "prompt_lengths": torch.tensor([one.prompt_length for one in generated]),
            }
            with replacing(path) as unfinished:
                save_file(tensors, unfinished)
    replicas.wait()
    found: list[Continuation] = []
    for path, batch in zip(paths, batches, strict=True):
        tensors = load_file(path)
        pieces = map(Tensor.tolist, tensors["ids"].split(tensors["lengths"].tolist()))
        stored = [Continuation(*pair) for pair in zip(pieces, tensors["prompt_lengths"].tolist(), strict=True)]
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


def invented_set(
    target_path: Path, prompter: Prompter, count: int, new_tokens: int, run: Run, seed: int = 0
) -> dict[str, SplitPrompts]:
    """``count`` prompts that the target invents, as token ids. Raises UserError as ``invented_prompts``."""
    if count < 1:
        raise UserError(f"--invented must be at least 1, not {count}")
    torch.set_num_threads(run.threads)
    target = load_transformers(target_path, run.torch_dtype, run.device)
    found = invented_prompts(target, prompter.tokenizer, count, seed, run.work / NAME, run.replicas)
    return {NAME: split([list(prompter.token_ids(text, False, new_tokens)) for text in found.prompts])}


def invented_prompts(
    target: Model, tokenizer: Tokenizer, count: int, seed: int, store: Path, replicas: Replicas = ALONE
) -> PromptSet:
    """``count`` different prompts, drawn with temperature 1; ``store`` keeps one file per batch, from which a second run goes on.

    Several processes take a batch each; all of them read ``store``. Raises UserError if the target has no chat template, or more
    than nine in ten of its inventions are empty, endless or known.
    """
    store.mkdir(parents=True, exist_ok=True)
    before, _, _ = tokenizer.render_chat([{"role": "user", "content": _PLACE}]).partition(_PLACE)
    before_ids = tokenizer.encode(before, add_special_tokens=False)
    found: dict[str, None] = {}
    with Progress(*COLUMNS, disable=not replicas.is_first) as progress:
        bar = progress.add_task(f"prompts: {NAME}", total=count)
        for number in range(1 + 10 * count // BATCH_PROMPTS):
            path = store / f"{number:04}.json"
            if replicas.shares(number) and not path.exists():
                texts = _invent(target, tokenizer, before_ids, seed * 1_000_003 + number)
                with replacing(path) as unfinished:
                    unfinished.write_text(json.dumps(texts, indent=1), encoding="utf-8")
            if (number + 1) % replicas.size:
                continue
            replicas.wait()
            for earlier in range(number + 1 - replicas.size, number + 1):
                found |= dict.fromkeys(json.loads((store / f"{earlier:04}.json").read_text(encoding="utf-8")))
            progress.update(bar, completed=min(len(found), count))
            if len(found) >= count:
                return PromptSet(NAME, tuple(found)[:count])
    raise UserError(f"the target invented only {len(found)} prompts: give --prompts FILE instead")


@torch.no_grad()
def _invent(target: Model, tokenizer: Tokenizer, before: list[int], seed: int) -> list[str]:
    """The prompts of one batch that came to an end."""
    torch.manual_seed(seed)
    ids = torch.tensor([before] * BATCH_PROMPTS, device=target.device)
    how: dict[str, Any] = {"max_new_tokens": _LONGEST, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    how |= {"use_cache": True, "pad_token_id": target.config.pad_token_id or 0}
    output = target.generate(ids, attention_mask=torch.ones_like(ids), **how)
    ends = end_tokens(target)
    rows = (row[: min(map(row.index, ends & set(row)))] for row in output[:, len(before) :].tolist() if ends & set(row))
    return [text for row in rows if (text := tokenizer.decode(row).strip())]
