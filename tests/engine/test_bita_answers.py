"""BiTA through LocalPipeline: the target's own tokens whatever the masks say, and as many at once as the masks get right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import zoo
from architectures.zoo import save_model
from msgspec.structs import replace
from support.bita_files import save_random_bita
from support.checkpoints import save_tiny
from support.naive_bita import NaiveBita
from support.pairwise import pairwise
from support.specs import bare_spec
from support.stage_chain import BOTH_IMPLS
from support.timesteps import check_timesteps
from transformers import AutoModelForCausalLM

from pipedec.core import KNEE_ROWS, Request, RequestUpdate, SamplingParams, StageMessage, UserError, Verdict
from pipedec.engine.build import DTYPES
from pipedec.engine.local import LocalPipeline
from pipedec.families import ModelImpl, model_config
from pipedec.methods import BitaOptions
from pipedec.model import BitaWeights, checked_bita
from pipedec.stage import FinalStageWorker

LAYERS, MASKS, VOCAB = 8, 3, 64
PROMPT = (1, 9, 30, 4, 51, 17, 8, 22, 40, 3)
NUM_TOKENS = 8
SHAPES = [(1, 1), (2, 2), (4, 4), (8, 8), (8, 4), (4, 1)]  # stages, groups
TREES = (
    BitaOptions(),
    BitaOptions(children=1),
    BitaOptions(children=16, depth=2),
    BitaOptions(rows=1),
    BitaOptions(shape="efficient"),
    BitaOptions(shape="straightforward"),
    BitaOptions(shape="straightforward", depth=1),
    BitaOptions(children=2, shape="full"),
    BitaOptions(children=3, depth=2, shape="full"),
)
DRAWN = SamplingParams(0.9, seed=3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets of every family, each with a BiTA that has learned nothing."""
    folder = tmp_path_factory.mktemp("models")
    save_tiny("llama", folder / "llama", layers=LAYERS, max_position_embeddings=1200)
    save_tiny("mistral", folder / "mistral", layers=LAYERS, sliding_window=4)
    save_tiny("qwen2", folder / "qwen2", layers=LAYERS)
    save_tiny("qwen3", folder / "qwen3", layers=LAYERS, head_dim=16)
    for name in ("llama", "mistral", "qwen2", "qwen3"):
        save_random_bita(folder / f"{name}-bita", folder / name, MASKS)
    return folder


def make_pipeline(
    models: Path, shape: tuple[int, int], dtype: str = "float32", target: str = "llama", bita: Path | None = None,
    impl: ModelImpl = "auto",
) -> LocalPipeline:  # fmt: skip
    given = {"dtype": dtype, "model_impl": impl}
    return LocalPipeline.load(bare_spec(models / target, LAYERS, shape, None, bita or models / f"{target}-bita", **given))


def request(
    tree: BitaOptions = TREES[0],
    sampling: SamplingParams = DRAWN,
    prompt: tuple[int, ...] = PROMPT,
    method: str = "bita",
    **changes: Any,
) -> Request:
    wishes = {"max_tokens": NUM_TOKENS, "ignore_eos": True, **changes}
    return Request(0, prompt, replace(sampling, **wishes), method, tree)


def tokens_of(verdicts: Sequence[Verdict]) -> tuple[int, ...]:
    return tuple(token for verdict in verdicts for token in verdict.tokens)


def answer(pipeline: LocalPipeline, asked: Request) -> tuple[int, ...]:
    return tokens_of(list(pipeline.run(asked)))


def greedy_answer(target: Path, prompt: tuple[int, ...], num_tokens: int, dtype: str = "float32") -> tuple[int, ...]:
    """By transformers."""
    model, ids = AutoModelForCausalLM.from_pretrained(target, dtype=DTYPES[dtype]), torch.tensor([prompt])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return tuple(output[0, len(prompt) :].tolist())


def check_counts(pipeline: LocalPipeline, groups: int, num_tokens: int) -> None:
    metrics = pipeline.last.metrics
    assert metrics.hits + metrics.misses == num_tokens - 1
    check_timesteps(metrics, groups, "bita")


CASES = pairwise(SHAPES, ["float32", "float64"], TREES, ["greedy", "drawn"])


@pytest.mark.fast_cases("2in2-float32", "4in4-float64")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{shape[0]}in{shape[1]}")
def test_every_tree_says_what_transformers_says(models: Path, shape: tuple[int, int], dtype: str) -> None:
    """Every pair of shape, data type, tree, and greedy or sampled answers."""
    pipeline = make_pipeline(models, shape, dtype)
    expected = {
        "greedy": greedy_answer(models / "llama", PROMPT, NUM_TOKENS, dtype),
        "drawn": answer(pipeline, request(method="pp")),
    }
    assert expected["drawn"] != expected["greedy"]
    for _, _, tree, how in [case for case in CASES if case[:2] == (shape, dtype)]:
        assert answer(pipeline, request(tree, DRAWN if how == "drawn" else SamplingParams())) == expected[how]
        check_counts(pipeline, shape[1], NUM_TOKENS)


@pytest.mark.fast_cases("mistral-float32")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("target", ["mistral", "qwen2", "qwen3"])
def test_other_families(models: Path, target: str, dtype: str) -> None:
    """A sliding window shorter than the prompt, biases on queries, keys and values, or norms of queries and keys."""
    pipeline = make_pipeline(models, (4, 2), dtype, target)
    greedy = greedy_answer(models / target, PROMPT, NUM_TOKENS, dtype)
    drawn = answer(pipeline, request(method="pp"))
    for index, tree in enumerate(TREES):
        is_greedy = (index % 2 == 0) == (dtype == "float32")
        assert answer(pipeline, request(tree, SamplingParams() if is_greedy else DRAWN)) == (greedy if is_greedy else drawn)


def test_a_family_of_transformers_modules(tmp_path: Path) -> None:
    """With windows and caps of scores."""
    save_model("gemma2", tmp_path / "target")
    save_random_bita(tmp_path / "bita", tmp_path / "target", MASKS)
    pipeline = LocalPipeline.load(bare_spec(tmp_path / "target", zoo.LAYERS, (3, 1), None, tmp_path / "bita"))
    expected = greedy_answer(tmp_path / "target", PROMPT, NUM_TOKENS), answer(pipeline, request(method="pp"))
    for tree in TREES:
        for sampling, tokens in zip((SamplingParams(), DRAWN), expected, strict=True):
            assert answer(pipeline, request(tree, sampling)) == tokens


def test_latents_cannot_hold_a_learned_prompt(tmp_path: Path) -> None:
    save_model("youtu", tmp_path / "target")
    save_random_bita(tmp_path / "bita", tmp_path / "target", MASKS)
    with pytest.raises(UserError, match="layers all cache keys and values of one shape: use --bita none"):
        checked_bita(tmp_path / "bita", tmp_path / "target")


@pytest.mark.fast_cases
@pytest.mark.parametrize(("num_masks", "num_prompt_tokens"), [(1, 0), (4, 0), (1, 3), (9, 1)])
def test_other_bitas(models: Path, tmp_path: Path, num_masks: int, num_prompt_tokens: int) -> None:
    save_random_bita(tmp_path, models / "llama", num_masks, num_prompt_tokens)
    pipeline = make_pipeline(models, (2, 2), bita=tmp_path)
    drawn = answer(pipeline, request(method="pp"))
    for tree in (BitaOptions(), BitaOptions(children=2, depth=1), BitaOptions(shape="straightforward")):
        assert answer(pipeline, request(tree)) == drawn
        check_counts(pipeline, 2, NUM_TOKENS)


def test_even_nan_does_not_change_the_answer(models: Path, tmp_path: Path) -> None:
    save_random_bita(tmp_path, models / "llama", std=float("nan"))
    pipeline = make_pipeline(models, (2, 2), bita=tmp_path)
    for tree in TREES:
        assert answer(pipeline, request(tree, SamplingParams())) == greedy_answer(models / "llama", PROMPT, NUM_TOKENS)


def test_masks_are_no_tokens_that_penalties_count(models: Path) -> None:
    """Neither those behind the prompt nor those of the tree: no token is held for said before it is."""
    edges = (0, 1, 2, VOCAB - 3, VOCAB - 2, VOCAB - 1)
    sampling = SamplingParams(repetition_penalty=2.0, logit_bias=dict.fromkeys(edges, 12.0))
    prompt = tuple(token for token in PROMPT if token not in edges)
    pipeline = make_pipeline(models, (2, 2))
    plain = answer(pipeline, request(sampling=sampling, prompt=prompt, method="pp", max_tokens=12))
    assert {VOCAB - 1, VOCAB - 2} & set(plain)
    for tree in TREES:
        assert answer(pipeline, request(tree, sampling, prompt, max_tokens=12)) == plain


@pytest.mark.fast_cases("513")
@pytest.mark.parametrize("num_tokens", [1, KNEE_ROWS - 1, KNEE_ROWS, KNEE_ROWS + 1, 2 * KNEE_ROWS + 30])
def test_prompts_of_one_token_and_of_several_chunks(models: Path, num_tokens: int) -> None:
    prompt = tuple(torch.randint(3, VOCAB, (num_tokens,), generator=torch.Generator().manual_seed(5)).tolist())
    pipeline, sampling = make_pipeline(models, (4, 2)), replace(DRAWN, repetition_penalty=1.3)
    drawn = answer(pipeline, request(sampling=sampling, prompt=prompt, method="pp"))
    assert answer(pipeline, request(sampling=sampling, prompt=prompt)) == drawn
    assert answer(pipeline, request(sampling=SamplingParams(), prompt=prompt)) == greedy_answer(
        models / "llama", prompt, NUM_TOKENS
    )


def test_a_vocabulary_smaller_than_the_names_asked_for(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "llama", layers=LAYERS, vocab=20)
    save_random_bita(tmp_path / "llama-bita", tmp_path / "llama", MASKS)
    pipeline = make_pipeline(tmp_path, (2, 2))
    prompt = tuple(token % 20 for token in PROMPT)
    drawn = answer(pipeline, request(prompt=prompt, method="pp"))
    for tree in (BitaOptions(children=21), BitaOptions(children=64, depth=1)):
        assert answer(pipeline, request(tree, prompt=prompt)) == drawn
        check_counts(pipeline, 2, NUM_TOKENS)
    assert (
        pipeline.last.metrics.misses == NUM_TOKENS // 2
    )  # every pass but the last gives two: whatever comes next is among all there are


def test_no_bita_no_answer(models: Path) -> None:
    pipeline = LocalPipeline.load(bare_spec(models / "llama", LAYERS, (2, 2)))
    with pytest.raises(UserError, match="method bita needs what pipedec train bita has learned"):
        answer(pipeline, request())


# Masks that know the answer.

Teacher = Callable[[int], Sequence[int]]


class Oracle:
    """Makes forecasts name what ``teacher`` says of a token's number in the answer; the first name is the best.

    ``asked`` lists the numbers of the tokens in each forecast.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, teacher: Teacher) -> None:
        self.asked: list[list[int]] = []
        self._teacher = teacher
        self._num_tokens = 0
        advance = FinalStageWorker.advance

        def taught(worker: FinalStageWorker, message: StageMessage, *span: Any) -> StageMessage:
            if any(update.opening is not None for update in message.updates):
                self._num_tokens = 0
            reply = advance(worker, message, *span)
            return dataclasses.replace(reply, updates=tuple(map(self._taught_update, reply.updates)))

        monkeypatch.setattr(FinalStageWorker, "advance", taught)

    def _taught_update(self, update: RequestUpdate) -> RequestUpdate:
        if update.verdict is None or not update.verdict.tokens:  # a lane is closed
            return update
        return replace(update, verdict=self._taught(update.verdict))

    def _taught(self, verdict: Verdict) -> Verdict:
        self._num_tokens += len(verdict.tokens)
        forecast = forecast_of(verdict)
        numbers = list(range(self._num_tokens, self._num_tokens + len(forecast)))
        self.asked.append(numbers)
        named = zip(numbers, forecast, strict=True)
        taught = tuple(tuple(self._teacher(number))[: len(names)] for number, names in named)
        return Verdict.of(*verdict.tokens, finished=verdict.finished, forecast=taught)


def forecast_of(verdict: Verdict) -> tuple[tuple[int, ...], ...]:
    [accepted] = verdict.accepted
    return accepted.forecast


def lengths(pipeline: LocalPipeline, asked: Request) -> tuple[list[int], tuple[int, ...]]:
    """How many tokens every pass gave, and the answer."""
    verdicts = list(pipeline.run(asked))
    return [len(verdict.tokens) for verdict in verdicts], tokens_of(verdicts)


def wrong(token: int, by: int = 1) -> int:
    return (token + by) % VOCAB


LONG = 60  # tokens that the oracle knows


@pytest.fixture(scope="module", params=["greedy", "drawn"])
def known(models: Path, request: pytest.FixtureRequest) -> tuple[SamplingParams, tuple[int, ...]]:
    sampling = {"greedy": SamplingParams(), "drawn": DRAWN}[request.param]
    asked = Request(0, PROMPT, replace(sampling, max_tokens=LONG, ignore_eos=True), "pp")
    return sampling, answer(make_pipeline(models, (1, 1)), asked)


@pytest.mark.fast_cases
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(("children", "tree_shape"), [(1, "efficient"), (4, "efficient"), (1, "full"), (3, "full")])
def test_masks_that_are_always_right_fill_every_pass(
    models: Path,
    known: tuple[SamplingParams, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    children: int,
    tree_shape: str,
    depth: int,
) -> None:
    sampling, said = known
    oracle = Oracle(monkeypatch, lambda number: [wrong(said[number], by) for by in range(children)])
    pipeline, num_tokens = make_pipeline(models, (4, 2)), 1 + 4 * (depth + 1)
    tree = BitaOptions(children=children, depth=depth, shape=tree_shape)
    counts, found = lengths(pipeline, request(tree, sampling, max_tokens=num_tokens))
    assert (counts, found) == ([1] + 4 * [depth + 1], said[:num_tokens])
    metrics = pipeline.last.metrics
    assert (metrics.hits, metrics.misses, metrics.timesteps) == (4 * depth, 4, 4 * 2)
    assert oracle.asked[0] == list(range(1, depth + 1))  # the masks behind the prompt, of which the last token's own is known


@pytest.mark.parametrize(("tree_shape", "expected"), [("efficient", [1, 2, 2, 2, 2]), ("full", [1, 4, 4])])
def test_only_the_best_candidate_has_children_in_the_efficient_tree(
    models: Path,
    known: tuple[SamplingParams, tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
    tree_shape: str,
    expected: list[int],
) -> None:
    """The right token is named second each time."""
    sampling, said = known
    Oracle(monkeypatch, lambda number: [wrong(said[number]), said[number]])
    tree = BitaOptions(children=2, shape=tree_shape)
    asked = request(tree, sampling, max_tokens=sum(expected))
    assert lengths(make_pipeline(models, (2, 2)), asked) == (expected, said[: sum(expected)])


@pytest.mark.parametrize("tree_shape", ["efficient", "full", "straightforward"])
def test_a_rejection_stops_the_walk_also_with_one_candidate(
    models: Path, known: tuple[SamplingParams, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, tree_shape: str
) -> None:
    """What is right behind a wrong candidate counts for nothing (Algorithm 1 in the paper goes on where k is 1)."""
    sampling, said = known
    Oracle(monkeypatch, lambda number: [wrong(said[number]) if number % 3 == 1 else said[number]])
    tree = BitaOptions(children=1, shape=tree_shape)
    # Token 0 comes with the prompt, and 1 is missed. Then 2 and 3 are right and 4 is wrong, and so on.
    expected = {"efficient": [1, 1, 3, 3, 3], "full": [1, 1, 3, 3, 3], "straightforward": [1, 1, 3, 2, 1, 3]}[tree_shape]
    asked = request(tree, sampling, max_tokens=11)
    assert lengths(make_pipeline(models, (2, 2)), asked) == (expected, said[:11])


def test_figure_4_of_the_paper(
    models: Path, known: tuple[SamplingParams, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three masks behind the last token alone, of which those are used up whose tokens are accepted: 1, 4, 1 and 3 tokens."""
    sampling, said = known
    Oracle(monkeypatch, lambda number: [wrong(said[number]) if number == 8 else said[number]])
    pipeline = make_pipeline(models, (2, 2))
    asked = request(BitaOptions(shape="straightforward"), sampling, max_tokens=11)
    verdicts = list(pipeline.run(asked))
    assert [len(verdict.tokens) for verdict in verdicts] == [1, 4, 1, 3, 2]
    assert [len(forecast_of(verdict)) for verdict in verdicts] == [3, 0, 3, 1, 0]
    assert forecast_of(verdicts[0]) == tuple((token,) for token in said[1:4])
    assert tokens_of(verdicts) == said[:11]


@pytest.mark.fast_cases
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 6, 9])
def test_an_answer_may_end_inside_a_tree(
    models: Path, known: tuple[SamplingParams, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch, num_tokens: int
) -> None:
    """By its length or by a stop token; the next request finds nothing of what was left."""
    sampling, said = known
    Oracle(monkeypatch, lambda number: [said[number], wrong(said[number])])
    pipeline, tree = make_pipeline(models, (4, 2)), BitaOptions(children=2)
    verdicts = list(pipeline.run(request(tree, sampling, max_tokens=num_tokens)))
    assert (tokens_of(verdicts), verdicts[-1].finished, forecast_of(verdicts[-1])) == (said[:num_tokens], "length", ())
    check_counts(pipeline, 2, num_tokens)
    stop = said[num_tokens - 1]
    kept = said[: said.index(stop) + 1]
    verdicts = list(pipeline.run(request(tree, sampling, stop_token_ids=(stop,))))
    assert (tokens_of(verdicts), verdicts[-1].finished, forecast_of(verdicts[-1])) == (kept, "stop", ())
    check_counts(pipeline, 2, len(kept))
    counts, found = lengths(pipeline, request(tree, sampling, max_tokens=9))
    assert (counts, found) == ([1, 4, 4], said[:9])


@BOTH_IMPLS
def test_forecasts_are_those_of_transformers_after_the_accepted_text(models: Path, impl: ModelImpl) -> None:
    """After the prompt and after each pass, the tokens that the masks behind the last judged token find likeliest."""
    pipeline = make_pipeline(models, (4, 2), "float64", impl=impl)
    config = model_config(models / "llama")
    weights = BitaWeights.load(models / "llama-bita", config, range(LAYERS), torch.float64, torch.device("cpu"))
    naive = NaiveBita(AutoModelForCausalLM.from_pretrained(models / "llama", dtype=torch.float64).eval(), weights)
    for prompt in (PROMPT, PROMPT * 52):  # one chunk, and one that begins a second
        for tree in (BitaOptions(children=4), BitaOptions(children=4, depth=2), BitaOptions(children=4, shape="full")):
            text = list(prompt)
            verdicts = list(pipeline.run(request(tree, SamplingParams(), prompt=prompt, max_tokens=5)))
            for verdict in verdicts[:-1]:
                text += verdict.tokens
                depth, forecast = tree.depth or MASKS, forecast_of(verdict)
                num_later = depth - len(forecast)  # accepted rows below the last one that has masks
                expected = naive.logits(text[: -1 - num_later], depth)[num_later:].topk(4).indices
                assert num_later < depth and forecast == tuple(map(tuple, expected.tolist()))
