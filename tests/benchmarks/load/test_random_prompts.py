"""Prompts as token ids: how conversations go on, and random ones."""

from __future__ import annotations

import pytest

from benchmarks.load.replayed import continued, random_prompts
from pipedec.bench.options import DrawnPrompt
from pipedec.messages import PromptRequest

ASKED = PromptRequest("", raw=True)


@pytest.mark.parametrize(("bos", "expected"), [(7, (7, 1, 2, 5, 6, 3)), (None, (7, 1, 2, 5, 6, 7, 3))])
def test_the_next_turn_continues_the_conversation(bos: int | None, expected: tuple[int, ...]) -> None:
    before, following = (DrawnPrompt("a", index, ASKED, ids) for index, ids in enumerate(((7, 1, 2), (7, 3))))
    found = continued(before, (5, 6), following, bos)
    assert found.token_ids == expected and found.index == 1


def test_random_conversations_have_fresh_tokens() -> None:
    one, other = random_prompts(4, 100, ASKED, 2, seed=3, turns=2)
    assert len({prompt.token_ids for prompt in (*one, *other)}) == 4 == len(one[1].token_ids)
