"""Whose prompts a load offers, and how conversations go on."""

from __future__ import annotations

import pytest

from pipedec.bench.load.questions import continued_text, drawn_in_turn, led_by
from pipedec.core import UserError
from pipedec.data.prompts import PromptSet
from pipedec.messages import PromptRequest

ASKED = PromptRequest("", raw=True)
SETS = [PromptSet("a", tuple(f"a{n}" for n in range(5))), PromptSet("b", ("b0", "b1", "b2"))]


class Words:
    """A tokenizer of characters that takes ten of them."""

    def token_ids(self, prompt: str | tuple[int, ...], raw: bool, max_tokens: int) -> tuple[int, ...]:
        if len(prompt) > 10:
            raise UserError("too long")
        return tuple(map(ord, prompt))


def test_sets_take_turns_and_conversations_stay_in_their_set() -> None:
    drawn = drawn_in_turn(Words(), SETS, ASKED, 5, seed=1, turns=2)
    assert [[prompt.prompt_set for prompt in one] for one in drawn] == [
        ["a", "a"],
        ["b", "b"],
        ["a", "a"],
        ["a", "a"],
        ["b", "b"],
    ]
    of_a = [prompt.request.prompt for one in (drawn[0], drawn[2]) for prompt in one]
    assert len(set(of_a)) == 4, "prompts that have not been asked"
    assert drawn[3:] == drawn[:2], "from the beginning, where there are no more"
    single = drawn_in_turn(Words(), SETS, ASKED, 4, seed=1)
    assert [len(one) for one in single] == [1] * 4 and single[0][0] == drawn[0][0]


def test_a_set_with_fewer_prompts_than_turns_repeats_them() -> None:
    ((*said,),) = drawn_in_turn(Words(), SETS[1:], ASKED, 1, seed=0, turns=5)
    assert len({prompt.index for prompt in said}) == 3 and said[3:] == said[:2]


def test_a_system_prompt_leads_the_first_turn() -> None:
    ((first, second),) = led_by("Hi: ", drawn_in_turn(Words(), SETS, ASKED, 1, seed=0, turns=2), Words())
    assert first.request.prompt.startswith("Hi: a") and first.token_ids == tuple(map(ord, first.request.prompt))
    assert not second.request.prompt.startswith("Hi")
    with pytest.raises(UserError, match="too long"):
        led_by("Much longer: ", [(first,)], Words())


def test_as_text_it_goes_on_in_a_new_line() -> None:
    ((one, other),) = drawn_in_turn(Words(), SETS[1:], ASKED, 1, seed=0, turns=2)
    assert continued_text(one, " yes.", other).request.prompt == f"{one.request.prompt} yes.\n{other.request.prompt}"
