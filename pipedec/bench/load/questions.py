"""The prompts of a load: drawn from prompt sets in turn, or made up of random tokens."""

from __future__ import annotations

import random
from collections.abc import Iterable
from itertools import chain, cycle, islice, zip_longest
from math import ceil

from pipedec.bench.prompts import DrawnPrompt, Tokenizes, draw
from pipedec.data.prompts import PromptSet
from pipedec.messages import PromptRequest

RANDOM = "random"


def drawn_in_turn(
    prompter: Tokenizes, prompt_sets: Iterable[PromptSet], asked: PromptRequest, count: int, seed: int
) -> list[DrawnPrompt]:
    """``count`` prompts, one of each set in turn; they begin anew where the sets have fewer. Raises UserError as ``draw``."""
    sets = list(prompt_sets)
    drawn = draw(prompter, sets, asked, ceil(count / len(sets)), seed)
    of_set = [[prompt for prompt in drawn if prompt.prompt_set == one.name] for one in sets]
    in_turn = [prompt for prompt in chain.from_iterable(zip_longest(*of_set)) if prompt is not None]
    return list(islice(cycle(in_turn), count))


def random_prompts(tokens: int, vocabulary: int, asked: PromptRequest, count: int, seed: int) -> list[DrawnPrompt]:
    """``count`` prompts of ``tokens`` random tokens."""
    source = random.Random(seed)
    return [DrawnPrompt(RANDOM, index, asked, random_tokens(source, tokens, vocabulary)) for index in range(count)]


def random_tokens(source: random.Random, tokens: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(source.randrange(vocabulary) for _ in range(tokens))
