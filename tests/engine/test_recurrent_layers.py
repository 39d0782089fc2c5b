"""Targets and drafts with recurrent layers: in decode threads, in company, paused, resumed, and when forwards fail."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import cycle
from itertools import pairwise as pairs
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures.answers import PROMPTS, TOKENS, generated
from architectures.zoo import LAYERS, VOCABULARY, save_model
from msgspec import structs
from support.checkpoints import save_tiny
from support.kv_budgets import with_slots
from support.pairwise import pairwise
from support.specs import bare_spec
from support.thread_differences import written
from support.thread_models import END, THREAD_DIALECTS, Case, ThreadModels, naive_answer

from pipedec.core.errors import UserError
from pipedec.core.request import DEFAULT_METHOD, TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.decoding import LaneSizes
from pipedec.directories import reference_pair
from pipedec.engine.local import LocalAnswer, LocalPipeline
from pipedec.methods import find_method
from pipedec.model.recurrent import LaneRecurrence
from pipedec.stage.worker import StageWorker
from pipedec.threads import Dialect, Sequence, bind
from pipedec.verify.reference import load_transformers

FAMILIES = ("qwen3_5_text", "kimi_linear")  # a decay for each head, and for each number of a key
LAST_RECURRENT = 3  # of their layers
DIALECTS: dict[str, Dialect] = {
    "usual": THREAD_DIALECTS["apar"],
    "short children": replace(THREAD_DIALECTS["apar"], max_child_tokens=3),
    "twice in a row": replace(THREAD_DIALECTS["apar"], no_opening_after=()),
}


class Models:
    """By family a target with few tokens and one with the shipped tokenizer, a draft for each that is seldom right."""

    def __init__(self, folder: Path, threads: ThreadModels) -> None:
        self._folder, self.threads = folder, threads
        save_tiny("llama", folder / "draft", layers=1, seed=5, vocab=VOCABULARY)
        save_tiny("llama", folder / "dense", layers=LAYERS, vocab=VOCABULARY)
        for family in FAMILIES:
            save_model(family, folder / family)
            target = folder / f"{family}-threads"
            save_model(family, target, vocab_size=threads.tokenizer.get_vocab_size(), bos_token_id=0, eos_token_id=END)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                shutil.copy(reference_pair() / "target" / name, target / name)

    def pipeline(self, family: str, stages: int, draft: str = "draft", slots: int | None = None) -> LocalPipeline:
        return _pipeline(self._folder / family, stages, self._folder / draft, slots)

    def threaded_pipeline(self, family: str, stages: int) -> LocalPipeline:
        return _pipeline(self._folder / f"{family}-threads", stages, self.threads.spec(4, 1).draft)

    def target(self, family: str) -> Path:
        return self._folder / family

    @cache  # noqa: B019
    def known_answer(self, family: str, dialect: str, setting: str) -> Sequence:
        """The reference's answer in threads."""
        model, case = load_transformers(self._folder / f"{family}-threads", torch.float32), Case("apar", setting)
        decode, tokenizer = self.threads.tokenizer.decode, self.threads.tokenizer
        bound = bind(DIALECTS[dialect], tokenizer.token_to_id, lambda token: decode([token], skip_special_tokens=False))
        return naive_answer(model, bound, self.threads.prompt_ids(case.prompt), self.sampling(setting), (END,))

    def sampling(self, setting: str) -> SamplingParams:
        """Openers are likelier than usual."""
        usual = self.threads.sampling(Case("apar", setting))
        opener = self.threads.tokenizer.token_to_id("[Fork]")
        logit_bias = {token: bias + 1.5 * (token == opener) for token, bias in (usual.logit_bias or {}).items()}
        return structs.replace(usual, logit_bias=logit_bias, max_tokens=48)

    def threaded_request(self, dialect: Dialect, setting: str, method: str) -> TokenizedRequest:
        case, options = Case("apar", setting), find_method(method).options()
        prompt, sampling = self.threads.prompt_ids(case.prompt), self.sampling(setting)
        return TokenizedRequest(0, prompt, sampling, method, options, threads=dialect.to_json())


@cache
def _pipeline(target: Path, stages: int, draft: Path | None, slots: int | None = None) -> LocalPipeline:
    spec = bare_spec(target, LAYERS, (stages, stages), draft, model_impl="transformers").replaced(
        max_num_seqs=32
    )  # and as many states
    return LocalPipeline.load(spec if slots is None else with_slots(spec, slots), LaneSizes(ahead=16))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory, thread_models: ThreadModels) -> Models:
    return Models(tmp_path_factory.mktemp("recurrent"), thread_models)


CASES = [
    pytest.param(*case, marks=[] if place in (0, 1) else [pytest.mark.slow])
    for place, case in enumerate(pairwise(FAMILIES, DIALECTS, ["greedy", "filtered"], (3, 1), ("pp", "pipedec", DEFAULT_METHOD)))
]


@pytest.mark.parametrize(("family", "dialect", "setting", "stages", "method"), CASES)
def test_threads_equal_the_references(models: Models, family: str, dialect: str, setting: str, stages: int, method: str) -> None:
    pipeline = models.threaded_pipeline(family, stages)
    list(pipeline.run(models.threaded_request(DIALECTS[dialect], setting, method)))
    assert written(pipeline.last.sequence) == written(models.known_answer(family, dialect, setting))
    check_all_is_free(pipeline)


def test_the_answers_in_threads_cover_the_interesting_cases(models: Models) -> None:
    """Children of children, openers in a row, parents that end right after their openers, and threads that end at other times."""
    answers = {dialect: models.known_answer("qwen3_5_text", dialect, "greedy") for dialect in DIALECTS}
    opener = models.threads.tokenizer.token_to_id("[Fork]")
    for answer in answers.values():
        assert max(len(thread.path) for thread in answer.threads) == 2
        assert any(thread.token_ids[-1] == opener for thread in answer.threads[1:])
    said_twice = [pair == (opener, opener) for one in answers["twice in a row"].threads for pair in pairs(one.token_ids)]
    assert any(said_twice)
    assert len({thread.num_tokens for thread in answers["usual"].threads}) > 2


@pytest.mark.fast_cases("qwen3_5_text")
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_threads_are_the_same_in_company(models: Models, family: str) -> None:
    """One comes late, one is cancelled, and the stages lose everything once."""
    pipeline = models.threaded_pipeline(family, 3)
    dialects = ["usual", "short children", "twice in a row", "usual"]
    requests = [
        replace(models.threaded_request(DIALECTS[dialect], "greedy", method), number=number)
        for number, (dialect, method) in enumerate(zip(dialects, ("pp", "pipedec", DEFAULT_METHOD, "pp"), strict=True))
    ]
    list(pipeline.run_all({1: requests[:2], 5: requests[2:]}, {21: [3]}, losses={13}))
    assert pipeline.answers.pop(3).finished == "cancelled"
    for number, answer in pipeline.answers.items():
        assert written(answer.sequence) == written(models.known_answer(family, dialects[number], "greedy"))
    check_all_is_free(pipeline)


def test_a_dialect_with_joins_is_refused(models: Models) -> None:
    pipeline = models.threaded_pipeline("qwen3_5_text", 3)
    with pytest.raises(UserError, match=r"^dialect pasta joins threads, [^\n]*: use a dialect without joins, such as apar$"):
        list(pipeline.run(models.threaded_request(THREAD_DIALECTS["pasta"], "greedy", "pp")))
    check_all_is_free(pipeline)


# Requests in company

SAMPLINGS = (
    SamplingParams(ignore_eos=True),
    SamplingParams(1.0, seed=1, ignore_eos=True),
    SamplingParams(0.8, seed=4, repetition_penalty=1.4, presence_penalty=0.7),
)


def requests_of(lengths: Iterable[int], tokens: int, **sampled: Any) -> list[TokenizedRequest]:
    """Requests with prompts of some lengths and all samplings in turn, with some of their fields replaced."""
    found = []
    for number, (length, sampling) in enumerate(zip(lengths, cycle(SAMPLINGS), strict=False)):
        prompt = torch.randint(3, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length)).tolist()
        sampling = structs.replace(sampling, max_tokens=tokens, **sampled)
        found.append(TokenizedRequest(number, tuple(prompt), sampling, DEFAULT_METHOD, find_method(DEFAULT_METHOD).options()))
    return found


def alone(models: Models, family: str, request: TokenizedRequest) -> list[int]:
    """The whole answer by ``pp`` in one stage, without other requests."""
    pipeline = models.pipeline(family, 1)
    list(pipeline.run(replace(request, method="pp", options=None, output_token_ids=(), priority=0)))
    check_all_is_free(pipeline)
    return said(pipeline.last)


def said(answer: LocalAnswer) -> list[int]:
    return [token.token_id for token in answer.sequence.document()]


@pytest.mark.fast_cases("kimi_linear")
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_company_are_those_alone(models: Models, family: str) -> None:
    """Some arrive late, one is resumed, one is cancelled, and the stages lose everything once."""
    pipeline, requests = models.pipeline(family, 3), requests_of((5, 40, 150, 9, 70, 1, 33, 5), 14)
    wanted = [alone(models, family, request) for request in requests]
    requests[3] = replace(requests[3], output_token_ids=tuple(wanted[3][:6]))
    list(pipeline.run_all({1: requests[:5], 7: requests[5:]}, {9: [4]}, losses={20}))
    for number, answer in pipeline.answers.items():
        assert said(answer) == (wanted[number] if answer.finished != "cancelled" else wanted[number][: len(said(answer))])
    assert pipeline.answers[4].finished == "cancelled"
    check_all_is_free(pipeline)


def test_a_repeated_prompt_computes_at_most_a_block_again(models: Models) -> None:
    """And one that shares 48 tokens with it begins there from the third time on: the second one keeps the states."""
    pipeline, (first, other) = models.pipeline("qwen3_5_text", 5), requests_of((70, 71), 14)
    shared = replace(other, prompt_token_ids=(*first.prompt_token_ids[:48], *other.prompt_token_ids[48:]))
    third = replace(shared, prompt_token_ids=(*shared.prompt_token_ids[:60], *first.prompt_token_ids[:8]))
    for request, cached in ((first, 0), (first, 64), (shared, 0), (shared, 64), (third, 48)):
        wanted = alone(models, "qwen3_5_text", request)
        list(pipeline.run(request))
        assert said(pipeline.last) == wanted
        assert pipeline.last.metrics.cached_tokens == cached
    check_all_is_free(pipeline)


@pytest.mark.parametrize("tokens", [1, 13])
def test_an_answer_is_resumed(models: Models, tokens: int) -> None:
    (request,) = requests_of((21,), 24)
    wanted, pipeline = alone(models, "qwen3_5_text", request), models.pipeline("qwen3_5_text", 3)
    list(pipeline.run(replace(request, output_token_ids=tuple(wanted[:tokens]))))
    assert said(pipeline.last) == wanted
    check_all_is_free(pipeline)


@pytest.mark.fast_cases("qwen3_5_text")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_paused_answer_goes_on(models: Models, family: str) -> None:
    """There is room for what all of them reserve, but not for their answers; a more urgent one comes later."""
    pipeline, requests = models.pipeline(family, 2, slots=208), requests_of((5, 12, 20, 7), 70, ignore_eos=True)
    requests[3] = replace(requests[3], priority=-1)
    wanted = [alone(models, family, request) for request in requests]
    list(pipeline.run_all({1: requests[:3], 30: requests[3:]}))
    assert [said(pipeline.answers[number]) for number in range(4)] == wanted
    pauses = [pipeline.answers[number].metrics.pauses for number in range(4)]
    assert sum(pauses) > 0 == pauses[3]
    check_all_is_free(pipeline)


@pytest.mark.parametrize("spared", [0, 1, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_forward_that_fails_for_one_request_leaves_the_states_of_others(
    models: Models, family: str, spared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It fails in the last recurrent layer, when all others have been written: those of others are computed again."""
    pipeline, requests, calls = models.pipeline(family, 1), requests_of((30, 45, 60), 14), 0
    wanted = [alone(models, family, request) for request in requests]
    usual_forward, usual_mix, entering = vars(StageWorker)["_forward"], LaneRecurrence.mix, list[int]()

    def forward(worker: StageWorker, steps: Any, entered: Any, numbers: Any) -> Any:
        nonlocal calls
        entering[:] = numbers
        calls += len(numbers) > 1 and 1 in numbers
        return usual_forward(worker, steps, entered, numbers)

    def mix(recurrence: LaneRecurrence, layer: int, *rows: Any) -> Any:
        if layer == LAST_RECURRENT and 1 in entering and calls > spared:
            raise IndexError("that is out of range")
        return usual_mix(recurrence, layer, *rows)

    monkeypatch.setattr(StageWorker, "_forward", forward)
    monkeypatch.setattr(LaneRecurrence, "mix", mix)
    list(pipeline.run_all({1: requests}))
    found = pipeline.answers
    assert found[1].finished == "failed" and said(found[1]) == wanted[1][: len(said(found[1]))]
    assert [said(found[0]), said(found[2])] == [wanted[0], wanted[2]]
    check_all_is_free(pipeline)


# Drafts


@pytest.mark.fast_cases("dense-qwen3_5_text", "qwen3_5_text-qwen3_5_text")
@pytest.mark.parametrize(("target", "draft"), [("dense", FAMILIES[0]), (FAMILIES[1], FAMILIES[0]), (FAMILIES[0], FAMILIES[0])])
def test_a_draft_with_recurrent_layers(models: Models, target: str, draft: str) -> None:
    pipeline = models.pipeline(target, 3, draft=draft)
    for prompt in PROMPTS:
        sampling, method = SAMPLINGS[0], find_method(DEFAULT_METHOD)
        sampling = structs.replace(sampling, max_tokens=TOKENS)
        list(pipeline.run(TokenizedRequest(0, prompt, sampling, DEFAULT_METHOD, method.options())))
        wanted, _ = generated(load_transformers(models.target(target), torch.float32), prompt, SAMPLINGS[0])
        assert said(pipeline.last) == wanted
        assert pipeline.last.metrics.draft_tokens > 0
        if target == draft:
            assert pipeline.last.metrics.hits > 0
    check_all_is_free(pipeline)


def check_all_is_free(pipeline: LocalPipeline) -> None:
    """No request has a state or a stash, on any stage."""
    for stage in pipeline.stages:
        states = vars(stage)["_pool"].states
        assert states is None or states.free == (states.counts.states, states.counts.rows)
