"""Requests in company: whatever else is in the pipeline, each gets the answer that it gets alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from support.examples import examples
from support.kv_budgets import with_slots
from support.thread_models import SETTINGS, THREAD_DIALECTS, Case, ThreadModels

from benchmarks.methods import applicable_options
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import LaneSizes
from pipedec.engine.local import LocalAnswer, LocalPipeline
from pipedec.methods import METHODS, BestFirstOptions, PipeDecOptions, StaticTreeOptions

SHAPES = [(1, 1), (2, 2), (4, 4), (4, 2)]  # stages, groups
TREE = {"width": 6, "children": 4}
MAX_TOKENS = 12
OTHERS, LONG = (
    tuple(torch.randint(3, 60, (length,), generator=torch.Generator().manual_seed(length)).tolist()) for length in (5, 150)
)
PROMPTS = (OTHERS[:1], OTHERS, LONG[:40], LONG, LONG[:100] + OTHERS, LONG[:129])
SLOTS = (None, 512, 352)  # of the KV pools; None: for everybody at once
SAMPLINGS = (
    SamplingParams(ignore_eos=True),
    SamplingParams(logprobs=3),
    SamplingParams(1.0, seed=1, ignore_eos=True),
    SamplingParams(0.8, seed=4, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.5, logprobs=0),
    SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0, stop_token_ids=(7, 9, 20)),
    SamplingParams(0.9, top_p=0.95, seed=5, logit_bias={7: 4.0, 12: 3.0}, min_p=0.01),
)
OPTIONS = [
    *((method, applicable_options(method, TREE)) for method in METHODS),
    ("stpp", StaticTreeOptions(8, 4, depth=5, rows=40)),
    ("pipedec", PipeDecOptions(40, 8)),
    ("pipedec-bestfirst", BestFirstOptions(width=2, forwards=1)),
    ("pipedec-bestfirst", BestFirstOptions(proposers=("ngrams",))),
]


@dataclass(frozen=True)
class Visit:
    """A request, when it comes, and after how many timesteps it is cancelled (None: never).

    Attributes:
        answer: in decode threads, a case of ``threads_support``; else prompt and sampling.
        num_said: of an answer in one thread, how many tokens of it were said before.
    """

    arrives: int
    cancelled_after: int | None
    method: int
    answer: tuple[int, int] | Case
    num_tokens: int
    priority: int
    num_said: int = 0
    tenant: str | None = None

    def request(self, number: int, models: ThreadModels) -> TokenizedRequest:
        method, options = OPTIONS[self.method]
        if isinstance(self.answer, Case):
            dialect = THREAD_DIALECTS[self.answer.dialect].to_json()
            prompt = models.prompt_ids(self.answer.prompt)
            sampling = structs.replace(models.sampling(self.answer), max_tokens=4 * self.num_tokens)
            return TokenizedRequest(
                number, prompt, sampling, method, options, threads=dialect, priority=self.priority, tenant=self.tenant
            )
        prompt, sampling = PROMPTS[self.answer[0]], structs.replace(SAMPLINGS[self.answer[1]], max_tokens=self.num_tokens)
        told = alone(models, replace(self, num_said=0)).token_ids if self.num_said else []
        said = tuple(told[: min(self.num_said, len(told) - 1)])
        return TokenizedRequest(
            number, prompt, sampling, method, options, priority=self.priority, output_token_ids=said, tenant=self.tenant
        )


CASES = st.builds(Case, st.sampled_from(sorted(THREAD_DIALECTS)), st.sampled_from(sorted(SETTINGS)))
PLAIN = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(SAMPLINGS) - 1))
VISITS = st.lists(
    st.builds(
        Visit,
        arrives=st.integers(1, 30),
        cancelled_after=st.none() | st.none() | st.integers(0, 25),
        method=st.integers(0, len(OPTIONS) - 1),
        answer=PLAIN | PLAIN | PLAIN | CASES,
        num_tokens=st.sampled_from([1, 2, 7, MAX_TOKENS]),
        priority=st.integers(-1, 1),
        num_said=st.just(0) | st.integers(1, MAX_TOKENS),
        tenant=st.sampled_from([None, "a", "a", "b"]),
    ),
    min_size=2,
    max_size=4,
)


@cache
def pipeline_of(
    models: ThreadModels, shape: tuple[int, int], slots: int | None = None, lane_sizes: LaneSizes = LaneSizes()
) -> LocalPipeline:
    """In float64, where no order of summation can tip a choice. What earlier requests have left in its KV cache stays."""
    spec = models.spec(4, *shape).replaced(dtype="float64", max_num_seqs=8)
    return LocalPipeline.load(spec if slots is None else with_slots(spec, slots), lane_sizes)


def alone(models: ThreadModels, visit: Visit) -> LocalAnswer:
    """The answer by ``pp``, in one stage, with nobody else there and nothing in the KV cache."""
    return _alone(models, replace(visit, arrives=0, method=0, priority=0, cancelled_after=None, num_said=0, tenant=None))


@cache
def _alone(models: ThreadModels, visit: Visit) -> LocalAnswer:
    pipeline = _pipeline_alone(models)
    request = replace(visit.request(0, models), method="pp", options=None)
    list(pipeline.run(request))
    return pipeline.last


@cache
def _pipeline_alone(models: ThreadModels) -> LocalPipeline:
    return LocalPipeline.load(models.spec(4, 1, 1).replaced(dtype="float64", draft=None, prefix_cache=False))


def said(answer: LocalAnswer) -> list[int]:
    return [token.token_id for token in answer.sequence.document()]


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("4in2")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}in{shape[1]}")
@examples(25, least=12)  # each has several answers, and there are four shapes
@given(
    visits=VISITS,
    slots=st.sampled_from(SLOTS),
    ahead=st.sampled_from([1, 8, 1024]),
    losses=st.just(frozenset()) | st.frozensets(st.integers(1, 40), max_size=4),
)
def test_an_answer_in_company_is_the_answer_alone(
    thread_models: ThreadModels,
    shape: tuple[int, int],
    visits: list[Visit],
    slots: int | None,
    ahead: int,
    losses: frozenset[int],
) -> None:
    """Over random arrivals, cancellations, methods, priorities, samplings, tenants and decode threads; with answers that are
    resumed, and with little memory, so that requests wait, are paused, and lose what they have shared; and when the stages lose
    everything.
    """
    pipeline = pipeline_of(thread_models, shape, slots, LaneSizes(ahead))
    arrivals: dict[int, list[TokenizedRequest]] = {}
    cancels: dict[int, list[int]] = {}
    for number, visit in enumerate(visits):
        arrivals.setdefault(visit.arrives, []).append(visit.request(number, thread_models))
        if visit.cancelled_after is not None:
            cancels.setdefault(visit.arrives + visit.cancelled_after, []).append(number)
    for _ in pipeline.run_all(arrivals, cancels, losses):
        continue
    for number, visit in enumerate(visits):
        check_answer(pipeline.answers[number], alone(thread_models, visit))
    assert_nothing_is_left(pipeline)


def check_answer(found: LocalAnswer, wanted: LocalAnswer) -> None:
    """The same tokens, or those until it was cancelled."""
    if found.finished == "cancelled":
        if not found.sequence.can_fork:
            assert said(found) == said(wanted)[: len(said(found))]
        return
    assert said(found) == said(wanted)
    assert found.finished == wanted.finished
    logprobs = wanted.logprobs[len(found.asked.output_token_ids) :]
    assert [list(row) for row in found.logprobs[: len(logprobs)]] == [list(row) for row in logprobs]
    for ours, theirs in zip(found.logprobs, logprobs, strict=False):
        assert ours == pytest.approx(theirs, abs=1e-9)


def assert_nothing_is_left(pipeline: LocalPipeline) -> None:
    assert all(answer.is_closed for answer in pipeline.answers.values())
    assert all(worker.num_lanes == 0 for worker in pipeline.stages)
    assert pipeline.stats().kv.used == 0


def test_requests_share_timesteps_and_begin_while_others_run(thread_models: ThreadModels) -> None:
    """Eight plain answers in four stages take as long as one, and nobody waits until the pipeline is empty."""
    pipeline = pipeline_of(thread_models, (4, 4))
    timesteps = []
    for count in (1, 8):
        visits = [Visit(1, None, 0, (1, 0), 8, 0) for _ in range(count)]
        list(pipeline.run_all({1: [visit.request(number, thread_models) for number, visit in enumerate(visits)]}))
        timesteps.append(len(pipeline.fill))
    assert timesteps[0] == timesteps[1]
    early, late = (Visit(1, None, 0, (1, 0), tokens, 0).request(number, thread_models) for number, tokens in enumerate((20, 2)))
    order = [number for number, _ in pipeline.run_all({1: [early], 9: [late]})]
    assert order.index(1) < len(order) - 1 - order[::-1].index(0), "the late one ends before the early one"


@pytest.mark.fast_cases("pipedec-bestfirst")
@pytest.mark.parametrize("method", [0, 3], ids=["pp", "pipedec-bestfirst"])
def test_a_request_is_cancelled_at_any_timestep(thread_models: ThreadModels, method: int) -> None:
    """From its second one on, while the chunks of its prompt enter, until it has ended; another request never notices."""
    pipeline = pipeline_of(thread_models, (4, 4))
    visits = [Visit(1, None, method, (prompt, 0), tokens, 0) for prompt, tokens in ((3, 3), (1, 8))]
    reasons: list[str | None] = []
    while "length" not in reasons:
        requests = [visit.request(number, thread_models) for number, visit in enumerate(visits)]
        list(pipeline.run_all({1: requests}, {len(reasons) + 2: [0]}))
        reasons.append(pipeline.answers[0].finished)
        for number, visit in enumerate(visits):
            check_answer(pipeline.answers[number], alone(thread_models, visit))
        assert pipeline.answers[1].finished == "length"
        assert_nothing_is_left(pipeline)
        pipeline.forget_prefixes()
    assert len(reasons) > 4 and set(reasons[:-1]) == {"cancelled"}


def test_a_run_that_is_left_early_leaves_nothing(thread_models: ThreadModels) -> None:
    pipeline = pipeline_of(thread_models, (2, 2))
    verdicts = pipeline.run(Visit(1, None, 3, (2, 0), 12, 0).request(0, thread_models))
    next(verdicts)
    verdicts.close()  # type: ignore[attr-defined]
    assert_nothing_is_left(pipeline)


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases
@pytest.mark.parametrize("method", range(len(METHODS)))
def test_the_youngest_is_paused_and_all_are_answered(thread_models: ThreadModels, method: int) -> None:
    """There is room for what all of them reserve, but not for their answers."""
    pipeline = LocalPipeline.load(with_slots(thread_models.spec(4, 2).replaced(dtype="float64"), 208), LaneSizes(ahead=16))
    visits = [Visit(1, None, method, (1, sampling), 90, 0) for sampling in range(4)]
    list(pipeline.run_all({1: [visit.request(number, thread_models) for number, visit in enumerate(visits)]}))
    for number, visit in enumerate(visits):
        check_answer(pipeline.answers[number], alone(thread_models, visit))
    pauses = [answer.metrics.pauses for answer in pipeline.answers.values()]
    assert pauses[0] == 0 and sum(pauses) > 0
    assert_nothing_is_left(pipeline)


def test_a_shared_prefix_is_computed_once(thread_models: ThreadModels) -> None:
    """Users who arrive together share it, too, and it outlasts the one who computed it, until the pipeline forgets it."""
    pipeline, cached = LocalPipeline.load(thread_models.spec(4, 4).replaced(dtype="float64")), list[int]()
    for prompts, cancels in (((3, 4, 5, 3), {4: [0]}), ((3,), {}), ((3,), {})):
        visits = [Visit(1, None, 0, (prompt, 0), 5, 0) for prompt in prompts]
        list(pipeline.run_all({1: [visit.request(number, thread_models) for number, visit in enumerate(visits)]}, cancels))
        cached += [pipeline.answers[number].metrics.cached_tokens for number in range(len(visits))]
        for number, visit in enumerate(visits):
            check_answer(pipeline.answers[number], alone(thread_models, visit))
        assert_nothing_is_left(pipeline)
        if len(cached) == 5:
            pipeline.forget_prefixes()
    assert cached[0] == cached[5] == 0 and min(cached[1:5]) >= 96
