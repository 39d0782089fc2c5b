"""Sets of prompts to learn from: token ids, with some prompts of each set held out to measure on.

Owns how prompt files become token ids and which prompts are held out. Knows neither models nor training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from dataclasses import dataclass

from pipedec.core import UserError
from pipedec.data.prompts import PromptSet, PromptSource
from pipedec.text.prompt import Prompter

_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class SplitPrompts:
    """Token ids of the prompts of one set: to learn from, and held out."""

    training: list[list[int]]
    held_out: list[list[int]]


def file_prompts(
    prompter: Prompter,
    sources: tuple[PromptSource, ...],
    new_tokens: int,
    max_prompts: int | None = None,
    taken: Container[str] = (),
) -> dict[str, SplitPrompts]:
    """The prompts of files, through the chat template, by set.

    Args:
        new_tokens: maximum number of tokens of an answer.
        max_prompts: maximum number of prompts of each set; None = all.
        taken: names that no set may have.

    Raises:
        UserError: a prompt file is unsound, two sets have one name, or no prompt of a set fits the target's context.
    """
    found: dict[str, SplitPrompts] = {}
    for source in sources:
        if source.name in found or source.name in taken:
            raise UserError(f"two sets of prompts are called {source.name}: name one of them, --prompts NAME={source.path}")
        found[source.name] = split(_prompt_ids(prompter, source.read(), new_tokens, max_prompts))
    return found


def split(prompts: list[list[int]]) -> SplitPrompts:
    """Holds out one prompt in twenty (at least one of several), the same whatever their order."""
    shuffled = sorted(prompts, key=lambda ids: hashlib.sha256(str(ids).encode()).digest())
    num_held_out = max(len(prompts) // _HELD_OUT_ONE_IN, int(len(prompts) > 1))
    return SplitPrompts(shuffled[num_held_out:], shuffled[:num_held_out])


def _prompt_ids(prompter: Prompter, prompts: PromptSet, new_tokens: int, max_prompts: int | None) -> list[list[int]]:
    """Token ids of the prompts that fit the context; ``max_prompts`` of them, drawn with a fixed seed."""
    found: list[list[int]] = []
    for number in prompts.shuffled():
        if max_prompts is not None and len(found) == max_prompts:
            break
        try:
            found.append(list(prompter.token_ids(prompts.prompts[number], raw=False, max_tokens=new_tokens)))
        except UserError:
            continue
    if not found:
        raise UserError(f"no prompt of {prompts.name} fits into the target's context: use shorter ones")
    return found
