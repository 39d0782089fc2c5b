"""An answer that was cut anywhere goes on as if it had not been; what it said before is computed again or still there."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lane_scripts import Script, assert_close, chunks_of, run
from lane_targets import CUT, MODELS, SLOTS, Target, save_target, scripts
from support.examples import examples
from support.slot_books import SlotAllocator

from pipedec.stage import StageWorker


@pytest.fixture(scope="module", params=MODELS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return save_target(request.param, tmp_path_factory.mktemp("target"))


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


@examples(80)
@given(
    arguments=scripts(), patience=st.integers(2, 20), block=st.sampled_from([2, 3, 16]), share=st.floats(0, 1),
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=3), seed=st.integers(0, 99),
)  # fmt: skip
def test_an_answer_that_was_cut_goes_on_as_if_it_had_not_been(
    target: Target, arguments: dict[str, Any], patience: int, block: int, share: float, sizes: list[int], seed: int
) -> None:
    arguments |= {"has_threads": False, "patience": 500, "arrival": 0}
    uncut, workers = Script(0, **arguments), target.workers(CUT, torch.float64, block)
    run(target.workers(CUT, torch.float64, block), [uncut])
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
