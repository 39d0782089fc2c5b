"""Shared by the configurations of several benchmarks: annotated types, and the choice of prompts.

Prompts are chosen from each set by a seed, so that all benchmarks with that seed use the same ones.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Protocol

from msgspec import Meta
from msgspec.structs import replace

from pipedec.core.errors import UserError
from pipedec.data import PromptSet
from pipedec.flags import Help
from pipedec.messages.request import PromptRequest

Positive = Annotated[int, Meta(ge=1)]
Counts = Annotated[tuple[Positive, ...], Meta(min_length=1)]

ClusterFile = Annotated[Path | None, Help("A cluster.yaml whose partitions are the presets (default: the paper's).", "FILE")]
Target = Annotated[Path | None, Help("Target checkpoint directory (default: the shipped pair's).", "DIR")]
Draft = Annotated[str | None, Help("Draft checkpoint directory, or none.", "DIR|none")]

Priors = Annotated[
    bool,
    Help(
        "Begin with what was learned before: of emulated devices in training, else also in earlier runs. Or begin with nothing.",
        flag="--priors/--no-priors",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Which prompts are answered (``samples`` of those that fit into the context), and what counts as their time."""

    samples: Annotated[Positive, Help("Number of prompts chosen from each set.")] = 10
    seed: Annotated[int, Help("Seed for choosing prompts and for sampling.")] = 0
    raw_prompts: Annotated[bool, Help("Do not apply the model's chat template.", flag="--raw-prompt")] = False
    own_work: Annotated[
        bool, Help("Count rank 0's own work in computed times, as measured on this machine.", flag="--own-work/--no-own-work")
    ] = True


class Tokenizes(Protocol):
    """``Prompter``, or a wrapper that formats prompts differently."""

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int) -> tuple[int, ...]: ...


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
