"""What raises in a rank while it works for one request ends that request; others get their whole answers, at once.

Every entry of the stages, the scheduler, the samplers, the draft model and the grammar is made to raise for one request of three.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.tiny_pair import Pair

from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams, StructuredOutputs
from pipedec.decoding import Request, Scheduler, draft_rounds
from pipedec.decoding.events import Advanced
from pipedec.drafting import DraftModel
from pipedec.drafting.lane import DraftLane
from pipedec.engine.local import LocalAnswer, LocalPipeline
from pipedec.grammar import Grammar
from pipedec.methods import BestFirstOptions
from pipedec.sampling import Sampler
from pipedec.stage.final import FinalLane
from pipedec.stage.verification import TokenChooser, Verifier
from pipedec.stage.worker import Lane, StageWorker

PROMPTS = ((10, 11, 12, 13), (20, 21, 22, 23, 24), (30, 31, 32))
GUILTY, SEED = 1, 5
TREE = BestFirstOptions(width=8, forwards=2)  # which drafts from the first token on
FAULT = IndexError("that is out of range")


def is_guilty(of: Any) -> bool:
    """Whether an object belongs to the guilty request: its prompt has a length of its own, and its sampling a seed."""
    sequence = getattr(of, "sequence", getattr(of, "_sequence", None))
    length = getattr(of, "_prompt_length", None) if sequence is None else sequence.prompt_length
    return getattr(of, "number", None) == GUILTY or length == len(PROMPTS[GUILTY])


def of_self(one: Any, *arguments: Any) -> bool:
    return is_guilty(one)


def of_number(one: Any, number: int, *arguments: Any) -> bool:
    return number == GUILTY


def of_update(worker: StageWorker, update: Any, unsent: Any) -> bool:
    return vars(worker)["_stage"] == 2 and update.number == GUILTY


def of_rows(worker: StageWorker, steps: Any, entered: Any, numbers: Any) -> bool:
    return vars(worker)["_stage"] == 3 and GUILTY in numbers


def of_drafted(one: Any, requested: Any, prompts: Any) -> bool:
    return GUILTY in prompts or any(entry.number == GUILTY for entry in requested)


def is_structured(proposals: Any) -> bool:
    return vars(proposals.tree)["_chain_below"] is not None


# Of each entry: whose work it is, and after how many calls it raises.
ENTRIES: dict[str, tuple[Any, str, Callable[..., bool], int]] = {
    "a lane opens": (StageWorker, "_replay", of_update, 0),
    "a verdict is replayed": (StageWorker, "_replay", of_update, 5),
    "rows enter a lane": (Lane, "enter", of_self, 4),
    "a prompt is computed": (StageWorker, "_forward", of_rows, 0),
    "rows are computed": (StageWorker, "_forward", of_rows, 4),
    "a lane follows a verdict": (Lane, "sync", of_self, 2),
    "the last stage opens a lane": (TokenChooser, "__init__", lambda one, sequence, *rest: sequence.prompt_length == 5, 0),
    "a sampler is made": (Sampler, "__init__", lambda one, params, *rest: params.seed == SEED, 0),
    "a sampler chooses": (Sampler, "choose", lambda one, *rest: vars(one)["_params"].seed == SEED, 2),
    "tokens are chosen": (FinalLane, "judge", of_self, 3),
    "tokens are drawn": (TokenChooser, "choose", of_self, 1),
    "tokens are accepted": (FinalLane, "result", of_self, 2),
    "rows are verified": (Verifier, "verify", of_self, 1),
    "it claims rows": (Request, "claim", of_self, 0),
    "it claims more rows": (Request, "claim", of_self, 6),
    "rank 0 opens a lane": (Request, "open", of_self, 0),
    "its prompt enters": (Request, "enter_chunk", of_self, 0),
    "its rows enter": (Request, "enter_rows", of_self, 2),
    "it asks for drafts": (Request, "ask", of_self, 1),
    "it follows a verdict": (Request, "commit", of_self, 1),
    "the draft model opens a lane": (DraftModel, "open_lane", of_number, 0),
    "the draft model computes its prompt": (DraftModel, "expand", of_drafted, 0),
    "the draft model computes its rows": (DraftModel, "expand", of_drafted, 3),
    "the draft model follows a verdict": (DraftModel, "follow_tree", of_number, 0),
    "what the structure allows is asked for": (DraftLane, "allowed", of_self, 0),
    "candidates are scored": (draft_rounds, "score", lambda proposals: any(map(is_structured, proposals)), 2),
    "a listener hears of its tokens": (
        Scheduler, "emit", lambda one, record: isinstance(record, Advanced) and record.request.number == GUILTY, 2
    ),
    "the grammar allows": (Grammar, "allowed", lambda *arguments: True, 3),
    "the grammar forces": (Grammar, "forced", lambda *arguments: True, 1),
    "the grammar advances": (Grammar, "consume", lambda *arguments: True, 1),
}  # fmt: skip


def requests() -> list[TokenizedRequest]:
    plain, structured = SamplingParams(max_tokens=16, ignore_eos=True), StructuredOutputs(regex="[a-z ]{30}")
    drawn = SamplingParams(temperature=1.0, seed=SEED, max_tokens=16, structured_outputs=structured)
    return [
        TokenizedRequest(number, prompt, drawn if number == GUILTY else plain, "pipedec-bestfirst", TREE)
        for number, prompt in enumerate(PROMPTS)
    ]


def answers(of: LocalPipeline, of_requests: list[TokenizedRequest]) -> dict[int, LocalAnswer]:
    for _ in of.run_all({1: of_requests}):
        pass
    return of.answers


@cache
def loaded(pair: Pair) -> tuple[LocalPipeline, dict[int, list[int]]]:
    """A pipeline, and its answers when nothing raises."""
    pipeline = LocalPipeline.load(pair.spec(3))
    return pipeline, {number: answer.token_ids for number, answer in answers(pipeline, requests()).items()}


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
@pytest.mark.failure_case("S19")
def test_what_raises_for_a_request_ends_it_and_no_other(
    entry: tuple[Any, str, Callable[..., bool], int], pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, name, is_its, spared = entry
    pipeline, wanted = loaded(pair)
    pipeline.forget_prefixes()
    usual, calls = getattr(kind, name), 0

    def entered(*arguments: Any, **named: Any) -> Any:
        nonlocal calls
        calls += is_its(*arguments)
        if is_its(*arguments) and calls > spared:
            raise FAULT
        return usual(*arguments, **named)

    monkeypatch.setattr(kind, name, entered)
    found = answers(pipeline, requests())
    guilty = found.pop(GUILTY)
    assert guilty.failure and guilty.failure.startswith("rank ") and guilty.failure.endswith(f"IndexError: {FAULT}")
    assert guilty.finished == "failed" and wanted[GUILTY][: len(guilty.token_ids)] == guilty.token_ids != wanted[GUILTY]
    assert {number: answer.token_ids for number, answer in found.items()} == {n: wanted[n] for n in found}
    assert all(answer.is_closed for answer in (guilty, *found.values()))
    assert pipeline.scheduler.kv.used_slots == 0 and not any(stage.num_lanes for stage in pipeline.stages)
