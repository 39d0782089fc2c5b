"""Figures of the load on recorded answers: conversations, memory, and the cost of an intruder."""

from __future__ import annotations

import pytest

from benchmarks.load.replayed import continued, disturbance, kv_use, random_prompts
from benchmarks.load.results import LoadOutcome, ServedRequest
from pipedec.bench.options import DrawnPrompt
from pipedec.messages.request import PromptRequest

ASKED = PromptRequest("", raw=True)


def served(submitted: float, *events: tuple[float, int]) -> ServedRequest:
    return ServedRequest("set", 0, 5, submitted, events, events[-1][0])


def test_an_intruder_is_judged_by_what_the_others_take_meanwhile() -> None:
    alone = LoadOutcome((served(0.0, (1.0, 1), (2.0, 2), (3.0, 2)), served(0.0, (1.0, 1), (3.0, 1))))
    late = served(1.0, (3.0, 1))
    disturbed = LoadOutcome((served(0.0, (1.0, 1), (3.0, 2)), served(0.0, (1.0, 1), (3.5, 1)), late))
    found = disturbance(alone, disturbed)
    assert found["tpot_without_ms"] == 1000 * (2 / 4 + 2 / 1) / 2, "two seconds, four tokens and one"
    assert found["tpot_ms"] == 1000 * (2 / 2 + 2.5 / 1) / 2, "the token that ends the window's last wait counts, with its wait"
    assert (found["ttft_ms"], found["prompt_tokens"]) == (2000, 5)


def test_memory_is_that_of_running_requests() -> None:
    assert kv_use([16, 48, 32], 64, 10) == {
        "capacity_slots": 64, "peak_slots": 48, "peak_bytes": 480, "peak_utilisation": 0.75, "mean_utilisation": 0.5,
    }  # fmt: skip
    assert kv_use([], 64, 10)["peak_slots"] == 0


@pytest.mark.parametrize(("bos", "expected"), [(7, (7, 1, 2, 5, 6, 3)), (None, (7, 1, 2, 5, 6, 7, 3))])
def test_the_next_turn_continues_the_conversation(bos: int | None, expected: tuple[int, ...]) -> None:
    before, following = (DrawnPrompt("a", index, ASKED, ids) for index, ids in enumerate(((7, 1, 2), (7, 3))))
    found = continued(before, (5, 6), following, bos)
    assert found.token_ids == expected and found.index == 1


def test_random_conversations_have_fresh_tokens() -> None:
    one, other = random_prompts(4, 100, ASKED, 2, seed=3, turns=2)
    assert len({prompt.token_ids for prompt in (*one, *other)}) == 4 == len(one[1].token_ids)
