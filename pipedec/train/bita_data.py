"""What BiTA learns from: prompts of files and of the standard library, and the target's own greedy answers to them.

Owns which prompts are held out. Knows neither masks nor training.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from pipedec.core import UserError
from pipedec.data.prompts import PromptSet, PromptSource
from pipedec.text.prompt import Prompter
from pipedec.train import corpus
from pipedec.train.bita_rows import places_of
from pipedec.train.continuations import Continuation, Model, continue_greedily
from pipedec.train.draft import DraftRecipe, by_family, speak

_HELD_OUT_ONE_IN = 20


@dataclass(frozen=True)
class Sources:
    """Where prompts come from.

    Attributes:
        files: prompt files; each is a set by its name.
        library: also the prompts that ``train draft`` makes of the standard library and of ``problems``.
        problems: word problems in the GSM8K layout, or None.
        max_prompts: at most so many of each set and family; None for all.
    """

    files: tuple[PromptSource, ...] = ()
    library: bool = False
    problems: Path | None = None
    max_prompts: int | None = None


@dataclass(frozen=True)
class Samples:
    """Prompts with the target's answers, by set or family: to learn from, and held out."""

    training: dict[str, list[Continuation]]
    held_out: dict[str, list[Continuation]]

    @property
    def longest(self) -> int:
        """Tokens of the longest sample."""
        everything = [*self.training.values(), *self.held_out.values()]
        return max(len(sample.ids) for samples in everything for sample in samples)

    def digest(self) -> str:
        """A name for the samples to learn from."""
        total = hashlib.sha256()
        for name, samples in self.training.items():
            total.update(f"{name} {[(sample.ids, sample.prompt_length) for sample in samples]}".encode())
        return total.hexdigest()[:16]


def gather(target: Model, prompter: Prompter, sources: Sources, new_tokens: int, max_length: int, work: Path) -> Samples:
    """The samples of all sources. ``work`` keeps the answers, so that a second run does not ask again.

    Args:
        new_tokens: tokens of an answer, at most.
        max_length: longer samples are left out, and so are answers of fewer than two tokens, behind which no mask has a label.

    Raises:
        UserError: a prompt file is unsound, two sets have one name, no prompt of a set fits the target's context, the
            library's prompts are not in its words, or nothing is left to learn from.
    """
    if sources.library and corpus.ASSISTANT not in prompter.tokenizer.get_vocab():
        raise UserError(f"--library has prompts for tokenizers that know {corpus.ASSISTANT}, not this one: give --prompts FILE")
    asked: dict[str, tuple[list[list[int]], list[list[int]]]] = {}
    for source in sources.files:
        if source.name in asked or (sources.library and source.name in DraftRecipe().num_prompts):
            raise UserError(f"two sets of prompts are called {source.name}: name one of them, --prompts NAME={source.path}")
        asked[source.name] = split(prompt_ids(prompter, source.read(), new_tokens, sources.max_prompts))
    training, held_out = _library(target, prompter, sources, new_tokens, work) if sources.library else ({}, {})
    for name, parts in asked.items():
        for said, store, prompts in zip((training, held_out), ("continuations", "held-out"), parts, strict=True):
            said[name] = continue_greedily(target, prompts, new_tokens, work / store / name)
    samples = Samples(*({name: usable(found, max_length) for name, found in part.items()} for part in (training, held_out)))
    if not any(samples.training.values()):
        raise UserError("nothing to learn from: every answer is shorter than two tokens, or every sample too long")
    return samples


def prompt_ids(prompter: Prompter, prompts: PromptSet, new_tokens: int, max_prompts: int | None) -> list[list[int]]:
    """Token ids of the set's prompts that fit the context, through the chat template; ``max_prompts`` of them, drawn by a seed.

    Raises:
        UserError: none fits.
    """
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


def split(prompts: list[list[int]]) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts to learn from, and one in twenty to measure on (at least one of several), whatever order they come in."""
    shuffled = sorted(prompts, key=lambda ids: hashlib.sha256(str(ids).encode()).digest())
    num_held_out = max(len(prompts) // _HELD_OUT_ONE_IN, int(len(prompts) > 1))
    return shuffled[num_held_out:], shuffled[:num_held_out]


def usable(samples: list[Continuation], max_length: int) -> list[Continuation]:
    """Those of at most ``max_length`` tokens behind which a mask has a label."""
    return [sample for sample in samples if len(sample.ids) <= max_length and len(places_of(sample))]


def _library(
    target: Model, prompter: Prompter, sources: Sources, new_tokens: int, work: Path
) -> tuple[dict[str, list[Continuation]], dict[str, list[Continuation]]]:
    """The prompts of ``train draft``, and answers to them: to learn from, and held out."""
    documents = [*corpus.library_documents(), *corpus.topic_documents()]
    if sources.problems is not None:
        documents += corpus.word_problem_documents(sources.problems)
    usual = DraftRecipe()
    recipe = DraftRecipe(new_tokens=new_tokens, long_length=min(usual.long_length, target.config.max_position_embeddings))
    most = sources.max_prompts if sources.max_prompts is not None else max(recipe.num_prompts.values())
    training = {family: min(count, most) for family, count in recipe.num_prompts.items()}
    held_out = dict.fromkeys(training, min(recipe.num_held_out_prompts, most))
    return (
        speak(target, prompter.tokenizer, by_family(documents, held_out=False), training, recipe, work / "continuations"),
        speak(target, prompter.tokenizer, by_family(documents, held_out=True), held_out, recipe, work / "held-out"),
    )
