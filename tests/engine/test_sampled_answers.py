"""One seed, one answer: every method and shape draws the tokens that transformers' logits and the definitions give."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from msgspec import structs
from msgspec.structs import asdict
from support import naive_sampling
from support.pairwise import pairwise
from support.timesteps import check_timesteps
from support.tiny_pair import Pair
from test_local_pipeline import EOS, TREE, make_pipeline, models
from test_local_pipeline import answer as told
from transformers import LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.methods import applicable_options
from pipedec.client.client import Client
from pipedec.cluster.local import LocalCluster
from pipedec.core.completion import Completion
from pipedec.core.errors import UserError
from pipedec.core.limits import KNEE_ROWS
from pipedec.core.request import TokenizedRequest
from pipedec.core.sampling import SamplingParams
from pipedec.engine.local import LocalPipeline
from pipedec.messages.request import PromptRequest
from pipedec.methods import METHODS
from pipedec.plan.spec import DISPATCHES

__all__ = ["models"]  # a fixture
PROMPT = (1, 9, 30, 4, 51, 17, 8, 22, 40, 9)
NUM_TOKENS = 14
SHAPES = [(1, 1), (2, 2), (8, 8), (8, 4), (4, 1)]  # stages, groups
SETTINGS = {
    "drawn": SamplingParams(1.0, seed=1),
    "paper": SamplingParams(0.6, top_k=30, top_p=0.9, seed=2),
    "min-p": SamplingParams(1.3, min_p=0.05, seed=2**64 - 1),
    "penalised": SamplingParams(0.8, seed=4, repetition_penalty=1.4, presence_penalty=0.7, frequency_penalty=0.5),
    "greedy penalised": SamplingParams(repetition_penalty=1.5, frequency_penalty=1.0),
    "biased": SamplingParams(0.9, top_p=0.95, seed=5, frequency_penalty=-0.4, logit_bias={7: 4.0, 12: 3.0, 40: -100.0}),
}


@torch.inference_mode()
def expected(
    target: PreTrainedModel, prompt: tuple[int, ...], sampling: SamplingParams, ends: Collection[int] = ()
) -> tuple[int, ...]:
    said: list[int] = []
    while len(said) < sampling.max_tokens and not (said and said[-1] in ends):
        logits = target(torch.tensor([[*prompt, *said]])).logits[0, -1].double().tolist()
        banned = ends if len(said) < sampling.min_tokens else ()
        said.append(naive_sampling.choose(logits, prompt, said, sampling, banned=banned))
    return tuple(said)


def asked(sampling: SamplingParams, method: str, prompt: tuple[int, ...] = PROMPT) -> TokenizedRequest:
    return TokenizedRequest(
        0, prompt, structs.replace(sampling, max_tokens=NUM_TOKENS, ignore_eos=True), method, applicable_options(method, TREE)
    )


def answer(pipeline: LocalPipeline, request: TokenizedRequest) -> tuple[int, ...]:
    return told(pipeline, request)[0]


@pytest.fixture(scope="module")
def answers(models: Path) -> dict[str, tuple[int, ...]]:
    """What the definitions say, by setting."""
    target = LlamaForCausalLM.from_pretrained(models / "target").eval()
    found = {name: expected(target, PROMPT, asked(sampling, "pp").sampling) for name, sampling in SETTINGS.items()}
    assert len(set(found.values())) == len(SETTINGS)
    return found


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("2in2")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}in{shape[1]}")
def test_one_seed_gives_one_answer(models: Path, answers: dict[str, tuple[int, ...]], shape: tuple[int, int]) -> None:
    """Every pair of shape, sampling settings and method."""
    pipeline = make_pipeline(models, shape, "near")
    for _, name, method in [case for case in pairwise(SHAPES, SETTINGS, METHODS) if case[0] == shape]:
        assert answer(pipeline, asked(SETTINGS[name], method)) == answers[name], (name, method)
        metrics = pipeline.last.metrics
        assert metrics.hits + metrics.misses == NUM_TOKENS - 1
        check_timesteps(metrics, shape[1], method)
        assert metrics.hits > 0 or method == "pp" or (method.startswith("pipedec") and shape[1] == 1)
        assert pipeline.last.asked.sampling.seed == SETTINGS[name].seed


@pytest.mark.in_turn(3)
@pytest.mark.fast_cases("2in2")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}in{shape[1]}")
def test_no_answer_ends_before_min_tokens(models: Path, answers: dict[str, tuple[int, ...]], shape: tuple[int, int]) -> None:
    """With tokens that stop it early otherwise: every pair of shape, method, sampling settings and number of tokens."""
    target = LlamaForCausalLM.from_pretrained(models / "target").eval()
    pipeline = make_pipeline(models, shape, "near")
    cases = pairwise(SHAPES, SETTINGS, (0, 1, 6, NUM_TOKENS), METHODS)
    for _, name, min_tokens, method in [case for case in cases if case[0] == shape]:
        stop = tuple(answers[name][2::2])
        bias = {
            **(SETTINGS[name].logit_bias or {}),
            EOS: 30.0 if min_tokens == 6 else 0.0,
        }  # then it is the best token throughout
        sampling = structs.replace(
            SETTINGS[name], max_tokens=NUM_TOKENS, min_tokens=min_tokens, stop_token_ids=stop, logit_bias=bias
        )
        wanted = expected(target, PROMPT, sampling, {EOS, *stop})
        request = TokenizedRequest(0, PROMPT, sampling, method, applicable_options(method, TREE))
        assert told(pipeline, request) == (wanted, "stop" if wanted[-1] in {EOS, *stop} else "length"), (name, min_tokens, method)
        assert len(wanted) > min_tokens or min_tokens == NUM_TOKENS
        assert not {EOS, *stop} & set(wanted[:min_tokens]) and (min_tokens != 6 or len(wanted) == 7)


def test_a_resumed_answer_counts_its_earlier_tokens_towards_min_tokens(models: Path, answers: dict[str, tuple[int, ...]]) -> None:
    pipeline, stop = make_pipeline(models, (2, 2), "near"), answers["drawn"][3:]
    sampling = structs.replace(SETTINGS["drawn"], max_tokens=NUM_TOKENS, min_tokens=5, stop_token_ids=stop)
    request = TokenizedRequest(0, PROMPT, sampling, "pipedec", applicable_options("pipedec", TREE))
    whole, _ = told(pipeline, request)
    assert 5 < len(whole) < NUM_TOKENS
    for known in range(1, len(whole)):
        resumed = replace(request, output_token_ids=whole[:known])
        assert told(pipeline, resumed) == (whole[known:], "stop")


def test_a_draft_like_the_target_foresees_every_sampled_token(models: Path, answers: dict[str, tuple[int, ...]]) -> None:
    """As many of them miss the tree as of greedy tokens, in spite of the temperature."""
    pipeline = make_pipeline(models, (2, 2), "same")
    answer(pipeline, asked(SamplingParams(), "pipedec"))
    misses = pipeline.last.metrics.misses
    for name in ("drawn", "paper", "min-p"):
        assert answer(pipeline, asked(SETTINGS[name], "pipedec")) == answers[name], name
        assert pipeline.last.metrics.misses == misses, name


def test_penalties_count_every_chunk_of_the_prompt(models: Path) -> None:
    """A biased token that would be said again and again is not, because it stands in the first chunk of the prompt alone."""
    prompt = (5, *(6 + index % 3 for index in range(KNEE_ROWS + 20)))
    sampling = SamplingParams(repetition_penalty=3.0, logit_bias={5: 6.0, 20: 5.0})
    target = LlamaForCausalLM.from_pretrained(models / "target").eval()
    wanted = expected(target, prompt, asked(sampling, "pp").sampling)
    assert answer(make_pipeline(models, (2, 2), "near"), asked(sampling, "pipedec", prompt)) == wanted


def test_without_a_seed_answers_differ_and_the_seed_found_repeats_them(models: Path) -> None:
    pipeline = make_pipeline(models, (2, 2), "near")
    drawn = {}
    for _ in range(4):
        said = answer(pipeline, asked(SamplingParams(1.0), "pipedec"))
        assert pipeline.last.asked.sampling.seed is not None
        drawn[pipeline.last.asked.sampling.seed] = said
    assert len(set(drawn.values())) == 4
    for seed, said in drawn.items():
        assert answer(pipeline, asked(SamplingParams(1.0, seed=seed), "pp")) == said


@torch.inference_mode()
def check_logprobs(
    target: PreTrainedModel, prompt: tuple[int, ...], said: list[int], logprobs: list[dict[int, float]], num_top: int
) -> None:
    """The chosen token first, then the top ones, as transformers has them."""
    rows = target(torch.tensor([[*prompt, *said]])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
    assert len(logprobs) == len(said)
    for row, token, found in zip(rows, said, logprobs, strict=True):
        top = row.topk(num_top).indices.tolist()
        assert list(found) == list(dict.fromkeys([token, *top]))
        assert list(found.values()) == pytest.approx(row[list(found)].tolist(), abs=1e-4)


@pytest.mark.in_turn(2)
@pytest.mark.fast_cases("pipedec-bestfirst")
@pytest.mark.parametrize("method", METHODS)
def test_logprobs_are_those_of_transformers(models: Path, method: str) -> None:
    target = LlamaForCausalLM.from_pretrained(models / "target").eval()
    pipeline = make_pipeline(models, (4, 4), "near")
    for name, num_top in (("biased", 5), ("greedy penalised", 0)):  # these do not change what is reported
        said = answer(pipeline, asked(structs.replace(SETTINGS[name], logprobs=num_top), method))
        check_logprobs(target, PROMPT, list(said), pipeline.last.logprobs, num_top)
    answer(pipeline, asked(SETTINGS["drawn"], method))
    assert pipeline.last.logprobs == []


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        (SamplingParams(stop=("a",)), "stop strings need a tokenizer"),
        (SamplingParams(logit_bias={64: 1.0}), "logit_bias names token 64, but the vocabulary has 64 tokens"),
    ],
)
def test_what_a_pipeline_without_a_tokenizer_refuses(models: Path, sampling: SamplingParams, message: str) -> None:
    with pytest.raises(UserError, match=message):
        answer(make_pipeline(models, (1, 1), None), asked(sampling, "pp"))


# A cluster of real processes.

TEXT = "Natalia sold 12 clips in April."
CLUSTER_TREE = {"width": 8, "children": 8, "depth": 3}
WIDE_TREE = {"children": 32, "depth": 1}  # masks that have learned nothing must name many tokens to be right without noise


def ask(cluster: LocalCluster, sampling: SamplingParams, method: str = "pipedec", trace: bool = False) -> Completion:
    assert cluster.scheduler is not None
    client = Client(cluster.scheduler, cluster.check, silence_seconds=60)
    pieces: list[str] = []
    tree = WIDE_TREE if method == "bita" and not sampling.is_stochastic else CLUSTER_TREE
    completion = client.ask(
        PromptRequest(TEXT, True, method, sampling, asdict(applicable_options(method, tree)), trace), pieces.append
    )
    assert "".join(pieces) == completion.text
    return completion


@pytest.mark.slow
@pytest.mark.usefixtures("leaves_nothing")
def test_a_cluster_says_what_one_process_says(resident: LocalCluster, pair: Pair, tokenizer: PreTrainedTokenizerBase) -> None:
    """Every pair of dispatch, sampling settings and method."""
    here = LocalPipeline.load(pair.spec(1))
    prompt = tuple(tokenizer(TEXT)["input_ids"])
    wanted = {name: answer(here, asked(sampling, "pp", prompt)) for name, sampling in SETTINGS.items()}
    for _, name, method in [
        case for case in pairwise(DISPATCHES, SETTINGS, METHODS) if case[0] == resident.spec.settings.cluster.dispatch
    ]:
        completion = ask(resident, structs.replace(SETTINGS[name], max_tokens=NUM_TOKENS, ignore_eos=True), method)
        assert tuple(completion.token_ids) == wanted[name], (name, method)
        assert completion.seed == SETTINGS[name].seed and completion.logprobs is None
        assert "logprobs" not in completion.as_dict()


@pytest.mark.usefixtures("leaves_nothing")
def test_a_cluster_draws_a_seed_and_reports_it(resident: LocalCluster) -> None:
    drawn = [ask(resident, SamplingParams(1.0, max_tokens=NUM_TOKENS, ignore_eos=True)) for _ in range(2)]
    assert drawn[0].token_ids != drawn[1].token_ids
    for completion in drawn:
        assert completion.as_dict()["seed"] == completion.seed is not None
        again = SamplingParams(1.0, seed=completion.seed, max_tokens=NUM_TOKENS, ignore_eos=True)
        assert ask(resident, again, "stpp").token_ids == completion.token_ids
    assert ask(resident, SamplingParams(max_tokens=2)).seed is None


@pytest.mark.usefixtures("leaves_nothing")
def test_a_clusters_logprobs_are_those_of_transformers(
    resident: LocalCluster, pair: Pair, tokenizer: PreTrainedTokenizerBase
) -> None:
    target = LlamaForCausalLM.from_pretrained(pair.target).eval()
    prompt = tuple(tokenizer(TEXT)["input_ids"])
    for method in METHODS:
        sampling = SamplingParams(0.7, seed=3, max_tokens=6, ignore_eos=True, logprobs=2)
        completion = ask(resident, sampling, method)
        assert completion.logprobs is not None and len(completion.token_ids) == 6
        check_logprobs(target, prompt, completion.token_ids, completion.logprobs, 2)


@pytest.mark.slow
@pytest.mark.in_turn(3)
@pytest.mark.usefixtures("leaves_nothing")
@pytest.mark.parametrize(("method", "temperature"), [("pipedec-bestfirst", 0.0), ("bita", 0.7), ("stpp", 0.7)])
def test_a_stop_string_ends_the_answer_before_it(
    resident: LocalCluster, tokenizer: PreTrainedTokenizerBase, method: str, temperature: float
) -> None:
    """Wherever it appears: in the first token, inside a token, across tokens, in the last one."""
    texts = [tokenizer.decode(token) for token in range(len(tokenizer))]
    foreign = {token: -100.0 for token, text in enumerate(texts) if not (text.isprintable() and text.isascii())}
    sampling = SamplingParams(temperature, seed=8, max_tokens=40, ignore_eos=True, logit_bias=foreign)
    whole = ask(resident, sampling, method)
    said = [tokenizer.decode(whole.token_ids[:count], skip_special_tokens=True) for count in range(41)]
    last = len(whole.text)
    for start, end in ((0, 1), (9, 10), (10, 13), (17, 24), (last - 7, last - 5), (last - 5, last)):
        stop = whole.text[start:end]
        kept = next(count for count, text in enumerate(said) if stop in text)
        cut = ask(resident, structs.replace(sampling, stop=("never said", stop), logprobs=0), method, trace=start == 10)
        assert (cut.token_ids, cut.finish_reason, cut.stop_reason) == (whole.token_ids[:kept], "stop", stop)
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.metrics.hits + cut.metrics.misses == kept - 1
        check_timesteps(cut.metrics, resident.spec.topology.num_groups, method)
        assert cut.logprobs is not None and [next(iter(found)) for found in cut.logprobs] == cut.token_ids
    unstopped = ask(resident, structs.replace(sampling, stop=("never said", whole.text + "!")), method)
    assert (unstopped.token_ids, unstopped.text, unstopped.finish_reason) == (whole.token_ids, whole.text, "length")


@pytest.mark.usefixtures("leaves_nothing")
def test_a_client_reads_the_special_tokens_that_are_shown(resident: LocalCluster, tokenizer: PreTrainedTokenizerBase) -> None:
    """And the end token that the output is to include, which is likely but does not come before min_tokens."""
    user, end = tokenizer.convert_tokens_to_ids("<|user|>"), tokenizer.eos_token_id
    bias = {user: 90.0, end: 100.0}
    for params, text in (
        ({}, ""), ({"shown_special_tokens": (user,)}, "<|user|>" * 3), ({"skip_special_tokens": False}, "<|user|>" * 3),
        ({"include_stop_str_in_output": True}, ""),
        ({"skip_special_tokens": False, "include_stop_str_in_output": True}, "<|user|>" * 3 + "</s>"),
    ):  # fmt: skip
        completion = ask(resident, SamplingParams(max_tokens=9, min_tokens=3, logit_bias=bias, **params))
        assert (completion.text, completion.token_ids) == (text, [user, user, user, end])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)


@pytest.mark.usefixtures("leaves_nothing")
def test_a_bias_outside_the_clusters_vocabulary_is_refused(resident: LocalCluster, tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(UserError, match=f"logit_bias names token 5000, but the vocabulary has {len(tokenizer)} tokens"):
        ask(resident, SamplingParams(logit_bias={5000: 1.0}))
    assert len(ask(resident, SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2
