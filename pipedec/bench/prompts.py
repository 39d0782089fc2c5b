"""The prompts of a benchmark: chosen from each set by a seed, so that all benchmarks with that seed use the same ones."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from pipedec.bench.record import key_of, write_json
from pipedec.core import SamplingParams, UserError
from pipedec.data import PromptSet
from pipedec.messages import PromptRequest


class Tokenizes(Protocol):
    """``Prompter``, or a wrapper that formats prompts differently."""

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int) -> tuple[int, ...]: ...


class AskedPrompts:
    """Stands for a tokenizer that only a cluster has: asks the cluster whether a prompt fits. Its token ids remain unknown, ().

    Args:
        accept: raises UserError if the cluster refuses a request.
        path: a JSON file that keeps the cluster's replies, so that it is asked once about each prompt.
        cluster: distinguishes clusters in the file.
    """

    def __init__(self, accept: Callable[[PromptRequest], None], path: Path, cluster: str) -> None:
        self._accept = accept
        self._path = path
        self._cluster = cluster

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int) -> tuple[int, ...]:
        """Raises UserError if the prompt and ``max_tokens`` do not fit."""
        key = key_of([self._cluster, prompt, raw, max_tokens])
        refusals: dict[str, str | None] = json.loads(self._path.read_text()) if self._path.is_file() else {}
        if key not in refusals:
            refusals[key] = None
            try:
                self._accept(PromptRequest(prompt, raw, "pp", SamplingParams(max_tokens=max_tokens)))
            except UserError as error:
                refusals[key] = str(error)
            write_json(self._path, refusals)
        if (refusal := refusals[key]) is not None:
            raise UserError(refusal)
        return ()


@dataclass(frozen=True)
class DrawnPrompt:
    """One prompt of a set; ``index`` is its number in the set's file, ``token_ids`` is () if only the cluster knows them."""

    prompt_set: str
    index: int
    request: PromptRequest
    token_ids: tuple[int, ...]


def draw(
    prompter: Tokenizes, prompt_sets: Iterable[PromptSet], asked: PromptRequest, samples: int, seed: int
) -> list[DrawnPrompt]:
    """From each set the first ``samples`` prompts, in the order of the seed, that fit into the target's context.

    ``asked`` is the request of every prompt; its own prompt is replaced. Raises UserError if no prompt of a set fits.
    """
    drawn: list[DrawnPrompt] = []
    for prompt_set in prompt_sets:
        fitting: list[DrawnPrompt] = []
        refusal = ""
        for index in prompt_set.shuffled(seed):
            request = replace(asked, prompt=prompt_set.prompts[index])
            try:
                token_ids = prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens)
            except UserError as error:
                refusal = str(error)
                continue
            fitting.append(DrawnPrompt(prompt_set.name, index, request, token_ids))
            if len(fitting) == samples:
                break
        if not fitting:
            raise UserError(f"no prompt of {prompt_set.name} fits: {refusal}")
        drawn += fitting
    return drawn
