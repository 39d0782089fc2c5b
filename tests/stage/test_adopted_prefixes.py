"""A request that adopts a prefix is computed as it is alone, whatever becomes of the request that the prefix came from."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lane_scripts import Script, assert_close, chunks_of, run
from lane_targets import CUT, SLOTS, Target, save_target, scripts
from support.examples import examples
from support.slot_books import SlotAllocator
from support.toy_dialects import TEXTS

from pipedec.core import NewRequest, RequestUpdate, SamplingParams, SlotRuns, StageMessage, Step, Verdict
from pipedec.stage import StageWorker

OWNED = 96  # slots of the owner


@pytest.fixture(scope="module", params=["llama", "window"])
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(request.param, tmp_path_factory.mktemp("target"))


def adopters() -> st.SearchStrategy[dict[str, Any]]:
    """What an adopter does, and of what: when it opens, and the share of what is known then."""
    return st.fixed_dictionaries(
        {
            "arguments": scripts(), "opens": st.integers(1, 30), "share": st.floats(0, 1),
            "own": st.lists(st.integers(0, len(TEXTS) - 1), min_size=1, max_size=7),
            "sizes": st.lists(st.integers(1, 6), min_size=1, max_size=3),
        }
    )  # fmt: skip


def script_of(number: int, owner: Script, owned: SlotRuns, adopts: bool, drawn: dict[str, Any]) -> Script:
    """A request that begins like the owner, whose slots it adopts or not. ``owner`` has come to its end in another run."""
    end, opens, block = len(owner.known) - 1, drawn["opens"], owned[0][1]
    known = owner.known[min(opens, end) if opens >= end else opens - 1]  # chunks count from the next timestep on
    cached = int(drawn["share"] * known)
    prompt = (*owner.prompt, *owner.answer)[:cached] + tuple(drawn["own"])
    shared = cached // block * block
    cached = cached if opens >= end else shared  # parts of blocks are copied of requests that have ended
    copied = (owned[shared // block][0], cached - shared) if cached > shared else (0, 0)
    settings = {**drawn["arguments"], "arrival": opens, "patience": 500, "has_threads": False, "prompt": prompt}
    if not adopts:
        return Script(number, **{**settings, "chunks": chunks_of(len(prompt), drawn["sizes"])})
    settings |= {"chunks": chunks_of(len(prompt) - cached, drawn["sizes"]), "slots": owned[: shared // block]}
    return Script(number, **settings, cached=cached, copied=copied)


@examples(80)
@given(
    arguments=scripts(), patience=st.integers(1, 25), reason=st.sampled_from(["cancelled", "paused"]),
    drawn=st.lists(adopters(), min_size=1, max_size=3), block=st.sampled_from([1, 3, 8]), seed=st.integers(0, 99),
)  # fmt: skip
def test_a_request_with_an_adopted_prefix_is_computed_as_it_is_alone(
    target: Target, arguments: dict[str, Any], patience: int, reason: str, drawn: list[dict[str, Any]], block: int, seed: int
) -> None:
    arguments |= {"has_threads": False, "arrival": 0, "patience": patience, "reason": reason}
    alone = Script(0, **arguments)
    run(target.workers(CUT, torch.float64, block), [alone])
    allocator = SlotAllocator(SLOTS, block, random.Random(seed), keeps=True)
    owned = allocator.take(0, OWNED)
    owner = Script(0, **arguments, slots=owned)
    adopting = [script_of(number, alone, owned, True, one) for number, one in enumerate(drawn, start=1)]
    run(target.workers(CUT, torch.float64, block), [owner, *adopting], allocator)
    assert owner.verdicts == alone.verdicts
    for script, one in zip(adopting, drawn, strict=True):
        apart = script_of(script.number, alone, owned, False, one)
        run(target.workers(CUT, torch.float64, block), [apart])
        assert script.verdicts == apart.verdicts
        assert_close(script.logprobs, apart.logprobs)


def test_an_opening_finds_what_a_verdict_of_the_same_envelope_moves_and_may_have_slots_that_it_frees(target: Target) -> None:
    """The accepted rows lie behind others, and the adopter's own slots were the owner's."""
    prompt, sampling = (4, 9, 6), SamplingParams(max_tokens=9, logprobs=2)
    [plain], [worker] = (target.workers([range(3)], torch.float64, 2) for _ in range(2))
    answer = prefilled(plain, 0, NewRequest(3, sampling, slots=((0, 20),)), prompt)
    for _ in range(4):
        [result] = plain.advance(
            StageMessage((RequestUpdate(0, verdict=answer[-1].verdict, step=rows((token_of(answer[-1]), -1))),))
        ).updates
        answer.append(result)
    first, second, third, fourth, _ = map(token_of, answer)
    prefilled(worker, 0, NewRequest(3, sampling, slots=((4, 2), (0, 2), (8, 6))), prompt)
    wrong = [token for token in range(9) if token not in (second, third, fourth)]
    steps = rows((first, -1), (wrong[0], 0), (wrong[1], 0), (second, 0), (wrong[0], 3), (third, 3))
    [result] = worker.advance(StageMessage((RequestUpdate(0, verdict=Verdict.of(first), step=steps),))).updates
    assert result.verdict == Verdict.of(second, third, fourth)
    opening = NewRequest(7, sampling, slots=((4, 2), (0, 2), (10, 2), (14, 4)), cached=6, copied=(8, 2))
    adopting = RequestUpdate(1, opening, step=rows((fourth, -1)))
    ended = RequestUpdate(0, verdict=Verdict.of(second, third, fourth, finished="paused"))
    closed, found = worker.advance(StageMessage((adopting, ended))).updates
    assert closed == RequestUpdate(0, verdict=Verdict((), "paused"))
    assert found.verdict == answer[4].verdict
    assert_close(found.logprobs, answer[4].logprobs)


def prefilled(worker: StageWorker, number: int, opening: NewRequest, prompt: tuple[int, ...]) -> list[RequestUpdate]:
    return list(
        worker.advance(StageMessage((RequestUpdate(number, opening, step=rows(*((token, -1) for token in prompt))),))).updates
    )


def rows(*pairs: tuple[int, int]) -> Step:
    """A step from (token, parent)."""
    token_ids, parents = zip(*pairs, strict=True)
    return Step(torch.tensor(token_ids), torch.tensor(parents))


def token_of(result: RequestUpdate) -> int:
    assert result.verdict is not None
    return result.verdict.tokens[0]
