"""What a structure forces enters with the row that it follows, by every method, and nothing enters that is not allowed."""

from __future__ import annotations

import random

import pytest
from support.drafters import PROMPT, Alone, ScriptedDrafter, rows
from support.simulation import KnowingDrafter, scheduler_of
from support.toy_structures import ToyStructure

from pipedec.core.request import MethodOptions, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.core.stage_message import Step
from pipedec.core.verdict import Verdict
from pipedec.decoding.forced import MAX_FORCED
from pipedec.methods import PROPOSERS, BestFirstOptions, BitaOptions, PipeDecOptions, StaticTreeOptions
from pipedec.threads import Sequence
from pipedec.tree import PredictionTree

VOCABULARY = range(40)
EVERY_METHOD: list[tuple[str, MethodOptions | None]] = [
    ("pp", None), ("pipedec", PipeDecOptions(64, 4)), ("stpp", StaticTreeOptions(64, 4, 2)), ("pipedec-bestfirst", None),
    ("stpp", StaticTreeOptions(8, 4, 2, rows=4)), ("pipedec-bestfirst", BestFirstOptions(width=48)),
    ("pipedec-bestfirst", BestFirstOptions(proposers=("ngrams",))), ("bita", BitaOptions(depth=2)),
    ("stpp", StaticTreeOptions(children=4, depth=3, rows=8, proposers=PROPOSERS)),
    *[("bita", BitaOptions(depth=2, shape=shape)) for shape in ("straightforward", "efficient", "full")],
]  # fmt: skip


def counting(said: tuple[int, ...]) -> frozenset[int]:
    """After 10 comes 11, and so on up to 15, which ends the choice that there was."""
    last = said[-1] if said else 9
    return frozenset({last + 1} if last % 10 < 5 and said else {10, 20, 30})


def asked(method: str, options: MethodOptions | None, grammar: ToyStructure, drafter: KnowingDrafter | None = None) -> Alone:
    """An answer with a structure whose prompt has entered."""
    request = TokenizedRequest(0, PROMPT, SamplingParams(max_tokens=10_000), method, options)
    scheduler = scheduler_of(2, drafter or ScriptedDrafter({}), trained_masks=2, knee=512)
    return Alone(scheduler, request, Sequence(len(PROMPT), (), 10_000, grammar))  # type: ignore[arg-type]


def stepped(alone: Alone) -> Step | None:
    """What enters once the draft model has done its work, as in ``stpp``, where it works first."""
    step = alone.propose()
    alone.draft()
    return alone.propose() if step is None else step


@pytest.mark.parametrize(("method", "options"), EVERY_METHOD)
def test_what_is_forced_behind_the_root_enters_with_it(method: str, options: MethodOptions | None) -> None:
    drafter = KnowingDrafter(random.Random(1))
    drafter.answers[0] = []
    alone = asked(method, options, ToyStructure(counting), drafter)
    forecast = ((7, 8), (14, 9)) if method == "bita" else ()
    alone.apply(Verdict.of(10, forecast=forecast))
    entered = rows(stepped(alone))
    assert entered[:6] == [(10, -1), (11, 0), (12, 1), (13, 2), (14, 3), (15, 4)]
    assert {token for token, parent in entered[6:] if token >= 0 and parent == 5} <= {10, 20, 30}
    alone.apply(Verdict.of(11, 12, 13, 14, 15, 30, forecast=forecast))
    assert alone.hits in (5, 6)


@pytest.mark.parametrize(("method", "options"), EVERY_METHOD[1:4])
def test_what_is_forced_behind_a_candidate_enters_with_it(method: str, options: MethodOptions | None) -> None:
    drafter = KnowingDrafter(random.Random(1))
    drafter.answers[0] = []
    alone = asked(method, options, ToyStructure(counting), drafter)
    alone.apply(Verdict.of(10))
    tree = PredictionTree()
    for _ in range(6):
        step = stepped(alone)
        if step is not None:
            tree.append(step.token_ids, step.parents)
    paths = [tree.path(row) for row in range(tree.num_rows)]
    assert [11, 12, 13, 14, 15, 20] in paths
    assert all([*path, 21, 22, 23, 24, 25] in paths for path in paths if path[5:] == [20])


def test_a_chain_has_an_end() -> None:
    alone = asked("pp", None, ToyStructure(lambda said: frozenset({len(said) % 7})))
    alone.apply(Verdict.of(0))
    assert len(rows(alone.propose())) == 1 + MAX_FORCED
    alone.apply(Verdict.of(*((index + 1) % 7 for index in range(1 + MAX_FORCED))))
    assert rows(alone.propose())[0] == ((1 + MAX_FORCED) % 7, -1)
