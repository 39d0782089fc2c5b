"""Sets of prompts to learn from: token ids, with some prompts of each set held out to measure on.

Owns how prompt files become token ids and which prompts are held out. Knows neither models nor training.
"""

from __future__ import annotations

import hashlib
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass

from pipedec.core import UserError
from pipedec.data import PromptSource
from pipedec.text.prompt import Prompter

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
        new_tokens: maximum number of tokens of an answer.
        max_prompts: maximum number of prompts of each set; None = all.
        taken: names that no set may have.

    Raises:
        UserError: a prompt file is unsound, two sets have one name, or no prompt of a set fits the target's context.
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
