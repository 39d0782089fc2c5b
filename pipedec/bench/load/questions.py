"""The prompts of a load: conversations drawn from prompt sets in turn.

Knows tokenizers, but neither pipelines nor answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain, cycle, islice, zip_longest

from msgspec import structs

from pipedec.bench.prompts import DrawnPrompt, Tokenizes, draw
from pipedec.data.prompts import PromptSet
from pipedec.messages import PromptRequest

Conversation = tuple[DrawnPrompt, ...]  # what the user says at each turn, as if it were the first


def drawn_in_turn(
    prompter: Tokenizes, prompt_sets: Iterable[PromptSet], asked: PromptRequest, count: int, seed: int, turns: int = 1
) -> list[Conversation]:
    """``count`` conversations, one of each set in turn; they begin anew where the sets have fewer prompts.

    Args:
        turns: of each conversation, whose prompts follow one another in a set.

    Raises:
        UserError: as ``draw``.
    """
    sets = list(prompt_sets)
    drawn = draw(prompter, sets, asked, -(-count // len(sets)) * turns, seed)
    of_set = [_batches([prompt for prompt in drawn if prompt.prompt_set == one.name], turns) for one in sets]
    in_turn = [several for several in chain.from_iterable(zip_longest(*of_set)) if several is not None]
    return list(islice(cycle(in_turn), count))


def _batches(prompts: list[DrawnPrompt], turns: int) -> list[Conversation]:
    """Of ``turns`` prompts each; those that are left over are not used, unless there are too few for one."""
    if len(prompts) < turns:
        return [tuple(islice(cycle(prompts), turns))]
    return [tuple(prompts[first : first + turns]) for first in range(0, len(prompts) - turns + 1, turns)]


def led_by(system_prompt: str, conversations: Iterable[Conversation], prompter: Tokenizes) -> list[Conversation]:
    """With a text before the first prompt of each conversation.

    Raises:
        UserError: one no longer fits.
    """
    return [(_led_by(system_prompt, first, prompter), *others) for first, *others in conversations]


def _led_by(system_prompt: str, drawn: DrawnPrompt, prompter: Tokenizes) -> DrawnPrompt:
    request = structs.replace(drawn.request, prompt=f"{system_prompt}{drawn.request.prompt}")
    return replace(drawn, request=request, token_ids=prompter.token_ids(request.prompt, request.raw, request.sampling.max_tokens))


def continued_text(before: DrawnPrompt, answer: str, following: DrawnPrompt) -> DrawnPrompt:
    """The prompt of the next turn: the whole conversation as text, and what the user says next."""
    text = f"{before.request.prompt}{answer}\n{following.request.prompt}"
    return replace(following, request=structs.replace(following.request, prompt=text))
