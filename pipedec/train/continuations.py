"""The prompts and the target's continuations of them, from which drafts and BiTA learn, some held out to measure on.

Owns prompts of files, their invention and continuation in large batches, and the files that keep both, so that a killed run
continues. A draft must be right where the target is asked what its users ask. A target that was tuned for chats knows such
questions: it writes them where its chat template has the user speak (Magpie, Xu et al. 2024). There it is also given the
beginnings of several kinds of requests, since by itself it writes few requests with a text to work on.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress, track
from safetensors.torch import load_file, save_file
from torch import Tensor

from pipedec.core.errors import UserError
from pipedec.data import PromptSet, PromptSource
from pipedec.text.prompt import Prompter
from pipedec.text.tokenizer import Tokenizer
from pipedec.train.replicas import ALONE, Replicas
from pipedec.train.run import COLUMNS, Run, replacing
from pipedec.verify.reference import load_transformers

_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class SplitPrompts:
    """Token ids of the prompts of one set: to learn from, and held out."""

    training: list[list[int]]
    held_out: list[list[int]]


def file_prompts(
    prompter: Prompter, sources: tuple[PromptSource, ...], new_tokens: int, max_prompts: int | None = None,
    taken: Container[str] = (), raw: bool = False,
) -> dict[str, SplitPrompts]:  # fmt: skip
    """The prompts of files, through the chat template, by set.

    Args:
        new_tokens: of an answer, at most.
        max_prompts: of each set; None = all.
        taken: names that no set may have.
        raw: skip the chat template.

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
                found.append(list(prompter.token_ids(prompts.prompts[number], raw, max_tokens=new_tokens)))
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
INVENTED, ON_TEXTS = "invented", "texts"  # names of sets of prompts
_LONGEST = 96  # tokens of an invented prompt
_ON_TEXTS_ONE_IN = 8
_INVENTION = {"do_sample": True, "temperature": 0.8, "top_k": 0, "top_p": 0.95}  # at 1 a small target loses its thread
# How every second batch of invented requests begins; the target goes on with it.
_OPENINGS = (
    "Translate from German to English:", "Write a Python function that", "Question:", "Explain", "Who", "How do I",
    "Translate this sentence to English:", "Write a", "When", "What is the", "Rewrite", "Solve", "Give me", "Compare", "Why", "A",
    "Correct this", "Tell me a story about", "List",
)  # fmt: skip
# Requests about a text: answers of the target, and the question of one of them.
_TEXT_REQUESTS = (
    "Summarize the following text:\n\n{text}", "Summarize: {text}", "{text}\n\nSummarize the text above in a few sentences.",
    "{text}\n\nWhat is the main point?", "{text}\n\nQuestion: {question}\nAnswer:", "{question}\n\n{text}",
    "Answer the question from these documents.\n\n{text}\n\nQuestion: {question}", "Rewrite this text:\n\n{text}",
    "List the main points of this text.\n\n{text}", "Give this text a title:\n{text}", "Explain this to a child: {text}",
    "{text}\n\nBased on the text above, answer: {question}",
)  # fmt: skip
_PLACE = "\N{WHITE SQUARE}\N{BLACK SQUARE}\N{WHITE SQUARE}"  # a text that no template has


@dataclass(frozen=True)
class Continuation:
    """A prompt and the target's continuation of it, up to and with an end token."""

    ids: list[int]
    prompt_length: int


@dataclass(frozen=True)
class Continuations:
    """Prompts with the target's answers, by set: to learn from, and held out."""

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
    target: Model, prompts: dict[str, SplitPrompts], new_tokens: int, work: Path, replicas: Replicas = ALONE, drawn: int = 0
) -> Continuations:
    """The target's greedy answers to all prompts, and ``drawn`` sampled ones to each, with temperature 1; ``work`` keeps them, so
    that a second run does not generate them again. Sampled answers to held-out prompts are a set of their own.
    """

    def answers(prompt_ids: list[list[int]], folder: str, name: str, seed: int | None = None) -> list[Continuation]:
        return continued(target, prompt_ids, new_tokens, work / folder / name, replicas, seed)

    training, held_out = {}, {}
    for name, part in prompts.items():
        training[name] = answers(part.training, "continuations", name)
        held_out[name] = answers(part.held_out, "held-out", name)
        for seed in range(1, drawn + 1):
            training[name] += answers(part.training, f"continuations-{seed}", name, seed)
        if drawn:
            held_out[f"{name}, drawn"] = answers(part.held_out, "held-out-1", name, 1)
    return Continuations(training, held_out)


def continued(
    target: Model, prompt_ids: list[list[int]], new_tokens: int, store: Path, replicas: Replicas = ALONE, seed: int | None = None,
    batch_prompts: int = BATCH_PROMPTS, batch_tokens: int = BATCH_TOKENS,
) -> list[Continuation]:  # fmt: skip
    """The target's continuations of all prompts, shortest prompts first; ``store`` keeps one file per batch.

    Several processes share the batches, which have at most ``batch_prompts`` prompts and ``batch_tokens`` tokens with their
    padding; all of them read ``store``. Raises UserError if ``store`` holds continuations of other prompts.

    Args:
        seed: of tokens that are drawn with temperature 1; None for greedy continuations.
    """
    store.mkdir(parents=True, exist_ok=True)
    batches = _batches(sorted(prompt_ids, key=len), batch_prompts, batch_tokens)
    paths = [store / f"{number:04}.safetensors" for number in range(len(batches))]
    for number, path in enumerate(track(paths, f"continuations: {store.name}", disable=not replicas.is_first)):
        if replicas.shares(number) and not path.exists():
            if seed is not None:
                torch.manual_seed(seed * 1_000_003 + number)
            generated = list(_generate(target, batches[number], new_tokens, seed is not None))
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
def _generate(target: Model, batch: list[list[int]], new_tokens: int, draws: bool) -> Iterator[Continuation]:
    """One batch through transformers' ``generate``, padded on the left."""
    ends = end_tokens(target)
    pad = target.config.get_text_config().pad_token_id or 0
    longest = max(map(len, batch))
    ids_BT = torch.tensor([[pad] * (longest - len(ids)) + ids for ids in batch], device=target.device)
    mask_BT = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in batch], device=target.device)
    how = {"max_new_tokens": new_tokens, "repetition_penalty": 1.0, "use_cache": True, "pad_token_id": pad}
    how |= {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0} if draws else {"do_sample": False}
    output_BT = target.generate(ids_BT, attention_mask=mask_BT, **how)
    for prompt, row in zip(batch, output_BT[:, longest:].tolist(), strict=True):
        length = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
        yield Continuation(prompt + row[:length], len(prompt))


def end_tokens(target: Model) -> frozenset[int]:
    """The tokens that end an answer of ``generate``: its generation config names one, several or none."""
    named = target.generation_config.eos_token_id
    return frozenset() if named is None else frozenset(named) if isinstance(named, list) else frozenset([named])


def invented_sets(
    target_path: Path, prompter: Prompter, count: int, new_tokens: int, run: Run, seed: int = 0
) -> dict[str, SplitPrompts]:
    """``count`` prompts that the target invents, as token ids; one in eight gives it texts of its own to work on. Raises
    UserError as ``invented_prompts``.
    """
    if count < 1:
        raise UserError(f"--invented must be at least 1, not {count}")
    torch.set_num_threads(run.threads)
    target = load_transformers(target_path, run.torch_dtype, run.device)
    num_on_texts = count // _ON_TEXTS_ONE_IN
    found = invented_prompts(target, prompter.tokenizer, count - num_on_texts, seed, run.work / INVENTED, run.replicas)
    texts = {prompter.token_ids(text, False, new_tokens): text for text in found.prompts}
    sets = {INVENTED: split(list(map(list, texts)))}
    if num_on_texts:
        answered = answer(target, sets, new_tokens, run.work, run.replicas)
        decode = prompter.tokenizer.decode
        known = [
            [(texts[tuple(one.ids[: one.prompt_length])], decode(one.ids[one.prompt_length :])) for one in part]
            for part in (answered.training[INVENTED], answered.held_out[INVENTED])
        ]
        num_held_out = max(num_on_texts // _HELD_OUT_ONE_IN, 1)
        sets[ON_TEXTS] = SplitPrompts(
            *(
                [list(prompter.token_ids(text, False, new_tokens)) for text in _about_texts(part, number, random.Random(seed))]
                for part, number in zip(known, (num_on_texts - num_held_out, num_held_out), strict=True)
            )
        )
    return sets


def _about_texts(answered: list[tuple[str, str]], count: int, rng: random.Random) -> Iterator[str]:
    """``count`` requests about texts of one to three answers, with the question of one of them."""
    for _ in range(count):
        chosen = rng.sample(answered, min(rng.randint(1, 3), len(answered)))
        question, _ = rng.choice(chosen)
        text = "\n\n".join(answer.strip() for _, answer in chosen)
        yield rng.choice(_TEXT_REQUESTS).format(text=text, question=question)


def invented_prompts(
    target: Model, tokenizer: Tokenizer, count: int, seed: int, store: Path, replicas: Replicas = ALONE
) -> PromptSet:
    """``count`` different prompts, drawn from the target; ``store`` keeps one file per batch, from which a second run goes on.

    Several processes take a batch each; all of them read ``store``. Raises UserError if the target has no chat template, or more
    than nine in ten of its inventions are empty, endless or known.
    """
    store.mkdir(parents=True, exist_ok=True)
    before, _, _ = tokenizer.render_chat([{"role": "user", "content": _PLACE}]).partition(_PLACE)
    found: dict[str, None] = {}
    with Progress(*COLUMNS, disable=not replicas.is_first) as progress:
        bar = progress.add_task(f"prompts: {INVENTED}", total=count)
        for number in range(1 + 10 * count // BATCH_PROMPTS):
            path = store / f"{number:04}.json"
            if replicas.shares(number) and not path.exists():
                opening = _OPENINGS[number // 2 % len(_OPENINGS)] if number % 2 else ""
                texts = _invent(target, tokenizer, before, opening, seed * 1_000_003 + number)
                with replacing(path) as unfinished:
                    unfinished.write_text(json.dumps(texts, indent=1), encoding="utf-8")
            if (number + 1) % replicas.size:
                continue
            replicas.wait()
            for earlier in range(number + 1 - replicas.size, number + 1):
                found |= dict.fromkeys(json.loads((store / f"{earlier:04}.json").read_text(encoding="utf-8")))
            progress.update(bar, completed=min(len(found), count))
            if len(found) >= count:
                return PromptSet(INVENTED, tuple(found)[:count])
    raise UserError(f"the target invented only {len(found)} prompts: give --prompts FILE instead")


@torch.no_grad()
def _invent(target: Model, tokenizer: Tokenizer, before: str, opening: str, seed: int) -> list[str]:
    """The prompts of one batch that came to an end."""
    torch.manual_seed(seed)
    before_ids = tokenizer.encode(before + opening, add_special_tokens=False)
    ids = torch.tensor([before_ids] * BATCH_PROMPTS, device=target.device)
    pad = target.config.get_text_config().pad_token_id or 0
    how: dict[str, Any] = {"max_new_tokens": _LONGEST, "use_cache": True, "pad_token_id": pad}
    output = target.generate(ids, attention_mask=torch.ones_like(ids), **how, **_INVENTION)
    ends = end_tokens(target)
    rows = (row[: min(map(row.index, ends & set(row)))] for row in output[:, len(before_ids) :].tolist() if ends & set(row))
    return [text for row in rows if (text := (opening + tokenizer.decode(row)).strip())]
