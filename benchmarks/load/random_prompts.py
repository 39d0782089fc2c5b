"""Prompts as token ids: random ones, and conversations that go on token for token."""

from __future__ import annotations

import random
from dataclasses import replace

from pipedec.bench.load.offered import Conversation
from pipedec.bench.prompts import DrawnPrompt
from pipedec.messages import PromptRequest

RANDOM = "random"  # the name of their prompt set


def random_prompts(
    tokens: int, vocabulary: int, asked: PromptRequest, count: int, seed: int, turns: int = 1
) -> list[Conversation]:
    """``count`` conversations whose prompts are ``tokens`` random tokens."""
    source = random.Random(seed)
    prompts = [DrawnPrompt(RANDOM, index, asked, random_tokens(source, tokens, vocabulary)) for index in range(count * turns)]
    return [tuple(prompts[first : first + turns]) for first in range(0, len(prompts), turns)]


def random_tokens(source: random.Random, tokens: int, vocabulary: int) -> tuple[int, ...]:
    return tuple(source.randrange(vocabulary) for _ in range(tokens))


def continued(before: DrawnPrompt, answer: tuple[int, ...], following: DrawnPrompt, bos_token_id: int | None) -> DrawnPrompt:
    """The prompt of the next turn: the whole conversation, token for token, and what the user says next."""
    says = following.token_ids[1:] if following.token_ids[:1] == (bos_token_id,) else following.token_ids
    return replace(following, token_ids=(*before.token_ids, *answer, *says))
