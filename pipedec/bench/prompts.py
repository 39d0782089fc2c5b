"""The prompts of a benchmark: chosen from each set by a seed, so that all benchmarks with that seed use the same ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

from pipedec.core import UserError
from pipedec.data.prompts import PromptSet
from pipedec.messages import PromptRequest


class Tokenizes(Protocol):
    """``Prompter``, or a wrapper that formats prompts differently."""

    def token_ids(self, prompt: str, raw: bool, max_tokens: int) -> tuple[int, ...]: ...


@dataclass(frozen=True)
class DrawnPrompt:
    """One prompt of a set; ``index`` is its number in the set's file."""

    prompt_set: str
    index: int
    request: PromptRequest
    token_ids: tuple[int, ...]


def draw(
    prompter: Tokenizes, prompt_sets: Iterable[PromptSet], asked: PromptRequest, samples: int, seed: int
) -> list[DrawnPrompt]:
    """From each set the first ``samples`` prompts, in the order of the seed, that fit into the target's context.

    Args:
        asked: the request of every prompt; its own prompt is replaced.

    Raises:
        UserError: no prompt of a set fits.
    """
    drawn: list[DrawnPrompt] = []
    for prompt_set in prompt_sets:
        fitting = list(islice(_fitting(prompter, prompt_set, asked, seed), samples))
        if not fitting:
            raise UserError(f"no prompt of {prompt_set.name} fits into the target's context: use shorter ones")
        drawn += fitting
    return drawn


def _fitting(prompter: Tokenizes, prompt_set: PromptSet, asked: PromptRequest, seed: int) -> Iterator[DrawnPrompt]:
    for index in prompt_set.shuffled(seed):
        request = replace(asked, prompt=prompt_set.prompts[index])
        try:
            token_ids = prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens)
        except UserError:
            continue
        yield DrawnPrompt(prompt_set.name, index, request, token_ids)
