"""Loads: when requests are submitted, prompts and conversations."""

from __future__ import annotations

from itertools import pairwise

import pytest

from benchmarks.load.offered import AtTimes, Pattern, drawn_in_turn, led_by
from pipedec.core.errors import UserError
from pipedec.data import PromptSet
from pipedec.messages.request import PromptRequest


def test_a_fixed_number_is_always_unfinished() -> None:
    arrivals = Pattern(concurrency=3).arrivals(5, seed=0)
    assert arrivals.due(0.0, 0) == [0.0] * 3 and arrivals.left == 2
    assert arrivals.due(1.0, 3) == []
    assert arrivals.next_seconds() is None, "that depends on ends"
    assert arrivals.due(2.0, 2) == [2.0]
    assert arrivals.due(3.0, 0) == [3.0] and arrivals.left == 0


def test_a_rate_is_a_poisson_process_of_its_seed() -> None:
    def times(seed: int) -> list[float]:
        return Pattern(rate=4.0).arrivals(2000, seed).due(float("inf"), 0)

    ascending = times(1)
    assert ascending[0] == 0.0 and ascending == sorted(ascending) and times(1) == ascending != times(2)
    gaps = [after - before for before, after in pairwise(ascending)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 4, rel=0.1)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.04), "exponential gaps"


def test_given_times_do_not_wait_for_ends() -> None:
    arrivals = AtTimes([0.0, 0.0, 2.5])
    assert arrivals.due(0.0, 7) == [0.0, 0.0] and arrivals.next_seconds() == 2.5
    assert arrivals.due(2.4, 0) == [] and arrivals.due(3.0, 0) == [2.5] and arrivals.next_seconds() is None


def test_impossible_loads_are_refused() -> None:
    with pytest.raises(UserError, match="at least 1"):
        Pattern(concurrency=0)
    with pytest.raises(UserError, match="above 0"):
        Pattern(rate=0.0)


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
    assert ["".join(prompt.prompt_set for prompt in one) for one in drawn] == ["aa", "bb", "aa", "aa", "bb"]
    of_a = [prompt.request.prompt for one in (drawn[0], drawn[2]) for prompt in one]
    assert len(set(of_a)) == 4, "prompts that have not been asked"
    assert drawn[3:] == drawn[:2], "from the beginning, where there are no more"
    ((*said,),) = drawn_in_turn(Words(), SETS[1:], ASKED, 1, seed=0, turns=5)
    assert len({prompt.index for prompt in said}) == 3 and said[3:] == said[:2], "fewer prompts than turns"
    single = drawn_in_turn(Words(), SETS, ASKED, 4, seed=1)
    assert [len(one) for one in single] == [1] * 4 and single[0][0] == drawn[0][0]


def test_a_system_prompt_leads_the_first_turn() -> None:
    ((first, second),) = led_by("Hi: ", drawn_in_turn(Words(), SETS, ASKED, 1, seed=0, turns=2), Words())
    assert first.request.prompt.startswith("Hi: a") and first.token_ids == tuple(map(ord, first.request.prompt))
    assert not second.request.prompt.startswith("Hi")
    with pytest.raises(UserError, match="too long"):
        led_by("Much longer: ", [(first,)], Words())
