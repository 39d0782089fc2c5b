"""A request that adopts a prefix is computed as it is alone, whatever becomes of the request that the prefix came from; and an
answer that was cut anywhere goes on as if it had not been, whether what it said before is still there or computed again.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lane_scripts import Script, assert_close, chunks_of, run
from lane_targets import SLOTS, Target, scripts
from support.examples import examples
from support.slot_books import SlotAllocator
from support.toy_dialects import TEXTS

from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import NewRequest, RequestUpdate, SlotRuns, StageMessage, Step
from pipedec.core.verdict import Verdict
from pipedec.stage import StageWorker

OWNED = 96  # slots of the owner


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


@pytest.mark.in_turn(2)
@pytest.mark.parametrize("target", ["llama", "window"], indirect=True)
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
    run(target.workers(block), [alone])
    allocator = SlotAllocator(SLOTS, block, random.Random(seed), keeps=True)
    owned = allocator.take(0, OWNED)
    owner = Script(0, **arguments, slots=owned)
    adopting = [script_of(number, alone, owned, True, one) for number, one in enumerate(drawn, start=1)]
    run(target.workers(block), [owner, *adopting], allocator)
    assert owner.verdicts == alone.verdicts
    for script, one in zip(adopting, drawn, strict=True):
        apart = script_of(script.number, alone, owned, False, one)
        run(target.workers(block), [apart])
        assert script.verdicts == apart.verdicts
        assert_close(script.logprobs, apart.logprobs)


@pytest.mark.parametrize("target", ["llama"], indirect=True)
def test_an_opening_finds_what_a_verdict_of_the_same_message_moves_and_may_have_slots_that_it_frees(target: Target) -> None:
    """The accepted rows lie behind others, and the adopter's own slots were the owner's."""
    prompt, sampling = (4, 9, 6), SamplingParams(max_tokens=9, logprobs=2)
    [plain], [worker] = (target.workers(2, [range(3)]) for _ in range(2))
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


def forecasts_of(script: Script) -> dict[int, object]:
    """By the number of tokens said: the forecast of the verdict that ends there."""
    found, said = dict[int, object](), len(script.said)
    for verdict in script.verdicts:
        said += len(verdict.tokens)
        if verdict.accepted and verdict.finished is None:
            found[said] = verdict.accepted[0].forecast
    return found


def paused(workers: list[StageWorker], arguments: dict[str, Any], patience: int, allocator: SlotAllocator) -> Script:
    """An answer that was paused after so many timesteps, or was complete before."""
    script = Script(0, **{**arguments, "patience": patience, "reason": "paused"})
    run(workers, [script], allocator)
    return script


def resumed(cut: Script, allocator: SlotAllocator, arguments: dict[str, Any], cached: int, sizes: list[int]) -> Script:
    """The rest of an answer of which the first ``cached`` tokens are adopted: whole blocks are shared, the others copied."""
    block, prompt = allocator.block, cut.prompt or ()
    shared, prefill = cached // block * block, len(prompt) + len(cut.answer)
    copied = (allocator.runs(0, cached)[-1][0], cached - shared) if cached > shared else (0, 0)
    settings = {**arguments, "prompt": prompt, "chunks": chunks_of(prefill - cached, sizes), "seed": arguments["seed"] + 1}
    return Script(1, **settings, said=cut.answer, slots=allocator.runs(0, shared), cached=cached, copied=copied)


@pytest.mark.in_turn(3)
@examples(80)
@given(
    arguments=scripts(), patience=st.integers(2, 20), block=st.sampled_from([2, 3, 16]), share=st.floats(0, 1),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=st.integers(0, 99),
)  # fmt: skip
def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(
    target: Target, arguments: dict[str, Any], patience: int, block: int, share: float, sizes: list[int], seed: int
) -> None:
    arguments |= {"has_threads": False, "patience": 500, "arrival": 0}
    uncut, workers = Script(0, **arguments), target.workers(block)
    run(target.workers(block), [uncut])
    allocator = SlotAllocator(SLOTS, block, random.Random(seed), keeps=True)
    cut = paused(workers, arguments, patience, allocator)
    assert cut.answer == uncut.answer[: len(cut.answer)]
    if cut.verdicts[-1].finished != "paused":
        return
    known = len(cut.prompt or ()) + len(cut.answer) - 1 if cut.answer else 0
    rest = resumed(cut, allocator, arguments, int(share * known), sizes)
    run(workers, [rest], allocator)
    assert rest.answer == uncut.answer
    assert rest.verdicts[-1].finished == uncut.verdicts[-1].finished
    assert_close(rest.logprobs, uncut.logprobs[len(cut.answer) :])
    first, expected = len(cut.answer) + 1, forecasts_of(uncut)
    assert first not in expected or forecasts_of(rest)[first] == expected[first]
