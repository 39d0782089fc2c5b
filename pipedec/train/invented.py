"""Prompts that a target invents itself: what it says where its chat template has the user speak (Magpie, Xu et al. 2024).

A draft must be right where the target is asked what its users ask; a target that was tuned for chats knows such questions. Owns
their generation and the files that keep them. It does not know who learns from the answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from pipedec.core import UserError
from pipedec.data.prompts import PromptSet
from pipedec.model import load_transformers
from pipedec.text.prompt import Prompter
from pipedec.text.tokenizer import Tokenizer
from pipedec.train.continuations import Model, end_tokens
from pipedec.train.loop import COLUMNS
from pipedec.train.prompts import SplitPrompts, split
from pipedec.train.run import Run
from pipedec.transport.replicas import ALONE, Replicas

NAME = "invented"
_BATCH = 96
_LONGEST = 96  # tokens of a prompt
_PLACE = "\N{WHITE SQUARE}\N{BLACK SQUARE}\N{WHITE SQUARE}"  # a text that no template has


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

    Several processes take a batch each; all of them read ``store``.

    Raises:
        UserError: the target has no chat template, or more than nine in ten of its inventions are empty, endless or known.
    """
    store.mkdir(parents=True, exist_ok=True)
    before = tokenizer.encode(_before_user(tokenizer), add_special_tokens=False)
    found: dict[str, None] = {}
    with Progress(*COLUMNS, disable=not replicas.is_first) as progress:
        bar = progress.add_task(f"prompts: {NAME}", total=count)
        for number in range(1 + 10 * count // _BATCH):
            path = store / f"{number:04}.json"
            if replicas.shares(number) and not path.exists():
                _write(path, _invent(target, tokenizer, before, seed * 1_000_003 + number))
            if (number + 1) % replicas.size:
                continue
            replicas.wait()
            for earlier in range(number + 1 - replicas.size, number + 1):
                found |= dict.fromkeys(json.loads((store / f"{earlier:04}.json").read_text(encoding="utf-8")))
            progress.update(bar, completed=min(len(found), count))
            if len(found) >= count:
                return PromptSet(NAME, tuple(found)[:count])
    raise UserError(f"the target invented only {len(found)} prompts: give --prompts FILE instead")


def _before_user(tokenizer: Tokenizer) -> str:
    """What the chat template writes in front of the user's first words. Raises UserError if there is no template."""
    before, _, _ = tokenizer.render_chat([{"role": "user", "content": _PLACE}]).partition(_PLACE)
    return before


@torch.no_grad()
def _invent(target: Model, tokenizer: Tokenizer, before: list[int], seed: int) -> list[str]:
    """The prompts of one batch that came to an end."""
    torch.manual_seed(seed)
    ids = torch.tensor([before] * _BATCH, device=target.device)
    how: dict[str, Any] = {"max_new_tokens": _LONGEST, "do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    how |= {"use_cache": True, "pad_token_id": target.config.pad_token_id or 0}
    output = target.generate(ids, attention_mask=torch.ones_like(ids), **how)
    ends = end_tokens(target)
    rows = (row[: min(map(row.index, ends & set(row)))] for row in output[:, len(before) :].tolist() if ends & set(row))
    return [text for row in rows if (text := tokenizer.decode(row).strip())]


def _write(path: Path, texts: list[str]) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(texts, indent=1), encoding="utf-8")
    partial.rename(path)
